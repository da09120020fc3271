"""The evaluation table: one row a sample, keyed by sample index, in dataset order, on any P."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from evenstep.files import named
from evenstep.hardware import Hardware
from evenstep.plan import seed_of
from evenstep.precision import autocast
from evenstep.processes import on_main
from evenstep.seeding import seed_everything
from evenstep.task import Batch, Task

import numpy as np
import torch
from torch import Tensor, nn

Columns = dict[str, np.ndarray[Any, Any]]


class Rows:
    """The rows that one process scores; kept on the device until all batches are through."""

    def __init__(self) -> None:
        self._indices: list[int] = []
        self._columns: dict[str, list[Tensor]] = {}

    def add(self, indices: list[int], columns: Mapping[str, Tensor]) -> None:
        self._indices += indices
        for name, column in columns.items():
            if name == "index":
                raise ValueError("the task's score returned a column 'index', which names samples")
            if column.shape[:1] != (len(indices),):
                raise ValueError(
                    f"the task's score returned shape {tuple(column.shape)} in column {name!r} for "
                    f"a batch of {len(indices)} samples; a column has one row a sample"
                )
            self._columns.setdefault(name, []).append(column)

    def columns(self) -> Columns:
        table = {name: _to_numpy(torch.cat(parts)) for name, parts in self._columns.items()}
        return {"index": np.array(self._indices, dtype=np.int64), **table}


def score(
    task: Task,
    precision: str,
    device: torch.device,
    model: nn.Module,
    indices: list[int],
    batch: Batch,
) -> Mapping[str, Tensor]:
    """The rows of a batch; what they draw depends on its first index."""
    seed_everything(seed_of("score", indices[0]), device)
    with autocast(precision, device):
        return task.score(model, batch)


def summarize(rows: Rows, task: Task, hardware: Hardware, directory: Path) -> dict[str, Any]:
    """The metrics of all processes' rows, alike on each; writes `predictions.parquet`."""
    parts = hardware.gather(rows.columns())  # on the main process

    def from_table() -> dict[str, Any]:
        table = merge(parts)
        write_predictions(directory / "predictions.parquet", table)
        return named_metrics(task, table)

    return on_main(from_table, hardware.channel)


def named_metrics(task: Task, table: Columns) -> dict[str, Any]:
    return {f"eval/{name}": value for name, value in task.summarize(table).items()}


def merge(parts: Iterable[Columns]) -> Columns:
    """One table from every process's rows, sorted by sample index, repeated rows dropped."""
    tables = list(parts)
    table = {name: np.concatenate([part[name] for part in tables]) for name in tables[0]}
    _, first = np.unique(table["index"], return_index=True)
    return {name: column[first] for name, column in table.items()}


def write_predictions(path: Path, table: Columns) -> None:
    """The table as Parquet; a column of shape (n, k) becomes one of lists."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays = {k: v if v.ndim == 1 else v.reshape(len(v), -1).tolist() for k, v in table.items()}
    temporary = path.with_suffix(".tmp")
    with named(path):
        pq.write_table(pa.table(arrays), temporary)
        temporary.replace(path)


def _to_numpy(column: Tensor) -> np.ndarray[Any, Any]:
    column = column.detach().cpu()
    return column.double().numpy() if column.is_floating_point() else column.numpy()
