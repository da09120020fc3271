"""A checkpoint comes back bit for bit, and training goes on from it as if never stopped."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evenstep import checkpoint

import pytest
import torch
from checkpoint_run import (
    OPTIMIZERS,
    Net,
    Run,
    assert_same,
    compiled,
    names,
    stored_keys,
    weights_sha256,
)
from torch import Tensor, nn


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


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
    assert torch.equal(resumed.ema.tensors["frozen"], run.ema.tensors["frozen"])


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


@pytest.mark.parametrize(("saver", "loader"), [(compiled, None), (None, compiled)])
def test_compiled_and_plain_runs_load_each_other(run_dir: Path, saver: Any, loader: Any) -> None:
    run = Run(0, **({"wrap": saver} if saver else {})).train(2)
    resumed = Run(1, **({"wrap": loader} if loader else {}))
    path = run.save(run_dir)
    resumed.load(path)
    assert_same(resumed.state(), run.state())
    assert weights_sha256(resumed.model) == weights_sha256(run.plain)
    assert not any("_orig_mod" in key or "module." in key for key in stored_keys(path))


def test_only_text_and_safetensors_are_written(run_dir: Path) -> None:
    path = Run(0).train(1).save(run_dir)
    assert {p.suffix for p in path.iterdir()} == {".safetensors", ".json", ".yaml"}
    for file in path.glob("*.json"):
        json.loads(file.read_text())
    assert (path / "config.yaml").read_text() == "seed: 0\n"
    expected = {f"model.{name}" for name in Net().state_dict()}
    expected |= {f"ema.{name}" for name, _ in Net().named_parameters()}
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
    before = weights_sha256(model)
    with pytest.raises(ValueError, match="does not fit") as error:
        other.load(path)
    assert "model.conv.extra is missing in the checkpoint and (1,)" in str(error.value)
    assert "model.first.bias is (6,) torch.float32 in the checkpoint and missing" in str(
        error.value
    )
    assert "model.norm.bias is (6,) torch.float32 in the checkpoint and (7,)" in str(error.value)
    assert weights_sha256(model) == before


def test_saving_a_step_again_replaces_it(run_dir: Path) -> None:
    Run(0).train(1).save(run_dir)
    again = Run(1).train(1)
    path = again.save(run_dir)
    resumed = Run(2)
    resumed.load(path)
    assert_same(resumed.state(), again.state())
    assert names(run_dir) == ["step-00000001"]


# --- hash and export ---------------------------------------------------------------------------


def test_one_bit_of_a_weight_changes_the_hash() -> None:
    model = Net()
    before = weights_sha256(model)
    assert before == weights_sha256(compiled(copy.deepcopy(model)))
    model.norm.num_batches_tracked += 1
    assert weights_sha256(model) != before
    assert len(before) == 64


def export(run_dir: Path, task_export: Callable[[nn.Module, Path], None] | None) -> Path:
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.yaml").write_text("seed: 0\n")
    return checkpoint.export(run_dir, lambda: Run(0).plain, task_export=task_export)


def test_exported_weights_load_into_the_model_as_its_author_wrote_it(run_dir: Path) -> None:
    from safetensors.torch import load_model

    final = export(run_dir, lambda model, directory: None)
    model = Net()
    load_model(model, final / "model.safetensors")
    assert weights_sha256(model) == weights_sha256(Run(0).plain)
    assert sorted(p.name for p in final.iterdir()) == ["config.yaml", "model.safetensors"]


def test_a_task_that_writes_its_own_weights_writes_the_only_ones(run_dir: Path) -> None:
    def save_pretrained(model: nn.Module, directory: Path) -> None:
        assert type(model) is Net
        (directory / "model-00001-of-00001.safetensors").write_bytes(b"weights")

    export(run_dir, None)
    final = export(run_dir, save_pretrained)
    expected = ["config.yaml", "model-00001-of-00001.safetensors"]
    assert sorted(p.name for p in final.iterdir()) == expected
