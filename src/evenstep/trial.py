"""One batch of evaluation before training: what would end the first evaluation, after all the steps
up to there, ends the run here."""

from __future__ import annotations

import logging
import warnings
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

from evenstep.config import RunConfig
from evenstep.data import eval_loader
from evenstep.evaluation import Columns, Rows, named_metrics, score
from evenstep.hardware import Hardware
from evenstep.learner import Learner
from evenstep.plan import Plan
from evenstep.precision import cast_batch
from evenstep.processes import on_main
from evenstep.run_state import RunState
from evenstep.task import Batch, Task

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

logger = logging.getLogger(__name__)


@torch.no_grad()
def try_evaluation(
    task: Task, learner: Learner, config: RunConfig, plan: Plan, hardware: Hardware
) -> None:
    """Raises what the task's `score` raises, and ValueError, alike on all processes, for columns
    that are not of one row a sample and for metrics to go by that there are not."""
    if task.eval_dataset is None:
        return
    indices, batch = _first_batch(task, config, plan, hardware)
    rows = Rows()
    with learner.evaluating() as model:
        rows.add(indices, score(task, config.precision, hardware.device, model, indices, batch))
    if metrics := on_main(lambda: _metrics(task, rows.columns()), hardware.channel):
        RunState().evaluated(metrics, task, config.early_stopping)


def _first_batch(
    task: Task, config: RunConfig, plan: Plan, hardware: Hardware
) -> tuple[list[int], Batch]:
    """The same on every process, on its device."""
    # A copy of the split: see sample_check.
    unopened = replace(task, eval_dataset=copy(task.eval_dataset))
    cast = partial(cast_batch, precision=config.precision)
    loader = eval_loader(unopened, batch_size=plan.micro_batch_size, num_processes=1, cast=cast)
    assert loader
    indices, batch = next(iter(loader))
    return indices, tree_map_only(Tensor, lambda t: t.to(hardware.device), batch)


def _metrics(task: Task, table: Columns) -> dict[str, Any]:
    """None where so few samples are not enough for them, perhaps since all are of one class."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return named_metrics(task, table)
    except Exception as error:  # whatever the user's code makes of it
        logger.warning(
            "the first %d evaluation samples alone cannot be summarized: %r; if not for want of "
            "samples, then the first evaluation will fail as well",
            len(table["index"]),
            error,
        )
        return {}
