"""Tokenizers: a BPE that is trained once, and those of hub ids and local folders."""

import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from evenstep import packing, tokenization
from evenstep.datasets import stdlib

import pytest

TEXTS = [f"def function_{i}(argument):\n    return argument + {i}\n" for i in range(50)]
TRAIN = f"""
import sys
from pathlib import Path
from evenstep import tokenization
tokenizer = tokenization.byte_level_bpe({TEXTS!r}, 350, Path(sys.argv[1]))
print(tokenization.identity(tokenizer), len(tokenizer))
"""


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return tokenization.byte_level_bpe(TEXTS, 300, tmp_path_factory.mktemp("tokenizers"))


@pytest.mark.parametrize(
    "text",
    [
        "return argument",
        "  two  spaces\n\n\ttab\r\n and an end ",
        "日本語 é 🙂 \x00\x7f",
        "what ends a document is written <|endoftext|>, and <|pad|> pads",
        "don't clean up , or join : what was apart .",
    ],
)
def test_any_text_comes_back_unchanged(bpe, text):
    (ids,) = packing.plain([text], bpe)
    assert bpe.decode(ids) == text
    assert not {bpe.eos_token_id, bpe.pad_token_id} & set(ids)


@pytest.mark.timeout(60)
def test_a_word_as_long_as_a_picture_is_no_hindrance():
    word = "".join(random.Random(0).choices("abcdefghij", k=1_000_000))
    tokenizer = tokenization.train_bpe(["what a word: " + word], 300)
    assert tokenizer.decode(tokenizer.encode(word[:5000]).ids) == word[:5000]


def test_the_end_and_the_padding_are_tokens_of_their_own(bpe):
    assert bpe.eos_token_id != bpe.pad_token_id
    assert packing.start_token(bpe) == bpe.eos_token_id
    assert len(bpe) == 300


def test_two_processes_at_once_train_one_tokenizer(tmp_path):
    """With different numbers of threads, and one beside them in a folder of its own."""
    folders = ["shared", "shared", "other"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TRAIN, str(tmp_path / folder)],
            env={**os.environ, "RAYON_NUM_THREADS": str(1 + threads)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for threads, folder in enumerate(folders)
    ]
    outputs = {process.communicate(timeout=120)[0] for process in processes}
    assert len(outputs) == 1
    assert outputs.pop().split()[1] == "350"
    (one,), (other,) = ([*(tmp_path / name).glob("*.json")] for name in ("shared", "other"))
    assert one.read_bytes() == other.read_bytes()
    assert not list(tmp_path.glob("*/*.tmp"))


def test_a_cached_tokenizer_is_read_and_another_text_or_size_trains_another(tmp_path, monkeypatch):
    first = tokenization.identity(tokenization.byte_level_bpe(TEXTS, 280, tmp_path))
    monkeypatch.setattr(tokenization, "train_bpe", None)
    assert tokenization.identity(tokenization.byte_level_bpe(TEXTS, 280, tmp_path)) == first
    with pytest.raises(TypeError):
        tokenization.byte_level_bpe(TEXTS[1:], 280, tmp_path)
    with pytest.raises(TypeError):
        tokenization.byte_level_bpe(TEXTS, 281, tmp_path)


def test_a_cache_that_cannot_be_written_is_told_and_serves_for_what_it_has(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be kept in .*file.*: set XDG_CACHE_HOME"):
        tokenization.byte_level_bpe(TEXTS, 280, tmp_path / "file" / "evenstep")
    first = tokenization.identity(tokenization.byte_level_bpe(TEXTS, 280, tmp_path))
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: pytest.fail("writes"))
    monkeypatch.setattr("filelock.FileLock", lambda *_: pytest.fail("writes"))
    assert tokenization.identity(tokenization.byte_level_bpe(TEXTS, 280, tmp_path)) == first


def test_an_end_token_pads_where_there_is_no_padding_token(tmp_path, bpe):
    """CASES 32: GPT-2 has none."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=bpe.backend_tokenizer, eos_token=tokenization.END
    ).save_pretrained(tmp_path)
    tokenizer = tokenization.pretrained(str(tmp_path))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == bpe.eos_token_id
    assert tokenization.identity(tokenizer) != tokenization.identity(bpe)


def test_tokenizers_that_do_not_serve_are_named(tmp_path, bpe):
    from transformers import PreTrainedTokenizerFast

    with pytest.raises(ValueError, match="'nobody/nothing' cannot be read"):
        tokenization.pretrained("nobody/nothing")
    with pytest.raises(ValueError, match=r"'gtp2' cannot be read.*(.|\n)*type .*nearest: gpt2"):
        tokenization.pretrained("gtp2")
    PreTrainedTokenizerFast(tokenizer_object=bpe.backend_tokenizer).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no end token"):
        tokenization.pretrained(str(tmp_path))


def test_the_standard_library_is_split_by_file_whatever_its_version():
    """A file that comes or goes moves no other one."""
    splits = stdlib.build(stdlib.Config(name="stdlib"))
    train, held_out = (set(split["path"]) for split in (splits.train, splits.eval))
    assert not train & held_out
    assert 0.03 < len(held_out) / len(train | held_out) < 0.08
    assert {"json/decoder.py", "abc.py", "argparse.py"} <= train | held_out
    assert not any("test" in path.split("/") for path in train | held_out)
    again = stdlib.build(stdlib.Config(name="stdlib", split_seed=1))
    assert set(again.eval["path"]) != held_out


def test_files_that_are_no_utf8_or_empty_are_left_out(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "test").mkdir()
    for name in ("a.py", "b/c.py", "b/d.txt", "test/e.py"):
        (tmp_path / name).write_bytes(b"x = 1\r\n")
    (tmp_path / "empty.py").write_bytes(b"")
    (tmp_path / "latin.py").write_bytes("é".encode("latin-1"))
    assert stdlib.read(tmp_path) == {"a.py": "x = 1\r\n", "b/c.py": "x = 1\r\n"}


@pytest.mark.parametrize(
    ("model", "expected"),
    [("bert", "bpe"), ("text_cnn", "bpe"), ("roberta-base", "roberta-base"), ("a/b", "a/b")],
)
def test_auto_is_the_tokenizer_of_a_model_that_has_weights(model, expected):
    section = SimpleNamespace(name=model, revision="v1", trust_remote_code=True)
    name, source = tokenization.chosen("auto", section, "text_encoder")
    assert name == expected
    has_own = {"revision": "v1", "trust_remote_code": True}
    assert source == (has_own if expected == model else {})
