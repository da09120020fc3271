"""What a language model makes of its evaluation split, next to gzip and xz.

    python benchmarks/compression.py runs/<name>

prints bits per byte: of the model at each evaluation, and of `gzip -9` and `xz -9` on the same
documents, each document by itself and all of them as one file (which lets them look back, into a
window of 32 KB and of 64 MB). Lower is better; the lower of the two is the one to beat.
"""

from __future__ import annotations

import gzip
import json
import lzma
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from evenstep import packing
from evenstep.sections import specialise
from evenstep.task import find_module
from evenstep.tasks import causal_lm

import yaml

COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gzip -9": partial(gzip.compress, compresslevel=9),
    "xz -9": partial(lzma.compress, preset=9),
}


def main(run_dir: Path) -> None:
    documents = held_out(yaml.safe_load((run_dir / "config.yaml").read_text())["task"])
    size = sum(map(len, documents))
    print(f"{len(documents)} documents, {size:,} bytes held out; bits per byte")
    for name, compress in COMPRESSORS.items():
        one_by_one = sum(len(compress(document)) for document in documents)
        together = len(compress(b"".join(documents)))
        print(f"{name:8}  {8 * one_by_one / size:.4f} one by one, {8 * together / size:.4f} as one")
    for step, bits in curve(run_dir):
        print(f"model     {bits:.4f} at step {step}")


def held_out(task: dict[str, Any]) -> list[bytes]:
    config = specialise(causal_lm.Config, task).model_validate(task)
    data = find_module("datasets", config.data.name, fallback="text")
    splits = data.build(config.data)
    return [text.encode() for text in packing.texts(splits.eval, config.text_column)]


def curve(run_dir: Path) -> list[tuple[int, float]]:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    key = "eval/bits_per_byte"
    return [(row["step"], row[key]) for row in rows if key in row]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
