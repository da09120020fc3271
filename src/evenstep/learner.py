"""The model, and all that a step changes along with it."""

from __future__ import annotations

from dataclasses import dataclass

from evenstep import optimizer
from evenstep.batchnorm import BatchNormStatistics
from evenstep.config import RunConfig
from evenstep.hardware import Hardware
from evenstep.plan import seed_of
from evenstep.precision import cast_model, grad_scaler
from evenstep.seeding import seed_everything
from evenstep.task import Task

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


@dataclass(frozen=True)
class Learner:
    model: nn.Module
    """As Accelerate prepared it."""
    bare: nn.Module
    """The same weights without wrappers."""
    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    """Torch's own: Accelerate's wrapper looks for a package on the disk in every step."""
    scaler: torch.amp.GradScaler
    batchnorm: BatchNormStatistics
    ema: AveragedModel | None

    training_modules: list[nn.Module]
    """Those not frozen in eval mode by their author."""

    def train(self) -> None:
        """Back from evaluation."""
        for module in self.training_modules:
            module.training = True

    @property
    def evaluated(self) -> nn.Module:
        """What is evaluated and exported: the averaged weights where there are some."""
        return self.bare if self.ema is None else self.ema.module


def build(config: RunConfig, task: Task, hardware: Hardware) -> Learner:
    seed_everything(seed_of("init", config.seed))
    bare = cast_model(task.model(), config.precision)
    if not bare.training:
        bare.train()  # as from_pretrained returns it; a part that alone is in eval mode stays so
    batchnorm = BatchNormStatistics(bare)
    if config.compile:
        bare.compile()  # in place, before `prepare`: no `_orig_mod.` in any saved key
    model, prepared = hardware.accelerator.prepare(bare, optimizer.build(bare, config.optimizer))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    training_modules = [module for module in bare.modules() if module.training]
    scaler = grad_scaler(config.precision, hardware.device)
    ema = None
    if config.ema_decay:
        ema = AveragedModel(bare, multi_avg_fn=get_ema_multi_avg_fn(config.ema_decay))  # type: ignore[no-untyped-call]
    return Learner(
        model, bare, parameters, prepared.optimizer, scaler, batchnorm, ema, training_modules
    )
