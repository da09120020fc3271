"""The newest checkpoint that is whole is taken; a broken one is named, and never loaded."""

from __future__ import annotations

from pathlib import Path

from evenstep import checkpoint
from evenstep import checkpoint_files as files

import pytest
from checkpoint_run import names


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


# --- which checkpoint is taken -------------------------------------------------------------------


def find(run_dir: Path, resume: str = "auto") -> Path | None:
    return checkpoint.find(run_dir, resume)


def fake(run_dir: Path, step: int) -> Path:
    """A complete checkpoint, as far as files go."""
    final = files.directory(run_dir, step)
    tmp = files.temporary(final)
    files.begin(tmp)
    (tmp / "model.safetensors").write_bytes(b"weights of step %d" % step)
    (tmp / "state.json").write_text(f'{{"step": {step}}}')
    files.complete(tmp, final)
    return final


def test_nothing_to_resume_from_is_none(run_dir: Path) -> None:
    assert find(run_dir) is None


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncated", "bit flipped", "deleted"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_is_taken(
    run_dir: Path, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good, broken = fake(run_dir, 90), fake(run_dir, 100)
    file = broken / name
    content = bytearray(file.read_bytes())
    if damage == "truncated":
        file.write_bytes(content[:-3])
    elif damage == "bit flipped":
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    else:
        file.unlink()
    assert find(run_dir) == good
    printed = capsys.readouterr().err
    assert str(broken) in printed
    assert name in printed
    with pytest.raises(ValueError, match=name):
        find(run_dir, str(broken))


def test_every_flipped_bit_of_a_checkpoint_is_detected(run_dir: Path) -> None:
    path = fake(run_dir, 1)
    for file in path.iterdir():
        content = file.read_bytes()
        for bit in range(8 * len(content)):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            with pytest.raises(ValueError, match=str(path)):
                files.verify(path)
        file.write_bytes(content)
    files.verify(path)


def test_a_file_that_was_added_is_not_loaded(run_dir: Path) -> None:
    path = fake(run_dir, 1)
    (path / "notes.txt").write_text("best so far")
    files.verify(path)
    (path / "other.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"other\.safetensors"):
        files.verify(path)


def test_an_unfinished_save_is_named_and_never_loaded(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = fake(run_dir, 90)
    tmp = files.temporary(files.directory(run_dir, 100))
    tmp.mkdir()
    (tmp / "model.safetensors").write_bytes(b"half of the wei")
    assert find(run_dir) == good
    assert str(tmp) in capsys.readouterr().err


def test_resume_takes_a_path_or_the_best_pointer(run_dir: Path) -> None:
    first, second = fake(run_dir, 1), fake(run_dir, 2)
    files.point_best(run_dir, 1)
    assert (run_dir / "best").read_text() == "checkpoints/step-00000001\n"
    assert find(run_dir, str(run_dir / "best")) == first
    assert find(run_dir, str(second)) == second
    with pytest.raises(ValueError, match="step-00000003"):
        find(run_dir, str(files.directory(run_dir, 3)))


# --- which checkpoints stay ----------------------------------------------------------------------


def test_the_newest_by_number_and_the_best_stay(run_dir: Path) -> None:
    for step in (1000, 200, 90, 80, 70, 60, 50, 40, 30, 20):
        # Without padding, text order is 1000, 20, 200, 30, ..., 90.
        fake(run_dir, step).rename(run_dir / "checkpoints" / f"step-{step}")
    (run_dir / "checkpoints" / "step-mine").mkdir()
    (run_dir / "checkpoints" / "notes.txt").write_text("mine")
    files.prune(run_dir, keep=2, best_step=30)
    assert names(run_dir) == ["notes.txt", "step-1000", "step-200", "step-30", "step-mine"]
    assert find(run_dir) == run_dir / "checkpoints" / "step-1000"


def test_a_deletion_that_is_killed_leaves_nothing_that_looks_complete(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        fake(run_dir, step)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            files.prune(run_dir, keep=1, best_step=None)
    assert names(run_dir) == [".step-00000001.trash", "step-00000002"]
    files.prune(run_dir, keep=1, best_step=None)
    assert names(run_dir) == ["step-00000002"]


def test_checkpoints_that_were_passed_over_do_not_push_out_the_ones_that_are_used(
    run_dir: Path,
) -> None:
    used = fake(run_dir, 100)
    for step in (150, 200):
        (fake(run_dir, step) / "manifest.json").unlink()
    assert find(run_dir) == used
    files.abandon_newer(run_dir, 100)
    new = fake(run_dir, 120)
    files.prune(run_dir, keep=2, best_step=None)
    assert find(run_dir) == new
    assert names(run_dir) == [
        "step-00000100",
        "step-00000120",
        "step-00000150.abandoned",
        "step-00000200.abandoned",
    ]
