"""How DeepSpeed is set up: as plainly as it can be, so that a step is that of a single process.

Weights, gradients, optimizer state and all communication in float32, torch's own optimizer, no
accumulation and no clipping by the engine. Traps (read in the source of DeepSpeed 0.19):

- DS_ACCELERATOR has to be set before the first import of deepspeed.
- `engine.forward` switches a surrounding CUDA autocast off, unless `torch_autocast` is configured;
  that in turn sends gradients in 16 bits, but for an empty list of "safe" modules.
- A selected ZeRO-3 plugin makes transformers build its models in pieces.
- ZeRO-3 has a `linear` of its own, which does not keep gathered weights for the backward, but
  rounds before it adds the bias: in bf16 results differ from the first step on. Torch's own then
  costs 2 bytes for each weight of a linear layer, from forward to backward.
- On the CPU a kernel for inference is compiled at the start, or fails to be.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

ELSEWHERE = "use accelerate_configs/multi_gpu.yaml or fsdp2.yaml"

_REFUSED = {
    "fp64": "its copies of the weights are float32",
    "fp16": "it brings a loss scale of its own",
}
_POSSIBLE = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": ("1", "2", "3"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": ("none", "cpu"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": ("none", "cpu"),
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": ("none",),
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": ("false",),
    "ACCELERATE_GRADIENT_CLIPPING": ("auto",),
}


def check(environ: Mapping[str, str], precision: str) -> None:
    """Raises ValueError for what ZeRO cannot do, or not exactly. Imports nothing.

    `environ` is what `accelerate launch` makes of the hardware file.
    """
    if find_spec("deepspeed") is None:
        raise ValueError(
            "the hardware file asks for DeepSpeed, which is not installed: pip install deepspeed "
            "(where there is no CUDA compiler: DS_BUILD_OPS=0 pip install deepspeed)"
        )
    if reason := _REFUSED.get(precision):
        raise ValueError(
            f"precision {precision!r} does not run under DeepSpeed: {reason}; {ELSEWHERE}, or "
            "precision fp32 or bf16"
        )
    for key, possible in _POSSIBLE.items():
        value = environ.get(key, possible[0])
        if value not in possible:
            name = key.removeprefix("ACCELERATE_").removeprefix("DEEPSPEED_").lower()
            raise ValueError(
                f"the hardware file asks DeepSpeed for {name} {value!r}; here it can be "
                f"{' or '.join(possible)}, since the run config alone decides the result"
            )


def plugin(precision: str) -> Any:
    """The DeepSpeedPlugin for the Accelerator; stage and offload are the hardware file's.

    Make it before the processes are connected. Without an accelerator, set DS_ACCELERATOR first.
    """
    _silence()
    import deepspeed
    from accelerate import DeepSpeedPlugin

    class Plugin(DeepSpeedPlugin):  # type: ignore[misc]
        def set_deepspeed_weakref(self) -> None:
            """Not told to transformers: models are built whole, from one seed."""

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # the kernel for inference
    made = Plugin(gradient_accumulation_steps=1, gradient_clipping=0.0, zero3_init_flag=False)
    made.deepspeed_config |= {
        "train_micro_batch_size_per_gpu": 1,  # only for the throughput that it could print
        "communication_data_type": "fp32",
        "zero_force_ds_cpu_optimizer": False,
    }
    made.deepspeed_config["zero_optimization"] |= {
        "reduce_bucket_size": 50_000_000,  # elements: 200 MB, where DeepSpeed would take 2 GB
        "memory_efficient_linear": precision == "fp32",
    }
    if precision == "bf16":
        autocast = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
        made.deepspeed_config["torch_autocast"] = autocast
    return made


def _silence() -> None:
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="`torch.distributed.*` is deprecated")
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
