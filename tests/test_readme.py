"""What the README shows a forker works as it stands there."""

import re
import sys

import pytest
from launching import ROOT, command, run, summary

pytestmark = pytest.mark.processes
README = (ROOT / "README.md").read_text()


def block(kind, containing):
    """The one code block of a language that holds a text."""
    blocks = re.findall(rf"```{kind}\n(.*?)```", README, re.DOTALL)
    (found,) = [text for text in blocks if containing in text]
    return found


def test_the_task_trains_alike_on_two_processes(tmp_path):
    (tmp_path / "my_task.py").write_text(block("python", "return Task("))
    config = tmp_path / "my_run.yaml"
    config.write_text(block("yaml", "name: my_task"))
    losses = []
    for processes in (1, 2):
        name = f"on-{processes}"
        overrides = [f"output_dir={tmp_path}", f"name={name}", "precision=fp64", "tracking.with=[]"]
        code, output = run(command(processes, str(config), *overrides), PYTHONPATH=str(tmp_path))
        assert code == 0, output
        losses.append(summary(tmp_path / name)["metrics"]["eval/mse"])
    assert losses[0] < 0.05
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_the_model_trains(tmp_path):
    (tmp_path / "tiny.py").write_text(block("python", "AdaptiveAvgPool2d"))
    overrides = ["task.model.name=tiny", "task.model.width=32", "epochs=null", "steps=3"]
    where = [f"output_dir={tmp_path}", "name=tiny", "tracking.with=[]"]
    train = [sys.executable, str(ROOT / "train.py"), "configs/digits.yaml"]
    code, output = run([*train, *overrides, *where], PYTHONPATH=str(tmp_path))
    assert code == 0, output
