"""Checkpoints: `<run_dir>/checkpoints/step-00000100/`, the same whatever hardware wrote them.

A checkpoint holds tensors (`*.safetensors`: weights, optimizer state, EMA), `state.json` (the
step and other numbers), `config.yaml` (the resolved run config) and `manifest.json`. No sampler,
scheduler, worker or generator state: these are functions of the config and the step.
Except `weights_sha256`, all of it is called on all processes together, and fails on all together.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from evenstep import checkpoint_files as files
from evenstep.average import Average
from evenstep.files import to_json
from evenstep.processes import is_main, on_main, together

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer


class Tensors(Protocol):
    """What a run has in tensors, as its strategy keeps them."""

    def collect(self) -> dict[str, Tensor]:
        """By canonical name (`model.<name>`, `optimizer.<parameter>.<key>`, `ema.<name>`); those of
        type DTensor are written in shards. On all processes; may raise on one alone."""

    def restore(self, path: Path) -> None:
        """Take over the tensors of the checkpoint at `path`. Raises ValueError, on all processes,
        naming tensors, if it does not fit."""


@dataclass(frozen=True)
class PlainTensors:
    """Those of one process, DDP and FSDP2: the live ones."""

    model: nn.Module
    optimizer: Optimizer
    average: Average | None

    def collect(self) -> dict[str, Tensor]:
        from evenstep import checkpoint_tensors

        live = checkpoint_tensors.collect(self.model, self.optimizer, self.average)
        return checkpoint_tensors.flatten(live)

    def restore(self, path: Path) -> None:
        from evenstep import checkpoint_tensors

        live = (self.model, self.optimizer, self.average)
        targets = together(lambda: checkpoint_tensors.targets(path, *live))
        checkpoint_tensors.read(path, targets, self.model)


class Saver:
    """Saves the checkpoints of a run, one at a time, from `with` to the end of its block.

    In the background, `save` returns once the tensors are copied into CPU memory; a thread writes
    them, over a process group of its own, which waits `timeout` for a process. What goes wrong
    there is raised, on every process, by the next `save` or `wait`. The end of the block waits too.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        keep: int,
        background: bool = False,
        timeout: timedelta | None = None,
    ) -> None:
        self._run_dir, self._keep, self._group = run_dir, keep, None
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._pending: Future[None] | None = None
        if background and dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    def save(
        self,
        step: int,
        tensors: Tensors,
        *,
        state: Mapping[str, Any],
        config_yaml: str,
        best_step: int | None,
    ) -> None:
        """Save `step`, point `best` to `best_step`, and delete what is not kept; see `write`."""
        self.wait()

        def write_and_tidy(collected: dict[str, Tensor]) -> None:
            run_dir, group = self._run_dir, self._group
            write(run_dir, step, collected, state=state, config_yaml=config_yaml, group=group)
            on_main(lambda: files.tidy(run_dir, self._keep, best_step), group)

        with _whole(files.directory(self._run_dir, step)):
            collected = together(partial(self._collect, tensors))
        if self._thread is None:
            write_and_tidy(collected)
        else:
            self._pending = self._thread.submit(write_and_tidy, collected)

    def _collect(self, tensors: Tensors) -> dict[str, Tensor]:
        live = tensors.collect()
        return live if self._thread is None else _on_cpu(live)

    def wait(self) -> None:
        """Until the last `save` is on the disk. Raises what went wrong in the background."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Also after an exception: the threads of all processes still save together."""
        try:
            self.wait()
        except Exception as error:
            if kind is None:
                raise
            print(f"error: {error}", file=sys.stderr, flush=True)  # not to hide the first one
        finally:
            if self._thread is not None:
                self._thread.shutdown()


def write(
    run_dir: Path,
    step: int,
    tensors: dict[str, Tensor],
    *,
    state: Mapping[str, Any],
    config_yaml: str,
    group: Any = None,
) -> Path:
    """Write the checkpoint of `step`, atomically; `state` is plain JSON.

    Raises RuntimeError on every process, naming the one that failed (a full disk, say); the
    checkpoints that were there are untouched. One of the same step is replaced.
    """
    from evenstep import checkpoint_tensors

    def complete() -> None:
        numbers = to_json({"step": step, **state}, indent=2)
        (tmp / "state.json").write_text(numbers + "\n", encoding="utf-8")
        (tmp / "config.yaml").write_text(config_yaml, encoding="utf-8")
        files.complete(tmp, final)

    final = files.directory(run_dir, step)
    tmp = files.temporary(final)
    with _whole(final):
        on_main(lambda: files.begin(tmp), group)
        checkpoint_tensors.write(tmp, tensors, group)
        on_main(complete, group)
    return final


def find(run_dir: Path, resume: str) -> Path | None:
    """The checkpoint to resume from, the same on every process.

    `resume` is "auto" (the newest one that is complete and undamaged, or None), "best", or the path
    of a checkpoint or of a run's `best` file: ValueError, naming the file, if that one is broken.
    """

    def look() -> Path | None:
        if resume == "auto":
            return files.newest(run_dir)
        try:
            return files.resolve(run_dir / files.BEST if resume == "best" else Path(resume))
        except (OSError, ValueError) as error:
            raise ValueError(f"resume: {resume}: {error}") from error

    return on_main(look)


def load(path: Path, tensors: Tensors) -> dict[str, Any]:
    """Restore `tensors` from the checkpoint; returns the saved `state`, with its "step".

    Raises ValueError, naming the first keys, if the checkpoint does not fit.
    """
    numbers: dict[str, Any] = together(lambda: json.loads((path / "state.json").read_bytes()))
    tensors.restore(path)
    return numbers


def weights_sha256(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over the sorted names, dtypes, shapes and bytes of whole tensors on the CPU."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def export(
    run_dir: Path,
    model: Callable[[], nn.Module],
    *,
    task_export: Callable[[nn.Module, Path], None] | None,
) -> Path:
    """Write `<run_dir>/final/`, atomically: `model.safetensors`, config, and the task's own files.

    `model` makes, on the main process, a model with whole weights and without wrappers;
    `task_export` gets it and a directory. Where that writes safetensors itself (as
    `save_pretrained` does), these are the weights.
    """
    from safetensors.torch import save_model

    def write_files() -> None:
        files.begin(tmp)
        made = model()
        if task_export:
            task_export(made, tmp)
        if not any(tmp.glob("*.safetensors")):
            save_model(made, str(tmp / "model.safetensors"))
        shutil.copy(run_dir / "config.yaml", tmp)
        files.publish(tmp, final)

    final = run_dir / "final"
    tmp = files.temporary(final)
    with _whole(final):
        on_main(write_files)
    return final


@contextmanager
def _whole(final: Path) -> Iterator[None]:
    """Around writing `final`: an error names it, and leaves nothing that fills the disk."""
    try:
        yield
    except Exception as error:
        if is_main():
            shutil.rmtree(files.temporary(final), ignore_errors=True)
        raise RuntimeError(f"could not save {final}: {error}") from error


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies that training does not change; a DTensor stays one."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )
    copies: dict[str, Tensor] = stager.stage(tensors)  # type: ignore[assignment]
    stager.close()
    return copies
