"""The model, and all that a step changes along with it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from evenstep import gradient_checkpointing, optimizer, strategy
from evenstep.average import Average
from evenstep.batchnorm import BatchNormStatistics
from evenstep.config import RunConfig
from evenstep.freezing import freeze
from evenstep.hardware import Hardware
from evenstep.plan import seed_of
from evenstep.precision import cast_model
from evenstep.seeding import seed_everything
from evenstep.strategy import Strategy
from evenstep.task import Task

from torch import Tensor, nn


@dataclass(frozen=True)
class Learner:
    bare: nn.Module
    """The model as its author wrote it, without wrappers; its weights may be shards."""
    strategy: Strategy
    batchnorm: BatchNormStatistics
    average: Average | None
    averaged: Callable[[], AbstractContextManager[None]] | None
    """Puts averaged weights in the place of the model's own; None if there are none."""

    training_modules: list[nn.Module]
    """Those not frozen in eval mode."""

    def step(self, lr: float) -> None:
        """The end of a step: all moves once."""
        self.strategy.step(lr)
        self.batchnorm.commit(self.strategy.sum)
        if self.average:
            self.average.update()

    def discard(self) -> None:
        """The end of a step that is left out: nothing moves but the count of steps."""
        self.strategy.discard()
        self.batchnorm.discard()
        if self.average:
            self.average.skip()

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """The model in eval mode, with the averaged weights where there are some."""
        with self._averaged():
            yield self.bare.eval()
        for module in self.training_modules:
            module.training = True

    def evaluated_weights(self) -> dict[str, Tensor]:
        """What evaluation sees, whole, on the CPU; see `Strategy.full_weights`."""
        with self._averaged():
            return self.strategy.full_weights()

    def _averaged(self) -> AbstractContextManager[None]:
        return self.averaged() if self.averaged else nullcontext()

    def numbers(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the tensors."""
        count = self.average.count if self.average else 0
        return {"scaler": self.strategy.scaler.state_dict(), "averaged_steps": count}

    def restore_numbers(self, saved: Mapping[str, Any]) -> None:
        self.strategy.scaler.load_state_dict(saved["scaler"])
        if self.average:
            self.average.count = saved["averaged_steps"]


def build(
    config: RunConfig, task: Task, hardware: Hardware, *, swa_start: int | None = None
) -> Learner:
    """`swa_start` is the run config's, in steps."""
    bare = new_model(config, task)
    _to_training(bare)
    freeze(bare, config.freeze)
    if config.gradient_checkpointing:
        gradient_checkpointing.enable(bare)
    batchnorm = BatchNormStatistics(bare)
    if config.compile:
        bare.compile()  # in place, before `prepare`: no `_orig_mod.` in any saved key
    training_modules = [module for module in bare.modules() if module.training]
    built = optimizer.build(bare, config.optimizer)
    prepared = strategy.prepare(config, hardware, bare, built)
    average = _average(prepared, config.ema_decay, swa_start)
    averaged = average.in_place if average else getattr(built, "in_place", None)
    return Learner(bare, prepared, batchnorm, average, averaged, training_modules)


def _to_training(bare: nn.Module) -> None:
    """A part that its author froze in eval mode stays so; but `from_pretrained` returns all in eval
    mode, which would go without dropout."""
    loaded = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
    for part in bare.modules():
        trains = any(parameter.requires_grad for parameter in part.parameters())
        if not part.training and (part is bare or (isinstance(part, loaded) and trains)):
            part.train()


def _average(prepared: Strategy, ema_decay: float | None, swa_start: int | None) -> Average | None:
    """Of the trained parameters: frozen ones, most of them under LoRA, are their own average."""
    if ema_decay is None and swa_start is None:
        return None
    trained = {name for name, p in prepared.bare.named_parameters() if p.requires_grad}
    parameters = {name: p for name, p in prepared.local_parameters().items() if name in trained}
    changed = prepared.parameters_changed
    return Average(parameters, ema_decay, start=swa_start or 0, swapped=changed)


def new_model(
    config: RunConfig, task: Task, weights: Mapping[str, Tensor] | None = None
) -> nn.Module:
    """The model, on the CPU, with these weights, or else with its first ones."""
    seed_everything(seed_of("init", config.seed))
    model = cast_model(task.model(), config.precision)
    if weights is not None:
        model.load_state_dict(weights)
    return model
