"""DeepSpeed ZeRO 1, 2 and 3, for real, on two CPU processes, against torch alone on one.

This file is also the script that torchrun starts, once for all stages.
"""

import json
import math
import os
import sys
from pathlib import Path

from evenstep import zero_setup

import pytest
import torch
import yaml
from launching import ROOT, command, run, write_config
from torch import nn

pytestmark = pytest.mark.xdist_group("zero")  # one process makes its fixture

STAGES = [1, 2, 3]
MICRO_BATCHES = 4
STEPS = 6
MAX_NORM = 0.2  # below most norms of this run


class Net(nn.Module):
    """BatchNorm, a frozen layer, a buffer, a tied weight."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 5, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(5, track_running_stats=False)
        self.frozen = nn.Linear(5, 7).requires_grad_(False)
        self.head = nn.Linear(7, 7)
        self.again = nn.Linear(7, 7)
        self.again.weight = self.head.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.uses_all = True

    def forward(self, images):
        features = self.norm(self.convolution(images)).relu().mean((2, 3))
        hidden = (self.frozen(features) * self.scale).tanh()
        return self.again(self.head(hidden).tanh()) if self.uses_all else hidden


def build():
    torch.manual_seed(0)
    model = Net()
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.01, fused=True)


def micro_batch(step, number):
    """Images and labels; the number of targets differs."""
    size = 3 + (step + number) % 4
    generator = torch.Generator().manual_seed(100 * step + number)
    images = torch.randn(size, 1, 6, 6, generator=generator)
    return images, torch.randint(0, 7, (size,), generator=generator)


def loss_of(model, step, number):
    images, labels = micro_batch(step, number)
    return nn.functional.cross_entropy(model(images), labels, reduction="sum")


def targets(step):
    return sum(len(micro_batch(step, number)[1]) for number in range(MICRO_BATCHES))


def lr(step):
    return 0.01 / step


def train_plainly(model, optimizer, first, last):
    """Torch alone, on one process; returns the norms."""
    norms = []
    for step in range(first, last + 1):
        optimizer.zero_grad()
        losses = [loss_of(model, step, number) for number in range(MICRO_BATCHES)]
        (torch.stack(losses).sum() / targets(step)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        for group in optimizer.param_groups:
            group["lr"] = lr(step)
        optimizer.step()
    return norms


def plain_state(model, optimizer):
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for parameter, values in optimizer.state.items():
        state |= {f"optimizer.{names[parameter]}.{key}": v for key, v in values.items()}
    return {name: tensor.clone() for name, tensor in state.items()}


def train(strategy, first, last, *, spoil=None):
    """As train.py does; in the step `spoil`, process 1 has a loss that is not finite."""
    rank, processes = strategy.hardware.rank, strategy.hardware.num_processes
    norms = []
    for step in range(first, last + 1):
        strategy.start()
        order = strategy.visits(MICRO_BATCHES // processes)
        for turn in order:
            number = rank + turn * processes
            with strategy.micro_batch(is_last=turn == order[-1]):
                loss = loss_of(strategy.model, step, number)
                if step == spoil and number == 1:
                    loss = loss * math.inf
                strategy.backward(loss, loss.detach() * 0 + 1 / targets(step))
        norms.append(strategy.clip(MAX_NORM))
        if math.isfinite(norms[-1]):
            strategy.step(lr(step))
        else:
            strategy.discard()
    return norms


def difference(one, other):
    assert one.keys() == other.keys()
    assert all(one[k].dtype == other[k].dtype and one[k].shape == other[k].shape for k in one)
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    pytest.importorskip("deepspeed")
    path = tmp_path_factory.mktemp("zero") / "results.json"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
    code, output = run([sys.executable, *launch, str(path)], timeout=120, OMP_NUM_THREADS="1")
    assert code == 0, output
    assert "DeepSpeed" not in output  # it is a talkative library
    return json.loads(path.read_text())


on_every_stage = pytest.mark.parametrize("stage", STAGES)


@pytest.mark.processes
@on_every_stage
def test_steps_are_those_of_torch_on_one_process(results, stage):
    here, torch_alone = results[str(stage)]["norms"], results["norms"]
    assert max(torch_alone) > MAX_NORM  # clipping is part of it
    assert here == pytest.approx(torch_alone, abs=1e-6)
    assert results[str(stage)]["trained"] < 1e-6


@pytest.mark.processes
@on_every_stage
def test_a_step_that_is_not_finite_on_one_process_changes_no_bit_anywhere(results, stage):
    assert results[str(stage)]["spoilt norm"] == "nan"
    assert results[str(stage)]["spoilt changes nothing"]
    assert results[str(stage)]["after the spoilt step"] < 1e-6


@pytest.mark.processes
@on_every_stage
def test_state_moves_from_torch_to_zero_bit_by_bit_and_training_goes_on(results, stage):
    assert results[str(stage)]["starts equal"]
    assert results[str(stage)]["restored equal"]
    assert results[str(stage)]["restored and trained"] < 1e-6


@pytest.mark.processes
@on_every_stage
def test_swapped_weights_are_evaluated_and_leave_no_trace(results, stage):
    assert results[str(stage)]["local stays live"]
    assert results[str(stage)]["swapped outputs"] < 1e-6
    assert results[str(stage)]["swapped back equal"]


@pytest.mark.processes
@on_every_stage
def test_a_parameter_that_a_micro_batch_leaves_out_is_named(results, stage):
    assert "['head.weight', 'head.bias', 'again.bias']" in results[str(stage)]["unused"]


@pytest.mark.parametrize(
    ("environ", "precision", "said"),
    [
        ({}, "fp64", "float32"),
        ({}, "fp16", "fsdp2.yaml, or precision fp32 or bf16"),
        ({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}, "fp32", "zero_stage '0'"),
        ({"ACCELERATE_GRADIENT_CLIPPING": "1.0"}, "fp32", "gradient_clipping '1.0'"),
        ({"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme"}, "bf16", "none or cpu"),
    ],
)
def test_what_would_not_be_exact_is_refused_with_a_way_out(environ, precision, said, monkeypatch):
    monkeypatch.setattr(zero_setup, "find_spec", lambda name: name)
    with pytest.raises(ValueError, match=said):
        zero_setup.check(environ, precision)


@on_every_stage
def test_the_shipped_hardware_files_fit(stage, monkeypatch):
    monkeypatch.setattr(zero_setup, "find_spec", lambda name: name)
    file = yaml.safe_load((ROOT / "accelerate_configs" / f"zero{stage}.yaml").read_text())
    settings = {k: str(v).lower() for k, v in file["deepspeed_config"].items()}
    assert settings["zero_stage"] == str(stage)
    environ = {f"ACCELERATE_DEEPSPEED_{key.upper()}": value for key, value in settings.items()}
    zero_setup.check(environ, "bf16")


def test_a_missing_deepspeed_is_named_with_its_installation(monkeypatch):
    monkeypatch.setattr(zero_setup, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install deepspeed"):
        zero_setup.check({}, "fp32")


# ---- the script ----


def connect():
    """An Accelerator for DeepSpeed on CPU processes."""
    from accelerate import Accelerator, PartialState

    os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}
    os.environ["DS_ACCELERATOR"] = "cpu"
    plugin = zero_setup.plugin("fp32")
    # So that some parameters of this small network are split under ZeRO-3, and some are not.
    plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 10
    PartialState(backend="gloo")
    return Accelerator(deepspeed_plugin=plugin)


def prepare(accelerator, stage):
    from evenstep.hardware import Hardware
    from evenstep.zero import Zero

    accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage"] = stage
    accelerator.deepspeed_engine_wrapped = None
    model, optimizer = build()
    engine, _ = accelerator.prepare(model, optimizer)
    hardware = Hardware(accelerator, channel=torch.distributed.group.WORLD)
    return Zero(hardware, model, engine, torch.amp.GradScaler("cpu", enabled=False))


def check_training(strategy, model, optimizer, found):
    found["starts equal"] = equal(strategy.state(), plain_state(model, optimizer))
    local = strategy.local_parameters()
    found["norms"] = train(strategy, 1, STEPS)
    weights = strategy.full_weights()
    found["local stays live"] = all(
        torch.equal(whole, weights[name]) for name, whole in strategy.whole(local).items()
    )
    train_plainly(model, optimizer, 1, STEPS)
    found["trained"] = difference(strategy.state(), plain_state(model, optimizer))
    before = strategy.state()
    found["spoilt norm"] = str(train(strategy, STEPS + 1, STEPS + 1, spoil=STEPS + 1)[0])
    found["spoilt changes nothing"] = equal(strategy.state(), before)
    train(strategy, STEPS + 2, STEPS + 3)
    train_plainly(model, optimizer, STEPS + 2, STEPS + 3)
    found["after the spoilt step"] = difference(strategy.state(), plain_state(model, optimizer))


def check_restoring(strategy, model, optimizer, found):
    state = plain_state(model, optimizer)
    strategy.restore({name: tensor.clone() for name, tensor in state.items()})
    found["restored equal"] = equal(strategy.state(), state)
    train(strategy, STEPS + 4, STEPS + 6)
    train_plainly(model, optimizer, STEPS + 4, STEPS + 6)
    found["restored and trained"] = difference(strategy.state(), plain_state(model, optimizer))


@torch.no_grad()
def check_swapping(strategy, found):
    before, local = strategy.state(), strategy.local_parameters()
    held = {name: tensor.clone() for name, tensor in local.items()}
    strategy.scatter({name: whole / 2 for name, whole in strategy.whole(held).items()}, local)
    strategy.parameters_changed()
    halved = Net().eval()
    halved.load_state_dict(strategy.full_weights())
    images, _ = micro_batch(1, 1)
    found["swapped outputs"] = float(
        (strategy.bare.eval()(images) - halved(images)).abs().max()
    ) + float((2 * halved.head.bias - before["model.head.bias"]).abs().max())
    strategy.bare.train()
    for name, tensor in local.items():
        tensor.copy_(held[name])
    strategy.parameters_changed()
    found["swapped back equal"] = equal(strategy.state(), before)


def check_refusal(strategy, found):
    strategy.bare.uses_all = False
    try:
        train(strategy, 1, 1)
    except ValueError as error:
        found["unused"] = str(error)


def script(path):
    import torch.distributed as dist

    accelerator = connect()
    results = {"norms": train_plainly(*build(), 1, STEPS)}
    for stage in STAGES:
        results[stage] = found = {}
        model, optimizer = build()
        check_training(prepare(accelerator, stage), model, optimizer, found)
        strategy = prepare(accelerator, stage)
        check_restoring(strategy, model, optimizer, found)
        check_swapping(strategy, found)
        check_refusal(strategy, found)
    if accelerator.is_main_process:
        Path(path).write_text(json.dumps(results))
    dist.destroy_process_group()


@pytest.mark.processes
def test_layers_in_another_order_on_each_process_are_refused(tmp_path):
    """DeepSpeed would add up the gradients of different parameters."""
    config = str(write_config(tmp_path, precision="fp32", steps=4))
    code, output = run(command(2, config, "task.layer_swap=true", hardware="zero2"))
    assert code != 0
    assert "in different orders" in output


if __name__ == "__main__":
    script(sys.argv[1])
