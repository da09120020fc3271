"""The model, and all that a step changes along with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from evenstep import optimizer, strategy
from evenstep.average import Average
from evenstep.batchnorm import BatchNormStatistics
from evenstep.config import RunConfig
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

    training_modules: list[nn.Module]
    """Those not frozen in eval mode by their author."""

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
        return self.average.in_place() if self.average else nullcontext()


def build(config: RunConfig, task: Task, hardware: Hardware) -> Learner:
    bare = new_model(config, task)
    if not bare.training:
        bare.train()  # as from_pretrained returns it; a part that alone is in eval mode stays so
    batchnorm = BatchNormStatistics(bare)
    if config.compile:
        bare.compile()  # in place, before `prepare`: no `_orig_mod.` in any saved key
    training_modules = [module for module in bare.modules() if module.training]
    prepared = strategy.prepare(config, hardware, bare, optimizer.build(bare, config.optimizer))
    average = None
    if config.ema_decay:
        average = Average(
            prepared.local_parameters(), config.ema_decay, swapped=prepared.parameters_changed
        )
    return Learner(bare, prepared, batchnorm, average, training_modules)


def new_model(
    config: RunConfig, task: Task, weights: Mapping[str, Tensor] | None = None
) -> nn.Module:
    """The model, on the CPU, with these weights, or else with its first ones."""
    seed_everything(seed_of("init", config.seed))
    model = cast_model(task.model(), config.precision)
    if weights is not None:
        model.load_state_dict(weights)
    return model
