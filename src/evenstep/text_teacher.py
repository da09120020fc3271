"""A teacher of text classification: `final/` of a run, or a text model of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from evenstep import tokenization
from evenstep.distillation import Teacher, frozen, is_of_transformers
from evenstep.models import text_encoder
from evenstep.models._transformers import read_config
from evenstep.text_models import read_final

from torch import Tensor, nn


@dataclass(frozen=True)
class TextTeacher(Teacher):
    """Raises ValueError also for one with another tokenizer, or that reads shorter texts."""

    max_length: int
    """Tokens of the student's texts."""

    tokenizer: InitVar[Any]
    """The student's."""

    def __post_init__(self, tokenizer: Any) -> None:
        super().__post_init__()
        name = self.config.name
        own = tokenization.pretrained(name, self.config.revision, needs_end=False)
        if tokenization.identity(own) != tokenization.identity(tokenizer):
            raise ValueError(
                f"the teacher {name} has another tokenizer than the student (of {len(own)} and "
                f"{len(tokenizer)} tokens): set task.tokenizer={name}"
            )

    def read(self) -> tuple[nn.Module, Sequence[str]]:
        return _read(self.config.name, self.config.revision, self.max_length)

    def output(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> Any:
        return network(**inputs)


@lru_cache(maxsize=1)  # one teacher a run; checked, then used at each step
def _read(name: str, revision: str | None, max_length: int) -> tuple[nn.Module, Sequence[str]]:
    folder = Path(name).expanduser()
    if folder.is_dir() and not (folder / "tokenizer_config.json").is_file():
        raise ValueError(
            f"the teacher {name} has no tokenizer: give the final/ of a run of text classification"
        )
    tokenizer = tokenization.pretrained(name, revision, needs_end=False)
    if folder.is_dir() and not is_of_transformers(folder):
        network, classes = read_final(folder, tokenizer, max_length)
        return frozen(network), classes
    section = text_encoder.Config(name=name, revision=revision)
    classes = list(read_config(section).id2label.values())
    network = text_encoder.build(
        section, tokenizer=tokenizer, max_length=max_length, num_labels=len(classes)
    )
    return frozen(network), classes
