"""A task: what is trained, on what, with which loss and which metrics, as one frozen record.

A task module has two names: `Config` (a pydantic model, the typed `task:` section of the run
config) and `build(config) -> Task`. The loop in `train.py` knows tasks only through this record.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from torch import Tensor, nn

Batch = Any  # a tensor, or a dict / list / tuple of tensors
Table = Mapping[str, Any]  # column name -> numpy array with one row a sample, in dataset order


class Dataset(Protocol):
    """Anything with a length and items; `__getitems__(indices)` is used when it has one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Task:
    """Data and functions; all of them pure. B is the number of samples in a micro-batch."""

    model: Callable[[], nn.Module]
    """Builds the model. Called once, on the CPU, under the `init` seed."""

    train_dataset: Any
    """A `Dataset`, or `evenstep.streams.Streams` where data has no known length."""

    eval_dataset: Dataset | None
    """None switches evaluation off."""

    collate: Callable[[Sequence[Any]], Batch]
    """Samples to one micro-batch, on the CPU, perhaps in a worker process."""

    count: Callable[[Batch], float]
    """How many targets (samples, or tokens that count) the loss of this micro-batch sums over; or
    the sum of their weights."""

    loss: Callable[[nn.Module, Batch], Tensor]
    """The *sum* of the loss over the targets of one micro-batch: a scalar."""

    score: Callable[[nn.Module, Batch], Mapping[str, Tensor]]
    """Columns of the evaluation table: each (B,) or (B, ...), one row a sample."""

    summarize: Callable[[Table], Mapping[str, Any]]
    """Metrics from the whole table, in float64: plain floats, or lists for what is no scalar."""

    best_metric: str
    """The key of `summarize` that decides which checkpoint is best."""

    higher_is_better: bool = True

    augment: Callable[[Any], Any] | None = None
    """Random transformation of one training sample. It may draw from torch, `random` and numpy:
    all three are seeded from (seed, epoch, sample index) right before the call; where `order`
    repeats a sample within an epoch, also from how often it came before."""

    mix: Callable[[Batch], Batch] | None = None
    """Random transformation of one training micro-batch, as `collate` returned it. It and `collate`
    may draw as well: seeded from (seed, step, number of the micro-batch)."""

    order: Callable[[int, int, int], Tensor] | None = None
    """(seed, micro_batch_size, epoch) to the samples of that epoch in order: (n,) int64 indices,
    which may leave samples out and repeat others. None is a permutation. A micro-batch begins at
    every position that is a multiple of its size, whatever the epoch: that of the first sample of
    an epoch is epoch * n."""

    sample: Callable[[nn.Module], str] | None = None
    """Text to show with each evaluation, for example one that the model writes. It may draw.
    Called on all processes alike: of a sharded model each has to run as many forwards."""

    export: Callable[[nn.Module, Path], None] | None = None
    """Writes what `final/` holds beside `model.safetensors`. None writes nothing more."""

    data_identity: Mapping[str, Any] = field(default_factory=dict)
    """What identifies the data (fingerprint, revision, sizes); compared on resume."""


@dataclass(frozen=True)
class Named:
    """Marks a config field as a section whose `name` picks the module that types it.

    `model: Annotated[Any, Named("models")]` with `{name: resnet18}` is typed by the `Config` of
    `evenstep/models/resnet18.py`; a name that no module has (a hub id, a path) by that of
    `fallback`, where there is one.
    """

    kind: str
    fallback: str | None = None

    def module(self, name: str) -> ModuleType:
        """Raises ValueError with the nearest names, and ImportError."""
        return find_module(self.kind, name, self.fallback)


def module_names(kind: str) -> list[str]:
    """The modules of a folder of evenstep, e.g. `module_names("tasks")`."""
    package = importlib.import_module(f"evenstep.{kind}")
    names = (module.name for module in pkgutil.iter_modules(package.__path__))
    return sorted(name for name in names if not name.startswith("_"))


def find_module(kind: str, name: str, fallback: str | None = None) -> ModuleType:
    """The module behind `name`: a file of `evenstep/<kind>/`, a dotted path, or `fallback`, a file
    of that folder; None stands for what the folder's own `fallback` makes of the name.
    Raises ValueError with the nearest names, and ImportError."""
    names = module_names(kind)
    if name in names:
        return importlib.import_module(f"evenstep.{kind}.{name}")
    folder = importlib.import_module(f"evenstep.{kind}")
    stem = None if fallback else getattr(folder, "fallback", lambda name: None)(name)
    if stem is None and _importable(name):
        return _with_names(importlib.import_module(name))
    if stem := stem or fallback:
        return importlib.import_module(f"evenstep.{kind}.{stem}")
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise ValueError(
        f"{name!r} is not in evenstep/{kind}/ ({', '.join(names)}); {hint}"
        "a module that Python can import works too, by its dotted path"
    )


def _importable(name: str) -> bool:
    """Whether this is a module; train.jsonl is none, although there is a train.py beside it."""
    package, dot, _ = name.partition(".")
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    if found is None or Path(name).is_file():
        return False
    # A folder without an __init__.py may have modules, but is none: it may have data.
    return found.submodule_search_locations is not None if dot else found.origin is not None


def _with_names(module: ModuleType) -> ModuleType:
    if missing := [name for name in ("Config", "build") if not hasattr(module, name)]:
        raise ValueError(f"module {module.__name__} has no {' and no '.join(missing)}")
    return module
