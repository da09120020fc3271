"""What would end the first evaluation ends the run before its first step."""

import signal

import train
from evenstep import stop

import pytest

TASK = """
import torch
from torch import nn

from evenstep.sections import Section
from evenstep.task import Task


class Config(Section):
    name: str
    best_metric: str = "error"
    score_as: str = "one row a sample"
    classes: int = 1
    evaluated: bool = True


def build(config: Config) -> Task:
    samples = [torch.tensor([float(n), 2.0 * n]) for n in range(8)]

    def score(model, batch):
        error = (model(batch[:, :1]) - batch[:, 1:]).square()[:, 0]
        if config.score_as == "a mean":
            return {"error": error.mean()}
        return {"error": error, "positive": batch[:, 0] > 3}

    def summarize(table):
        if len(set(table["positive"])) < config.classes:
            raise ArithmeticError("one class only")
        return {"error": float(table["error"].mean()), "rows": [len(table["error"])]}

    return Task(
        model=lambda: nn.Linear(1, 1),
        train_dataset=samples,
        eval_dataset=samples if config.evaluated else None,
        collate=torch.stack,
        count=len,
        loss=lambda model, batch: (model(batch[:, :1]) - batch[:, 1:]).square().sum(),
        score=score,
        summarize=summarize,
        best_metric=config.best_metric,
        higher_is_better=False,
    )
"""
CONFIG = """
task: {name: tried_task}
global_batch_size: 4
micro_batch_size: 2
steps: 4
eval_every: 1
log_every: 1
optimizer: {name: adamw, lr: 1e-2}
tracking: {with: []}
"""


@pytest.fixture
def started(tmp_path, monkeypatch):
    """A run with changed keys; returns the steps that it logged."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    (tmp_path / "tried_task.py").write_text(TASK)
    (tmp_path / "run.yaml").write_text(CONFIG)
    monkeypatch.syspath_prepend(tmp_path)
    rows = tmp_path / "runs" / "tried" / "metrics.jsonl"
    handlers = {number: signal.getsignal(number) for number in stop._SIGNALS}

    def start(*changes):
        argv = [str(tmp_path / "run.yaml"), f"output_dir={tmp_path / 'runs'}", "name=tried"]
        try:
            assert train.main([*argv, *changes]) == 0
        finally:
            start.steps = rows.read_text().count("train/loss") if rows.exists() else 0
        return start.steps

    yield start
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["task.best_metric=eror"], "best_metric 'eval/eror' is not in what summarize gave"),
        (
            ["early_stopping={patience: 1, metric: mcc, higher_is_better: true}"],
            "early_stopping.metric 'mcc' .*give one of error",
        ),
        (
            ["early_stopping={patience: 1, metric: rows, higher_is_better: true}"],
            "early_stopping.metric 'rows' is no metric that is a number",
        ),
        (["task.score_as=a mean"], "a column has one row a sample"),
    ],
)
def test_it_ends_before_the_first_step_and_the_mended_run_goes_on(started, change, message):
    with pytest.raises(ValueError, match=message):
        started(*change)
    assert started.steps == 0
    assert started() == 4


def test_metrics_that_need_more_samples_only_warn(started, caplog):
    assert started("task.classes=2") == 4
    assert "first 2 evaluation samples alone cannot be summarized" in caplog.text
    assert "one class only" in caplog.text


def test_a_run_without_evaluation_has_none_to_try(started):
    assert started("task.evaluated=false") == 4


def test_it_changes_nothing(started, tmp_path, monkeypatch):
    """The same weights, bit for bit, as without it."""
    started()
    tried = (tmp_path / "runs/tried/final/model.safetensors").read_bytes()
    monkeypatch.setattr(train, "try_evaluation", lambda *_: None)
    started("name=plain")
    assert (tmp_path / "runs/plain/final/model.safetensors").read_bytes() == tried
