"""The files that docs/extend.md shows are written into a copy of the repository, and train there
by the commands that it gives."""

import json
import re
import shlex
import shutil
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
from launching import ROOT, command, metrics, run, summary

pytestmark = pytest.mark.processes
GUIDE = (ROOT / "docs" / "extend.md").read_text()
FILES = re.findall(r"`([\w/]+\.(?:py|yaml))`:\n\n```\w+\n(.*?)```", GUIDE, re.DOTALL)
# One process for all: to import torch takes longer than to train.
TRAIN_EACH = (
    "import json, os, sys; os.chdir(os.path.dirname(__file__)); import train\n"
    "for argv in json.loads(sys.argv[1]): assert train.main(argv) == 0, argv"
)


def commands(containing):
    """What each such command of the guide gives to train.py."""
    lines = [line for line in GUIDE.splitlines() if line.startswith("accelerate launch")]
    arguments = [shlex.split(line.partition("train.py ")[2]) for line in lines]
    return [given for given, line in zip(arguments, lines, strict=True) if containing in line]


@pytest.fixture
def copied(tmp_path):
    """The repository with the files of the guide."""
    for part in ("src", "configs"):
        ignored = shutil.ignore_patterns("__pycache__")  # what a test beside this one may change
        shutil.copytree(ROOT / part, tmp_path / part, ignore=ignored)
    shutil.copy(ROOT / "train.py", tmp_path)
    for file, text in FILES:
        assert not (tmp_path / file).exists()
        (tmp_path / file).write_text(text)
    return tmp_path


def save_arrays(folder):
    """The first 600 digits, a folder for each class."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    for row, (image, label) in enumerate(
        zip(digits.images[:600], digits.target[:600], strict=True)
    ):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        np.save(folder / str(label) / f"{row}.npy", (image * 15).astype(np.uint8))


def table(run_dir):
    columns = pq.read_table(run_dir / "predictions.parquet").to_pydict()
    return {name: np.array(values) for name, values in columns.items()}


@pytest.mark.timeout(240)
def test_each_file_trains_by_its_command(copied):
    runs = {
        "model": "task.model.name=cnn",
        "data": "task.data.name=npy_folder",
        "metric": "task.name=calibrated",
        "task": "configs/token_tags.yaml",
    }
    short = ["epochs=null", "steps=25", "eval_every=25", "save_every=25", "tracking.with=[]"]
    short += ["global_batch_size=64", "micro_batch_size=32", "optimizer.lr=1e-2"]
    small = ["task.model.name=cnn", "task.model.widths=[16, 32]"]
    given = []
    for name, containing in runs.items():
        first, *_ = commands(containing)
        faster = small if "configs/digits.yaml" in first else []
        given.append([*first, *faster, *short, f"name={name}"])
    save_arrays(copied / "my_arrays")
    (copied / "train_each.py").write_text(TRAIN_EACH)
    program = [sys.executable, str(copied / "train_each.py"), json.dumps(given)]
    code, output = run(program, timeout=200, PYTHONPATH=str(copied / "src"))
    assert code == 0, output
    by_name = {name: copied / "runs" / name for name in runs}

    for name in ("model", "data", "metric"):  # 0.1 by chance
        assert summary(by_name[name])["metrics"]["eval/accuracy"] > 0.6
    described = json.loads((by_name["model"] / "final" / "config.json").read_text())
    assert described["model"] == {"name": "cnn", "widths": [16, 32], "dropout": 0.1}
    check_arrays(by_name["data"], copied / "my_arrays")
    check_calibration(by_name["metric"])
    check_tags(by_name["task"])


def check_arrays(run_dir, folder):
    """A fifth is held out, of each class, and a class is named by its folder."""
    shares = np.bincount(table(run_dir)["label"]) / [
        len(list((folder / str(label)).iterdir())) for label in range(10)
    ]
    assert np.abs(shares - 0.2).max() < 0.01
    described = json.loads((run_dir / "final" / "config.json").read_text())
    assert list(described["id2label"].values()) == list("0123456789")


def check_calibration(run_dir):
    rows = table(run_dir)
    expected = 0.0
    for low in np.arange(15) / 15:
        inside = (rows["probability"] >= low) & (rows["probability"] < low + 1 / 15)
        if inside.any():
            right = np.mean(rows["label"][inside] == rows["prediction"][inside])
            expected += np.mean(inside) * abs(right - rows["probability"][inside].mean())
    assert summary(run_dir)["metrics"]["eval/calibration_error"] == pytest.approx(expected)


def check_tags(run_dir):
    found = summary(run_dir)["metrics"]
    rows = {name: column.sum(0) for name, column in table(run_dir).items()}
    precision = rows["right"] / np.maximum(rows["predicted"], 1)
    recall = rows["right"] / rows["true"]
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-9)
    assert found["eval/macro_f1"] == pytest.approx(f1.mean())
    most_frequent = rows["true"].max() / rows["true"].sum()
    assert found["eval/token_accuracy"] > most_frequent + 0.2


@pytest.mark.timeout(240)
def test_the_task_computes_the_same_on_two_processes(copied):
    losses = []
    for processes, arguments in enumerate(commands("precision=fp64"), start=1):
        config = str(copied / arguments[0])
        where = [f"output_dir={copied / 'runs'}", "tracking.with=[]", "log_every=5"]
        program = command(processes, config, *arguments[1:], *where, script=copied / "train.py")
        code, output = run(program, PYTHONPATH=str(copied / "src"))
        assert code == 0, output
        rows = metrics(copied / "runs" / f"on-{processes}")
        losses.append([row["train/loss"] for row in rows if "train/loss" in row])
    assert losses[0][-1] < losses[0][0]
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
