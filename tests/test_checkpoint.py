"""Checkpoints come back bit for bit, on any number of processes, or are named as broken."""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evenstep import checkpoint
from evenstep import checkpoint_files as files

import pytest
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from launching import run
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

ADAMW = {"cls": torch.optim.AdamW, "lr": 0.1, "weight_decay": 0.1}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": ADAMW,
    "adamw foreach": ADAMW | {"foreach": True},
    "adamw fused": ADAMW | {"fused": True},
    "sgd": {"cls": torch.optim.SGD, "lr": 0.1},
    "sgd momentum": {"cls": torch.optim.SGD, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    "sgd momentum fused": {"cls": torch.optim.SGD, "lr": 0.1, "momentum": 0.9, "fused": True},
}


class Net(nn.Module):
    """Convolution, BatchNorm, tied weights, a frozen and an unused parameter."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.to(dtype)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.norm(self.conv(images)).mean((2, 3))
        return self.second(self.first(hidden)) * self.frozen


class Run:
    """A model, optimizer and EMA, as `train.py` makes them, that can train a step."""

    def __init__(
        self,
        seed: int,
        *,
        model: Net | None = None,
        optimizer: str = "adamw",
        dtype: torch.dtype = torch.float32,
        wrap: Callable[[nn.Module], Any] = lambda model: model,
    ) -> None:
        torch.manual_seed(seed)
        unused = DistributedDataParallelKwargs(find_unused_parameters=True)
        self.accelerator = Accelerator(cpu=True, kwargs_handlers=[unused])
        self.plain = model or Net(dtype)
        self.ema = AveragedModel(self.plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        settings = dict(OPTIMIZERS[optimizer])
        raw = settings.pop("cls")(self.plain.parameters(), **settings)
        self.model, prepared = self.accelerator.prepare(wrap(self.plain), raw)
        self.optimizer = prepared.optimizer
        self.images = torch.randn(8, 1, 5, 5, dtype=dtype)

    def train(self, steps: int) -> Run:
        for step in range(steps):
            torch.manual_seed(step)
            self.model(torch.randn_like(self.images)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.ema.update_parameters(self.plain)
        return self

    def save(self, run_dir: Path, step: int = 1, **state: Any) -> Path:
        return checkpoint.save(
            run_dir,
            step,
            model=self.model,
            optimizer=self.optimizer,
            ema=self.ema,
            state=state,
            config_yaml="seed: 0\n",
        )

    def load(self, path: Path) -> dict[str, Any]:
        return checkpoint.load(
            path,
            model=self.model,
            optimizer=self.optimizer,
            ema=self.ema,
        )

    def state(self) -> dict[str, Any]:
        """Everything that decides how training goes on; made without the module under test."""
        names = {id(p): name for name, p in self.plain.named_parameters()}
        state = self.optimizer.state
        return copy.deepcopy(
            {
                **{f"model {k}": v for k, v in self.plain.state_dict().items()},
                **{f"ema {k}": v for k, v in self.ema.state_dict().items()},
                **{f"optimizer {names[id(p)]} {k}": v for p in state for k, v in state[p].items()},
            }
        )


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


def digest(run: Run) -> str:
    """What `assert_same` compares, for runs in different processes."""
    state = run.state()
    parts = [f"{name} {state[name].dtype} {state[name].tolist()}" for name in sorted(state)]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def stored_keys(path: Path) -> set[str]:
    from safetensors import safe_open

    keys: set[str] = set()
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            keys |= set(opened.keys())
    return keys


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


# --- what comes back -----------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_restores_every_bit_and_goes_on_as_if_never_stopped(run_dir: Path, optimizer: str) -> None:
    run = Run(0, optimizer=optimizer).train(3)
    path = run.save(run_dir, 3, best={"value": 0.5, "step": 2}, scaler={"scale": 65536.0})
    resumed = Run(1, optimizer=optimizer)
    numbers = resumed.load(path)
    assert numbers == {"step": 3, "best": {"value": 0.5, "step": 2}, "scaler": {"scale": 65536.0}}
    assert_same(resumed.state(), run.state())
    assert_same(resumed.train(2).state(), run.train(2).state())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_keeps_the_number_format(run_dir: Path, dtype: torch.dtype) -> None:
    run = Run(0, dtype=dtype).train(2)
    resumed = Run(1, dtype=dtype)
    resumed.load(run.save(run_dir))
    assert resumed.plain.conv.weight.dtype == dtype
    assert_same(resumed.state(), run.state())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_saving_changes_nothing_even_before_the_first_step(run_dir: Path, optimizer: str) -> None:
    run = Run(0, optimizer=optimizer)
    before = run.state()
    path = run.save(run_dir)
    assert_same(run.state(), before)
    resumed = Run(1, optimizer=optimizer)
    resumed.load(path)
    assert_same(resumed.state(), before)
    assert_same(resumed.train(2).state(), run.train(2).state())


def test_the_learning_rate_comes_from_the_config_and_not_from_the_checkpoint(run_dir: Path) -> None:
    path = Run(0).train(1).save(run_dir)
    resumed = Run(1)
    resumed.optimizer.param_groups[0]["lr"] = 0.025
    resumed.load(path)
    assert resumed.optimizer.param_groups[0]["lr"] == 0.025


def test_tied_weights_stay_tied_and_strided_weights_come_back(run_dir: Path) -> None:
    run = Run(0).train(1)
    run.plain.to(memory_format=torch.channels_last)
    resumed = Run(1)
    resumed.plain.to(memory_format=torch.channels_last)
    resumed.load(run.save(run_dir))
    assert resumed.plain.second.weight is resumed.plain.first.weight
    assert_same(resumed.state(), run.state())


class Doubled(Net):
    """A model whose `state_dict` is not its live tensors."""

    def __init__(self) -> None:
        super().__init__()

        def on_save(model: Any, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
            state[prefix + "frozen"] = 2 * state[prefix + "frozen"]

        def on_load(model: Any, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
            state[prefix + "frozen"] = state[prefix + "frozen"] / 2

        self.register_state_dict_post_hook(on_save)
        self.register_load_state_dict_pre_hook(on_load)


def test_a_model_that_converts_its_state_comes_back(run_dir: Path) -> None:
    torch.manual_seed(3)
    run, resumed = Run(0, model=Doubled()), Run(1, model=Doubled())
    resumed.load(run.save(run_dir))
    assert torch.equal(resumed.plain.frozen, run.plain.frozen)
    assert torch.equal(resumed.ema.module.frozen, run.ema.module.frozen)


def test_loading_into_a_run_that_has_trained_forgets_what_it_trained(run_dir: Path) -> None:
    run = Run(0)
    early, late = run.save(run_dir, 0), run.train(2).save(run_dir, 2)
    expected = run.state()
    run.train(3)
    del run.optimizer.state[run.plain.conv.weight]
    run.load(late)
    assert_same(run.state(), expected)
    run.load(early)
    assert_same(run.state(), Run(0).state())


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(("saver", "loader"), [(compiled, None), (None, compiled)])
def test_compiled_and_plain_runs_load_each_other(run_dir: Path, saver: Any, loader: Any) -> None:
    run = Run(0, **({"wrap": saver} if saver else {})).train(2)
    resumed = Run(1, **({"wrap": loader} if loader else {}))
    path = run.save(run_dir)
    resumed.load(path)
    assert_same(resumed.state(), run.state())
    assert checkpoint.weights_sha256(resumed.model) == checkpoint.weights_sha256(run.plain)
    assert not any("_orig_mod" in key or "module." in key for key in stored_keys(path))


def test_only_text_and_safetensors_are_written(run_dir: Path) -> None:
    path = Run(0).train(1).save(run_dir)
    assert {p.suffix for p in path.iterdir()} == {".safetensors", ".json", ".yaml"}
    for file in path.glob("*.json"):
        json.loads(file.read_text())
    assert (path / "config.yaml").read_text() == "seed: 0\n"
    expected = {f"model.{name}" for name in Net().state_dict()}
    expected |= {f"ema.{name}" for name in [*Net().state_dict(), "n_averaged"]}
    keys = stored_keys(path)
    assert {k for k in keys if not k.startswith("optimizer.")} == expected
    assert "optimizer.conv.weight.exp_avg_sq" in keys
    assert not [k for k in keys if k.startswith(("optimizer.frozen", "optimizer.unused"))]


def test_a_checkpoint_of_another_model_is_refused_naming_the_tensors(run_dir: Path) -> None:
    path = Run(0).train(1).save(run_dir)
    model = Net()
    model.norm = nn.BatchNorm2d(7)
    model.conv.extra = nn.Parameter(torch.zeros(1))
    del model.first.bias
    other = Run(1, model=model)
    before = checkpoint.weights_sha256(model)
    with pytest.raises(ValueError, match="does not fit") as error:
        other.load(path)
    assert "model.conv.extra is missing in the checkpoint and (1,)" in str(error.value)
    assert "model.first.bias is (6,) torch.float32 in the checkpoint and missing" in str(
        error.value
    )
    assert "model.norm.bias is (6,) torch.float32 in the checkpoint and (7,)" in str(error.value)
    assert checkpoint.weights_sha256(model) == before


# --- hash and export ---------------------------------------------------------------------------


def test_one_bit_of_a_weight_changes_the_hash() -> None:
    model = Net()
    before = checkpoint.weights_sha256(model)
    assert before == checkpoint.weights_sha256(compiled(copy.deepcopy(model)))
    model.norm.num_batches_tracked += 1
    assert checkpoint.weights_sha256(model) != before
    assert len(before) == 64


def export(run_dir: Path, task_export: Callable[[nn.Module, Path], None] | None) -> Path:
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.yaml").write_text("seed: 0\n")
    run = Run(0, wrap=compiled)
    return checkpoint.export(run_dir, run.model, task_export=task_export)


def test_exported_weights_load_into_the_model_as_its_author_wrote_it(run_dir: Path) -> None:
    from safetensors.torch import load_model

    final = export(run_dir, lambda model, directory: None)
    model = Net()
    load_model(model, final / "model.safetensors")
    assert checkpoint.weights_sha256(model) == checkpoint.weights_sha256(Run(0).plain)
    assert sorted(p.name for p in final.iterdir()) == ["config.yaml", "model.safetensors"]


def test_a_task_that_writes_its_own_weights_writes_the_only_ones(run_dir: Path) -> None:
    def save_pretrained(model: nn.Module, directory: Path) -> None:
        assert type(model) is Net
        (directory / "model-00001-of-00001.safetensors").write_bytes(b"weights")

    export(run_dir, None)
    final = export(run_dir, save_pretrained)
    expected = ["config.yaml", "model-00001-of-00001.safetensors"]
    assert sorted(p.name for p in final.iterdir()) == expected


# --- which checkpoint is taken -------------------------------------------------------------------


def find(run_dir: Path, resume: str = "auto") -> Path | None:
    return checkpoint.find(run_dir, resume)


def fake(run_dir: Path, step: int) -> Path:
    """A complete checkpoint, as far as files go."""
    final = files.directory(run_dir, step)
    tmp = files.temporary(final)
    files.begin(tmp)
    (tmp / "model.safetensors").write_bytes(b"weights of step %d" % step)
    (tmp / "state.json").write_text(f'{{"step": {step}}}')
    files.complete(tmp, final)
    return final


def test_nothing_to_resume_from_is_none(run_dir: Path) -> None:
    assert find(run_dir) is None


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncated", "bit flipped", "deleted"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_is_taken(
    run_dir: Path, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good, broken = fake(run_dir, 90), fake(run_dir, 100)
    file = broken / name
    content = bytearray(file.read_bytes())
    if damage == "truncated":
        file.write_bytes(content[:-3])
    elif damage == "bit flipped":
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    else:
        file.unlink()
    assert find(run_dir) == good
    printed = capsys.readouterr().err
    assert str(broken) in printed
    assert name in printed
    with pytest.raises(ValueError, match=name):
        find(run_dir, str(broken))


def test_every_flipped_bit_of_a_checkpoint_is_detected(run_dir: Path) -> None:
    path = fake(run_dir, 1)
    for file in path.iterdir():
        content = file.read_bytes()
        for bit in range(8 * len(content)):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            with pytest.raises(ValueError, match=str(path)):
                files.verify(path)
        file.write_bytes(content)
    files.verify(path)


def test_a_file_that_was_added_is_not_loaded(run_dir: Path) -> None:
    path = fake(run_dir, 1)
    (path / "notes.txt").write_text("best so far")
    files.verify(path)
    (path / "other.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"other\.safetensors"):
        files.verify(path)


def test_an_unfinished_save_is_named_and_never_loaded(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = fake(run_dir, 90)
    tmp = files.temporary(files.directory(run_dir, 100))
    tmp.mkdir()
    (tmp / "model.safetensors").write_bytes(b"half of the wei")
    assert find(run_dir) == good
    assert str(tmp) in capsys.readouterr().err


def test_resume_takes_a_path_or_the_best_pointer(run_dir: Path) -> None:
    first, second = fake(run_dir, 1), fake(run_dir, 2)
    files.point_best(run_dir, 1)
    assert (run_dir / "best").read_text() == "checkpoints/step-00000001\n"
    assert find(run_dir, str(run_dir / "best")) == first
    assert find(run_dir, str(second)) == second
    with pytest.raises(ValueError, match="step-00000003"):
        find(run_dir, str(files.directory(run_dir, 3)))


# --- which checkpoints stay ----------------------------------------------------------------------


def names(run_dir: Path) -> list[str]:
    return sorted(p.name for p in (run_dir / "checkpoints").iterdir())


def test_the_newest_by_number_and_the_best_stay(run_dir: Path) -> None:
    for step in (1000, 200, 90, 80, 70, 60, 50, 40, 30, 20):
        # Without padding, text order is 1000, 20, 200, 30, ..., 90.
        fake(run_dir, step).rename(run_dir / "checkpoints" / f"step-{step}")
    (run_dir / "checkpoints" / "step-mine").mkdir()
    (run_dir / "checkpoints" / "notes.txt").write_text("mine")
    files.prune(run_dir, keep=2, best_step=30)
    assert names(run_dir) == ["notes.txt", "step-1000", "step-200", "step-30", "step-mine"]
    assert find(run_dir) == run_dir / "checkpoints" / "step-1000"


def test_a_deletion_that_is_killed_leaves_nothing_that_looks_complete(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        fake(run_dir, step)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            files.prune(run_dir, keep=1, best_step=None)
    assert names(run_dir) == [".step-00000001.trash", "step-00000002"]
    files.prune(run_dir, keep=1, best_step=None)
    assert names(run_dir) == ["step-00000002"]


def test_checkpoints_that_were_passed_over_do_not_push_out_the_ones_that_are_used(
    run_dir: Path,
) -> None:
    used = fake(run_dir, 100)
    for step in (150, 200):
        (fake(run_dir, step) / "manifest.json").unlink()
    assert find(run_dir) == used
    files.abandon_newer(run_dir, 100)
    new = fake(run_dir, 120)
    files.prune(run_dir, keep=2, best_step=None)
    assert find(run_dir) == new
    assert names(run_dir) == [
        "step-00000100",
        "step-00000120",
        "step-00000150.abandoned",
        "step-00000200.abandoned",
    ]


def test_saving_a_step_again_replaces_it(run_dir: Path) -> None:
    Run(0).train(1).save(run_dir)
    again = Run(1).train(1)
    path = again.save(run_dir)
    resumed = Run(2)
    resumed.load(path)
    assert_same(resumed.state(), again.state())
    assert names(run_dir) == ["step-00000001"]


# --- what a full disk and a kill leave -----------------------------------------------------------


def script(tmp_path: Path, body: str, *, processes: int = 1) -> tuple[int, str]:
    """(return code, output) of Python code that sees this module, on CPU processes."""
    prelude = f"""
        import os, resource, shutil, signal, sys
        from test_checkpoint import *
        torch.set_num_threads(1)
        run_dir = Path({str(tmp_path / "run")!r})
    """
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(prelude) + textwrap.dedent(body))
    options = f"--multi_gpu --num_processes {processes} --num_machines 1 --main_process_port 0"
    launcher = ["-m", "accelerate.commands.launch", *options.split(), "--mixed_precision", "no"]
    launched = [*launcher, "--dynamo_backend", "no"] if processes > 1 else []
    return run([sys.executable, *launched, str(file)], timeout=150)


def test_a_full_disk_ends_the_save_and_keeps_the_checkpoint_before_it(
    tmp_path: Path, run_dir: Path
) -> None:
    before = Run(0).train(1).save(run_dir, 1)
    size = max(file.stat().st_size for file in before.iterdir())
    code, output = script(
        tmp_path,
        f"""
        resource.setrlimit(resource.RLIMIT_FSIZE, ({size // 2}, {size // 2}))
        Run(1).train(2).save(run_dir, 2)
        """,
    )
    assert code == 1
    assert "could not save" in output
    assert "File too large" in output
    assert find(run_dir) == before
    assert names(run_dir) == ["step-00000001"]


KILLED = """
    def killed_at(moment, action):
        # True if `action`, in a process of its own, was killed as it was about to touch a file
        # for the nth time; False if it came to its end before.
        touched = 0

        def hook(event, arguments):
            nonlocal touched
            if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
                touched += str(arguments[0]).startswith(str(run_dir))
                if touched == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

        if child := os.fork():
            return os.waitpid(child, 0)[1] == signal.SIGKILL
        sys.addaudithook(hook)
        action()
        os._exit(0)

    old, new, resumed = Run(0).train(1), Run(0).train(2), Run(1)
    old.save(run_dir, 1)
    moment, found = 1, []
    while killed_at(moment, lambda: new.save(run_dir, STEP)):
        path = find(run_dir)
        resumed.load(path)
        found.append((path.name, resumed.plain.norm.num_batches_tracked.item()))
        shutil.rmtree(run_dir)
        old.save(run_dir, 1)
        moment += 1
    print("found", found)
"""


@pytest.mark.parametrize("step", [2, 1], ids=["a new step", "the same step again"])
def test_a_kill_at_any_moment_of_a_save_leaves_a_checkpoint_to_resume_from(
    tmp_path: Path, step: int
) -> None:
    code, output = script(tmp_path, KILLED.replace("STEP", str(step)))
    assert code == 0, output
    found = ast.literal_eval(output.rpartition("found ")[2])
    old, new = ("step-00000001", 1), (f"step-0000000{step}", 2)
    assert found == [old] * found.count(old) + [new] * found.count(new)
    assert found.count(old) >= 5
    assert found.count(new) >= 2


# --- several processes ----------------------------------------------------------------------------


@pytest.mark.processes
def test_one_and_two_processes_load_each_others_checkpoints_bit_for_bit(
    tmp_path: Path, run_dir: Path
) -> None:
    alone = Run(0).train(3)
    alone.save(run_dir, 1)
    code, output = script(
        tmp_path,
        """
        both, resumed = Run(0).train(3), Run(1)
        assert both.accelerator.num_processes == 2
        resumed.load(find(run_dir))
        both.save(run_dir, 2)
        for text in ("loaded", digest(resumed)), ("saved", digest(both)):
            print(f"<{' '.join(text)}>", flush=True)
        print(f"<hash {checkpoint.weights_sha256(both.model)}>", flush=True)
        inside = Run(2, wrap=compiled)
        inside.load(files.directory(run_dir, 2))
        assert_same(inside.state(), both.state())
        for model in inside.model, compiled(both.model):
            assert checkpoint.weights_sha256(model) == checkpoint.weights_sha256(both.plain)
            assert type(checkpoint.unwrap(model)) is Net
        both.accelerator.end_training()
        """,
        processes=2,
    )
    assert code == 0, output
    assert output.count(f"<loaded {digest(alone)}>") == 2
    resumed = Run(1)
    path = files.directory(run_dir, 2)
    resumed.load(path)
    assert output.count(f"<saved {digest(resumed)}>") == 2
    assert output.count(f"<hash {checkpoint.weights_sha256(resumed.plain)}>") == 2
    assert len(list(path.glob("*.safetensors"))) == 2
    assert not any("module." in key for key in stored_keys(path))


@pytest.mark.processes
def test_when_one_process_fails_all_raise_and_the_next_save_works(tmp_path: Path) -> None:
    code, output = script(
        tmp_path,
        """
        both = Run(0).train(1)
        rank = both.accelerator.process_index
        both.save(run_dir, 1)
        free = resource.getrlimit(resource.RLIMIT_FSIZE)
        for unlucky in (0, 1):
            if rank == unlucky:
                resource.setrlimit(resource.RLIMIT_FSIZE, (500, free[1]))
            with pytest.raises(RuntimeError, match=f"process {unlucky}: .*File too large"):
                both.save(run_dir, 2)
            resource.setrlimit(resource.RLIMIT_FSIZE, free)
        bad = both.optimizer.state[both.plain.conv.weight]
        if rank == 1:
            bad["count"] = 3
        with pytest.raises(RuntimeError, match="optimizer.conv.weight.count is a int"):
            both.save(run_dir, 2)
        bad.pop("count", None)
        with pytest.raises(ValueError, match="step-00000002"):
            find(run_dir, str(files.directory(run_dir, 2)))
        assert find(run_dir).name == "step-00000001"
        both.save(run_dir, 2)
        assert find(run_dir).name == "step-00000002"
        both.accelerator.end_training()
        """,
        processes=2,
    )
    assert code == 0, output
