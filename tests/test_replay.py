"""Steps that are computed again after a resume are held against what metrics.jsonl has of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from evenstep.replay import JsonLines, Replay, rounding

import pytest
from launching import ROOT, command, metrics, run, train

ROWS = [
    {"step": 10, "train/loss": 0.5, "train/samples_per_second": 90.0},
    {"step": 20, "train/loss": 0.25, "eval/loss": None, "eval/accuracy": 1},
    {"step": 30, "train/loss": 1e-9},
]


def replayed(folder: Path, rows: list[dict[str, Any]], allowed: float = 0.0) -> list[str]:
    """What is said when `rows` are computed after ROWS have been logged."""
    lines, said = JsonLines(folder / "metrics.jsonl"), list[str]()
    for row in ROWS:
        lines.append(row)
    replay = Replay(lines, allowed, said.append)
    for row in rows:
        replay.check(row)
    return said


def report(folder: Path) -> Any:
    return json.loads((folder / "replay.json").read_text())


def test_the_same_rows_are_equal_whatever_the_speed_and_nan_equals_nan(tmp_path: Path) -> None:
    again = [{**row} for row in ROWS]
    again[0]["train/samples_per_second"] = 40.0
    again[1]["eval/loss"] = math.nan
    said = replayed(tmp_path, again)
    assert said == ["rows of metrics.jsonl that were computed again: 3 equal"]
    assert report(tmp_path)["first_difference"] is None


def test_the_first_difference_is_named_with_both_values_and_all_are_counted(tmp_path: Path) -> None:
    again = [ROWS[0], {**ROWS[1], "eval/loss": 0.125}, {**ROWS[2], "train/loss": 2e-9}]
    warning, count = replayed(tmp_path, again)
    for text in ("step 20", "eval/loss", "null", "0.125"):
        assert text in warning
    assert count.endswith("1 equal, 2 different")
    first = {"step": 20, "key": "eval/loss", "logged": None, "now": 0.125}
    assert report(tmp_path)["first_difference"] == first


def test_rounding_is_no_difference_where_it_is_allowed_and_is_counted(tmp_path: Path) -> None:
    close = [{"step": 10, "train/loss": 0.5 * (1 + 1e-6)}, {"step": 30, "train/loss": 2e-9}]
    (tmp_path / "exact").mkdir()
    assert "2 different" in replayed(tmp_path / "exact", close)[-1]
    (count,) = replayed(tmp_path, close, rounding("fp32", "rounding"))
    assert count.endswith("2 equal but for rounding")


def test_a_row_that_is_not_there_and_a_key_of_one_row_are_no_differences(tmp_path: Path) -> None:
    said = replayed(tmp_path, [{"step": 15, "train/loss": 9.0}, {"step": 30, "train/lr": 9.0}])
    assert said == ["rows of metrics.jsonl that were computed again: 1 equal, 1 missing"]


def test_bitwise_allows_nothing_and_a_shorter_format_more() -> None:
    assert rounding("fp32", "bitwise") == 0
    allowed = [rounding(name, "rounding") for name in ("fp64", "fp32", "fp16", "bf16")]
    assert allowed == sorted(allowed)
    assert allowed[0] < 1e-7
    assert allowed[-1] < 0.1


@pytest.mark.processes
def test_a_run_that_goes_back_tells_whether_anything_has_changed(tmp_path: Path) -> None:
    run_dir = train(tmp_path, "a", 1, "steps=20", "save_every=10")
    rows = metrics(run_dir)
    back = f"resume={run_dir / 'checkpoints' / 'step-00000010'}"
    arguments = command(
        1, str(tmp_path / "exact.yaml"), "name=a", "steps=20", "save_every=10", back
    )
    code, output = run(arguments)
    assert code == 0, output
    assert "computed again: 10 equal" in output
    assert metrics(run_dir) == rows
    task = (ROOT / "tests" / "exact_task.py").read_text()
    (tmp_path / "changed").mkdir()
    (tmp_path / "changed" / "exact_task.py").write_text(
        task.replace("+ 0.1 * torch", "+ 0.2 * torch")
    )
    code, output = run(arguments, PYTHONPATH=str(tmp_path / "changed"))
    assert code == 0, output
    assert "warning: step 11 came out differently" in output
    assert f"train/loss was {rows[10]['train/loss']!r} and is " in output
    assert "computed again: 10 different" in output
    assert metrics(run_dir) == rows
