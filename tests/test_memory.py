"""Out of memory: what is said, and the micro-batch size that is found."""

import copy
import subprocess
import sys
from types import SimpleNamespace

from evenstep import memory
from evenstep.hardware import Hardware
from evenstep.plan import Plan

import pytest
import torch
from accelerate import Accelerator
from launching import command, metrics, run, summary, train, write_config
from torch import nn

pytestmark = pytest.mark.xdist_group("memory")  # one process makes its fixture

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB"
CPU = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 99 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.fixture(scope="module")
def hardware():
    return Hardware(Accelerator(cpu=True), channel=None)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(CUDA),
        RuntimeError(CPU),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
        MemoryError("std::bad_alloc"),
    ],
)
def test_out_of_memory_names_the_size_and_the_next_that_fit_the_plan(error):
    plan = Plan(100, global_batch_size=48, micro_batch_size=12, seed=0)
    with pytest.raises(memory.OutOfMemory) as caught, memory.explained(plan, num_processes=2):
        raise error
    text = str(caught.value)
    assert "out of memory at micro_batch_size 12" in text
    assert "micro_batch_size=8 " in text
    assert "8, 6, 4)" in text
    assert "global_batch_size 48" in text
    assert caught.value.__cause__ is error


def test_other_errors_pass_unchanged():
    plan = Plan(100, global_batch_size=48, micro_batch_size=12, seed=0)
    with pytest.raises(RuntimeError, match="mat1 and mat2"), memory.explained(plan, 1):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def test_where_no_smaller_size_is_left_another_way_out_is_named():
    plan = Plan(100, global_batch_size=48, micro_batch_size=1, seed=0)
    with pytest.raises(memory.OutOfMemory, match=r"fsdp2\.yaml"), memory.explained(plan, 1):
        raise torch.OutOfMemoryError(CUDA)


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_candidates_are_all_sizes_that_the_plan_accepts(processes):
    accepted = []
    for size in range(1, 49):
        try:
            Plan(100, 48, size, seed=0).accumulation(processes)
        except ValueError:
            continue
        accepted.append(size)
    assert memory.candidates(48, processes) == accepted


def test_a_batch_that_processes_cannot_share_is_refused():
    with pytest.raises(ValueError, match="a multiple of 5"):
        memory.candidates(48, 5)


def learner():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5, fused=True)
    strategy = SimpleNamespace(optimizer=optimizer, start=optimizer.zero_grad)
    return SimpleNamespace(bare=model, strategy=strategy)


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 24, 47, 48, 100])
def test_the_largest_size_that_fits_is_found_and_nothing_has_moved(largest, hardware):
    it = learner()
    before = copy.deepcopy((it.bare.state_dict(), it.strategy.optimizer.state_dict()))

    def trial(size):
        it.bare(torch.randn(size + 1, 4)).sum().backward()
        if size > largest:
            raise torch.OutOfMemoryError(CUDA)
        assert all(state for state in it.strategy.optimizer.state.values())

    found = memory.find_micro_batch_size(48, it, hardware, trial)
    assert found == max(size for size in memory.candidates(48, 1) if size <= largest)
    assert all(parameter.grad is None for parameter in it.bare.parameters())
    torch.testing.assert_close(it.bare.state_dict(), before[0], rtol=0, atol=0)
    assert it.strategy.optimizer.state_dict() == before[1]


def test_all_processes_take_the_smallest_of_what_each_found():
    """Another process that fails above 6 is played by what `sums` adds."""
    sizes = []
    accelerator = SimpleNamespace(distributed_type=SimpleNamespace(value="MULTI_GPU"))
    hardware = SimpleNamespace(
        accelerator=accelerator,
        num_processes=2,
        device=torch.device("cpu"),
        sums=lambda failed: [failed[0] + (sizes[-1] > 6)],
    )
    assert memory.find_micro_batch_size(48, learner(), hardware, sizes.append) == 6


def test_no_size_that_fits_is_an_error(hardware):
    def trial(size):
        raise torch.OutOfMemoryError(CUDA)

    with pytest.raises(ValueError, match="not even one of 1 sample"):
        memory.find_micro_batch_size(48, learner(), hardware, trial)


def test_a_fault_of_another_kind_is_not_taken_for_lack_of_memory(hardware):
    def trial(size):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        memory.find_micro_batch_size(48, learner(), hardware, trial)


@pytest.mark.parametrize("strategy", ["FSDP", "DEEPSPEED"])
def test_auto_is_refused_where_a_trial_would_need_the_other_processes(strategy):
    accelerator = SimpleNamespace(distributed_type=SimpleNamespace(value=strategy))
    hardware = SimpleNamespace(accelerator=accelerator, num_processes=2)
    with pytest.raises(ValueError, match=rf"under {strategy}.*\[1, 2, 4\]"):
        memory.check_auto(SimpleNamespace(global_batch_size=8), hardware)


REAL_LIMIT = """
import resource, sys
sys.path.insert(0, "tests")
import psutil, torch
from evenstep import memory
from test_memory import Accelerator, Hardware, learner
hardware, it = Hardware(Accelerator(cpu=True), channel=None), learner()
def trial(size):
    (torch.ones(size, 2**24).exp() * 1.0).sum()  # 64 MiB a sample, twice
trial(1)
limit = psutil.Process().memory_info().vms + 2**20 * 128 * 5
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
print("found", memory.find_micro_batch_size(64, it, hardware, trial))
assert resource.getrlimit(resource.RLIMIT_AS)[0] == limit
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is kept on Linux")
def test_a_real_limit_of_the_system_is_respected():
    done = subprocess.run(
        [sys.executable, "-c", REAL_LIMIT], capture_output=True, text=True, timeout=120
    )
    assert "found 4" in done.stdout, done.stdout + done.stderr


@pytest.mark.processes
def test_running_out_of_memory_in_a_run_is_one_clear_error(tmp_path):
    """CASES 11: nothing is changed in the middle of a run."""
    config = str(write_config(tmp_path))
    code, output = run(command(2, config, "name=oom", "task.oom_above=1"), timeout=90)
    assert code not in (0, 75)
    assert "micro_batch_size=1 " in output
    cause = summary(tmp_path / "runs" / "oom")["cause"]
    assert "out of memory at micro_batch_size 2" in cause


@pytest.mark.processes
def test_auto_trains_like_the_number_that_it_finds_and_keeps_it(tmp_path):
    write_config(tmp_path, micro_batch_size="auto", steps=20)
    limited = "task.oom_above=3"
    stated = train(tmp_path, "stated", 1, limited, "micro_batch_size=2")
    found = train(tmp_path, "found", 2, limited)
    assert "micro_batch_size: 2" in (found / "config.yaml").read_text()
    for row, other in zip(metrics(stated), metrics(found), strict=True):
        assert row["train/loss"] == pytest.approx(other["train/loss"], rel=1e-9)
    alone = train(tmp_path, "alone", 1, limited)
    assert summary(alone)["weights_sha256"] == summary(stated)["weights_sha256"]
    # Back to the first checkpoint, where there is room for more: the recorded number stays.
    arguments = [str(tmp_path / "exact.yaml"), "name=alone", limited]
    first = min((alone / "checkpoints").glob("step-*"))
    code, output = run(command(1, *arguments, f"resume={first}"))
    assert code == 0, output
    assert summary(alone)["weights_sha256"] == summary(stated)["weights_sha256"]
