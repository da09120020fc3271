"""FSDP2 on four CPU processes, real but for the GPU: what a plain process computes, and its
checkpoints. This file is also the script that each of them runs."""

from __future__ import annotations

import hashlib
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from evenstep import checkpoint_tensors, fsdp2
from evenstep.average import Average

import pytest
import torch
import torch.distributed as dist
from launching import run
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
HYBRID = {f"PARALLELISM_CONFIG_DP_{part}_SIZE": "2" for part in ("REPLICATE", "SHARD")}
KINDS = {
    "sharded": FSDP2,
    "offloaded": FSDP2 | {"FSDP_OFFLOAD_PARAMS": "true"},
    "hybrid": FSDP2 | HYBRID | {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"},
}
MICRO_BATCHES = 8
CLIP = 0.3


class Net(nn.Module):
    """BatchNorm, tied weights, layers that not every micro-batch uses or none does, shares that
    are empty on some process, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6, momentum=0.0)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.sometimes = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.last = nn.Linear(6, 3)

    def forward(self, images: Tensor, extra: int) -> Tensor:
        hidden = self.norm(self.conv(images)).relu().mean((2, 3)) * self.scale
        if extra < 2:  # the last of them is never used
            hidden = hidden + self.sometimes[extra](hidden).tanh()
        return self.last(self.second(self.first(hidden)) * self.frozen)


class Training:
    """What a strategy does, written out."""

    def __init__(self, accelerator: Any = None) -> None:
        torch.manual_seed(0)
        bare = self.model = Net().double()
        trained = [p for p in bare.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1, fused=True)
        self.accelerator, self.rank, self.processes = accelerator, 0, 1
        if accelerator is not None:
            self.rank, self.processes = accelerator.process_index, accelerator.num_processes
            self.model, prepared = accelerator.prepare(bare, self.optimizer)
            self.optimizer = prepared.optimizer
            self.used = fsdp2.UsedParameters(self.model, dist.new_group(backend="gloo"))
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.parameters = list(named.values())
        self.average = Average(named, 0.9, swapped=lambda: fsdp2.reshard(self.model))

    def step(self, step: int) -> tuple[float, float]:
        """(mean loss, gradient norm) of the step."""
        generator = torch.Generator().manual_seed(step)
        images = [
            torch.randn(2 + n % 3, 1, 5, 5, generator=generator).double()
            for n in range(MICRO_BATCHES)
        ]
        targets = sum(map(len, images))
        self.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for number in range(self.rank, MICRO_BATCHES, self.processes):
            is_last = number + self.processes >= MICRO_BATCHES
            alone = is_last or self.accelerator is None
            with nullcontext() if alone else self.accelerator.no_sync(self.model):
                # in the end, one process has used no extra layer, and two others used one each
                logits = self.model(images[number], {1: 0, 6: 1}.get(number + step % 2, 2))
                loss = logits.square().sum()
                if is_last and self.accelerator is not None:
                    self.used.agree_in_backward(loss)
                loss.backward(torch.tensor(self.processes / targets, dtype=torch.float64))
            total += loss.detach()
        self.model.norm.num_batches_tracked.fill_(step)
        norm = nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()
        self.average.update()
        if self.accelerator is not None:
            dist.all_reduce(total)
            norm = norm.full_tensor()
        return total.item() / targets, norm.item()

    def steps(self, first: int, last: int) -> list[tuple[float, float]]:
        return [self.step(step) for step in range(first, last + 1)]

    def save(self, directory: Path) -> None:
        tensors = checkpoint_tensors.collect(self.model, self.optimizer, self.average)
        checkpoint_tensors.write(directory, checkpoint_tensors.flatten(tensors))

    def load(self, directory: Path) -> None:
        tensors = checkpoint_tensors.targets(directory, self.model, self.optimizer, self.average)
        checkpoint_tensors.read(directory, tensors, self.model)

    def state(self) -> dict[str, Tensor]:
        """All of it, whole, on every process."""
        state = checkpoint_tensors.collect(self.model, self.optimizer, self.average)
        return {
            name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
            for name, tensor in checkpoint_tensors.flatten(state).items()
        }


def digest(state: dict[str, Tensor]) -> str:
    content = (f"{name} {tensor.tolist()}" for name, tensor in sorted(state.items()))
    return hashlib.sha256("\n".join(content).encode()).hexdigest()


def evaluate(training: Training) -> Tensor:
    training.model.eval()
    with torch.no_grad():
        outputs = training.model(torch.ones(2, 1, 5, 5).double(), 0)
    training.model.train()
    return outputs


# --- what each process runs ----------------------------------------------------------------------


def start(kind: str) -> Any:
    from accelerate import Accelerator, PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)
    for key in set().union(*KINDS.values()):
        os.environ.pop(key, None)
    os.environ.update(KINDS[kind])
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return Accelerator(cpu=True, fsdp_plugin=fsdp2.plugin(rehearsed=True))


def work(kind: str, directory: Path) -> dict[str, Any]:
    """On each process: what the tests below look at."""
    accelerator = start(kind)
    trained = Training(accelerator)
    found: dict[str, Any] = {"rows": trained.steps(1, 3)}
    found["sharded"] = all(isinstance(p, DTensor) for p in trained.parameters)
    trained.save(directory / kind)
    found["saved"] = trained.state()
    before = evaluate(trained)
    with trained.average.in_place():
        found["averaged"] = evaluate(trained)
    found["evaluation changes nothing"] = before.equal(evaluate(trained))
    found["rows"] += trained.steps(4, 6)
    found["trained"] = trained.state()
    found["weights"] = checkpoint_tensors.full_weights(trained.model)
    resumed = Training(accelerator)
    resumed.load(directory / "plain")
    found["loaded"] = resumed.state()
    found["rows of resumed"] = resumed.steps(4, 6)
    return found


def scaled(scale: float) -> tuple[float, float]:
    """A gradient that overflows in its last row, which one process holds: (norm, next scale)."""
    model = fully_shard(nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    outputs = model(torch.ones(1, 4)) * torch.tensor([1, 1, 1, 1e15])
    outputs.sum().backward(scaler.scale(torch.ones(())))
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
    scaler.step(optimizer)
    scaler.update()
    return norm, scaler.get_scale()


def mixed_up() -> str:
    """Processes that call layers of the same size in different orders."""
    layers = nn.ModuleList(fully_shard(nn.Linear(4, 4)) for _ in range(2))

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            return layers[dist.get_rank() % 2](x)

    model = fully_shard(Branches())
    used = fsdp2.UsedParameters(model, dist.new_group(backend="gloo"))
    loss = model(torch.ones(2, 4)).sum()
    used.agree_in_backward(loss)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {kind: work(kind, directory) for kind in KINDS}
    found["scaled"] = [scaled(2.0**scale) for scale in (0, 80)]
    found["mixed up"] = mixed_up()
    torch.save(found, directory / f"rank-{dist.get_rank()}.pt")
    dist.destroy_process_group()


# --- the tests -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fsdp2")
    plain = Training()
    plain.steps(1, 3)
    plain.save(directory / "plain")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
    code, output = run([*launcher, __file__, str(directory)], timeout=100)
    assert code == 0, output
    return directory


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(4)]


@pytest.fixture(scope="module")
def plain() -> tuple[Training, list[tuple[float, float]]]:
    training = Training()
    return training, training.steps(1, 6)


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("fsdp2")]  # one makes the fixture
each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
def test_steps_are_those_of_one_plain_process(kind, ranks, plain):
    training, rows = plain
    for rank in ranks:
        assert rank[kind]["sharded"]
        assert rank[kind]["rows"] == ranks[0][kind]["rows"]
        torch.testing.assert_close(torch.tensor(rank[kind]["rows"]), torch.tensor(rows))
        assert_close(rank[kind]["trained"], training.state())
    assert not any("sometimes.2" in name for name in training.state() if "optimizer" in name)


@each_kind
def test_averaged_weights_are_evaluated_and_training_goes_on_unmoved(kind, ranks):
    training = Training()
    training.steps(1, 3)
    with training.average.in_place():
        expected = evaluate(training)
    for rank in ranks:
        torch.testing.assert_close(rank[kind]["averaged"], expected, rtol=1e-9, atol=1e-9)
        assert rank[kind]["evaluation changes nothing"]


@each_kind
def test_checkpoints_go_from_one_process_to_fsdp2_and_back_bit_for_bit(kind, ranks, folder, plain):
    saved = Training()
    saved.steps(1, 3)
    back = Training()
    back.load(folder / kind)
    for rank in ranks:
        assert digest(rank[kind]["loaded"]) == digest(saved.state())
        assert digest(rank[kind]["saved"]) == digest(back.state())
    rows = back.steps(4, 6)
    torch.testing.assert_close(torch.tensor(rows), torch.tensor(plain[1][3:]))
    torch.testing.assert_close(torch.tensor(ranks[0][kind]["rows of resumed"]), torch.tensor(rows))


@each_kind
def test_the_main_process_has_the_whole_weights_under_their_own_names(kind, ranks):
    weights = ranks[0][kind]["weights"]
    whole = Net().double()
    whole.load_state_dict(weights)
    assert all(type(weight) is Tensor for weight in weights.values())
    state = ranks[0][kind]["trained"]
    assert digest(weights) == digest({k[6:]: v for k, v in state.items() if k[:6] == "model."})
    assert not any(rank[kind]["weights"] for rank in ranks[1:])


def test_an_overflow_on_one_process_is_one_on_all(ranks):
    for fitting, overflown in (rank["scaled"] for rank in ranks):
        assert fitting == (pytest.approx(2e15), 1.0)
        assert overflown == (float("inf"), 2.0**79)  # halved


def test_layers_called_in_different_orders_end_the_run_on_all_processes(ranks):
    assert all("in different orders" in rank["mixed up"] for rank in ranks)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("FSDP_VERSION", "1"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "True"),
        ("FSDP_IGNORED_MODULES", ".*head"),
    ],
)
def test_what_would_change_the_result_is_refused(key, value):
    fsdp2.check({"FSDP_VERSION": "2"})
    with pytest.raises(ValueError, match=key.lower()):
        fsdp2.check({"FSDP_VERSION": "2", key: value})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
