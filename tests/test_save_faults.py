"""A save that is cut off at any moment loses no checkpoint, and leaves none that is broken."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from evenstep import checkpoint
from evenstep.checkpoint import PlainTensors, Saver
from evenstep.files import write_atomically
from evenstep.replay import JsonLines

import faulty_disk
import pytest
import torch
from faulty_disk import Disk
from torch import nn

# pathlib of Python 3.10 keeps its own references to the functions of os.
pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="replaces functions of os")

# What is there before: the steps saved, which is the best, then the step to save, and the best.
SCENARIOS: dict[str, tuple[list[int], int | None, int, int | None]] = {
    "the first save": ([], None, 1, None),
    "the first save, which is the best": ([], None, 1, 1),
    "a save beside an older one": ([1], None, 2, None),
    "a save that deletes the oldest": ([1, 2], None, 3, None),
    "a save that becomes the best, so that the old best goes": ([1, 2, 3], 1, 4, 4),
    "a save after which the best stays": ([1, 2, 3], 1, 4, 1),
    "the same step again": ([1, 2], 2, 2, 2),
    "the same step again, the only one": ([1], 1, 1, 1),
    "the same step again, the only one, and no best": ([1], None, 1, None),
}
OLD, NEW = 1.0, 2.0


def tensors(value: float) -> PlainTensors:
    """A model with one weight of this value, and an optimizer with state."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    model(torch.ones(1)).backward()
    optimizer.step()
    nn.init.constant_(model.weight, value)
    return PlainTensors(model, optimizer, None)


def save(run_dir: Path, step: int, best: int | None, value: float) -> None:
    with Saver(run_dir, keep=2) as saver:
        saver.save(step, tensors(value), state={}, config_yaml="seed: 0\n", best_step=best)


class Scenario:
    def __init__(self, folder: Path, name: str) -> None:
        self.steps, self.old_best, self.step, self.best = SCENARIOS[name]
        self.before, self.run_dir = folder / "before", folder / "run"
        (self.before / "checkpoints" / "step-mine").mkdir(parents=True)
        (self.before / "checkpoints" / "notes.txt").write_text("mine")
        if not self.steps:
            shutil.rmtree(self.before / "checkpoints")
        for step in self.steps:
            save(self.before, step, self.old_best, OLD)
        self.reset()

    def reset(self) -> None:
        faulty_disk.copy(self.before, self.run_dir)

    def save(self) -> None:
        save(self.run_dir, self.step, self.best, NEW)

    def moments(self) -> list[str]:
        """The operations of a save that nothing happens to."""
        with Disk(self.run_dir).in_place() as disk:
            self.save()
        self.reset()
        return disk.done

    def check(self, run_dir: Path, cut: str) -> str:
        """What is found afterwards: "old", "new", or "" if there is none and was none."""
        best = run_dir / "best"
        if best.exists():
            assert checkpoint.find(run_dir, "best"), cut
        elif self.old_best:
            pytest.fail(f"{cut}: no `best` any more")
        path = checkpoint.find(run_dir, "auto")
        if path is None:
            assert not self.steps, f"{cut}: nothing is left"
            return ""
        restored = tensors(0.0)
        step = checkpoint.load(path, restored)["step"]
        value = restored.model.weight.item()
        old = (self.steps[-1], OLD) if self.steps else None
        assert (step, value) in (old, (self.step, NEW)), cut
        if self.steps:
            assert (run_dir / "checkpoints" / "notes.txt").read_text() == "mine", cut
            assert (run_dir / "checkpoints" / "step-mine").is_dir(), cut
        return "new" if value == NEW else "old"


@pytest.fixture(params=SCENARIOS)
def scenario(request: pytest.FixtureRequest, tmp_path: Path) -> Scenario:
    return Scenario(tmp_path, request.param)


def each_moment(scenario: Scenario) -> Iterator[tuple[int, str]]:
    done = scenario.moments()
    assert len(done) > 15
    assert {operation.split()[0] for operation in done} >= {"open", "write", "fsync", "rename"}
    yield from enumerate(done, 1)


def in_order(found: list[str], scenario: Scenario) -> bool:
    """First the checkpoint before (or none), from some moment on the new one."""
    switch = found.index("new")
    before = "old" if scenario.steps else ""
    return found == [before] * switch + ["new"] * (len(found) - switch) and switch > 5


def test_a_kill_at_any_operation_leaves_a_checkpoint_to_resume_from(scenario: Scenario) -> None:
    found = []
    for moment, operation in each_moment(scenario):

        def killed_save(moment: int = moment) -> None:
            with Disk(scenario.run_dir, moment, faulty_disk.killed).in_place():
                scenario.save()

        assert not faulty_disk.in_a_fork(killed_save), operation
        found.append(scenario.check(scenario.run_dir, f"killed at {moment}: {operation}"))
        scenario.reset()
    assert in_order(found, scenario)


@pytest.mark.parametrize(
    ("names", "data"),
    [(False, False), (True, False), (False, True)],
    ids=["all that was not flushed", "data not flushed", "names not flushed"],
)
def test_a_power_cut_at_any_operation_leaves_a_checkpoint_to_resume_from(
    scenario: Scenario, names: bool, data: bool, tmp_path: Path
) -> None:
    disk, left = Disk(scenario.run_dir), tmp_path / "left"

    def cut() -> None:
        disk.after_power_cut(left / str(len(disk.done)), names=names, data=data)

    left.mkdir()
    disk.watch = cut
    with disk.in_place():
        scenario.save()
        disk.watch = lambda: None
    cut()
    found = [
        scenario.check(left / str(moment), f"cut before {moment}: {operation}")
        for moment, operation in enumerate([*disk.done, "the end"])
    ]
    assert in_order(found, scenario)


def test_an_error_at_any_operation_is_raised_and_leaves_a_checkpoint(scenario: Scenario) -> None:
    for moment, operation in each_moment(scenario):
        disk = Disk(scenario.run_dir, moment, faulty_disk.full)
        with disk.in_place(), pytest.raises((RuntimeError, OSError), match="No space left"):
            scenario.save()
        scenario.check(scenario.run_dir, f"an error at {moment}: {operation}")
        with suppress(FileNotFoundError):
            left = [p.name for p in (scenario.run_dir / "checkpoints").glob(".*.tmp")]
            assert not left, operation
        scenario.reset()


def test_a_row_that_a_full_disk_refuses_names_the_file_and_is_not_written_later(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    disk = Disk(tmp_path)
    with disk.in_place():
        lines = JsonLines(path)
        disk.moment, disk.fault = len(disk.done) + 1, faulty_disk.full
        with pytest.raises(OSError, match=r"No space left on device: '.*metrics\.jsonl'"):
            lines.append({"step": 2, "train/loss": 0.5})
        lines.close()
    assert disk.done[-1] == "write metrics.jsonl"
    assert JsonLines(path).last_step == 1
    assert path.read_text() == '{"step": 1}\n'


def test_a_row_that_is_logged_and_a_small_file_survive_a_power_cut(tmp_path: Path) -> None:
    root, left = tmp_path / "run", tmp_path / "left"
    root.mkdir()
    disk = Disk(root)
    with disk.in_place():
        lines = JsonLines(root / "metrics.jsonl")
        lines.append({"step": 1})
        write_atomically(root / "best", "checkpoints/step-00000001\n")
    disk.after_power_cut(left, names=False, data=False)
    assert (left / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert (left / "best").read_text() == "checkpoints/step-00000001\n"
