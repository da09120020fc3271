"""Recipes in the model, the optimizer and the run: each against arithmetic written out here, then
all of them with real processes."""

import copy
import json
import shutil
from types import SimpleNamespace

import train
from evenstep import gradient_checkpointing, learner
from evenstep.batchnorm import BatchNormStatistics
from evenstep.config_sections import AdamW, EarlyStopping
from evenstep.early_stopping import check_rule
from evenstep.freezing import freeze
from evenstep.hardware import Hardware
from evenstep.layers import blocks
from evenstep.run_state import RunState

import pytest
import recipe_task
import torch
import torchvision
from accelerate import Accelerator
from launching import ROOT, command, metrics, run, summary, write_config
from safetensors.torch import load_file
from torch import nn
from transformers import ViTModel

pytestmark = pytest.mark.xdist_group("recipes_training")  # one process makes its fixture

# --- freezing ------------------------------------------------------------------------------------


def network():
    torch.manual_seed(0)
    return recipe_task.Blocks().double()


def test_a_part_that_from_pretrained_made_trains_in_a_model_of_ones_own(tmp_path):
    """And one that its author froze in eval mode does not."""
    recipe_task.vit().save_pretrained(tmp_path)

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.fixed = (ViTModel.from_pretrained(tmp_path) for _ in range(2))
            self.fixed.requires_grad_(False)
            self.norm = nn.BatchNorm1d(3).eval()

    config = SimpleNamespace(
        seed=0, precision="fp32", reproducibility="rounding", compile=False, ema_decay=None,
        gradient_checkpointing=False, freeze=(), optimizer=AdamW(lr=0.1),
    )  # fmt: skip
    task = SimpleNamespace(model=Own)
    built = learner.build(config, task, Hardware(Accelerator(cpu=True), channel=None)).bare
    assert all(part.training for part in built.backbone.modules())
    assert not any(part.training for part in (*built.fixed.modules(), built.norm))


def test_what_is_frozen_stays_bit_for_bit_and_all_else_is_trained():
    """With weight decay, and BatchNorm statistics."""
    config = SimpleNamespace(
        seed=0, precision="fp32", reproducibility="rounding", compile=False, ema_decay=None,
        gradient_checkpointing=False, freeze=("stem", "blocks.0", "head.b*"),
        optimizer=AdamW(lr=0.1, weight_decay=0.1),
    )  # fmt: skip
    hardware = Hardware(Accelerator(cpu=True), channel=None)
    task = recipe_task.build(recipe_task.Config())
    built = learner.build(config, task, hardware)
    program = train.Run(config, hardware, task, built)
    before = copy.deepcopy(built.bare.state_dict())
    batch = task.collate(task.train_dataset[:8])
    for step in (1, 2):
        train.train_step(program, step, [(8, batch)], targets=8, lr=0.1)
        with built.evaluating():
            pass
    same = {name for name, value in built.bare.state_dict().items() if value.equal(before[name])}
    block = {name for name in before if name.startswith("blocks.0.")}
    assert same == {"stem.weight", "stem.bias", "head.bias"} | block
    state = built.strategy.tensors(None).collect()
    moments = {name[10:-8] for name in state if name.endswith(".exp_avg")}
    assert moments == {n for n, p in built.bare.named_parameters() if n not in same}


def test_a_frozen_batchnorm_normalises_by_the_statistics_it_has():
    net = network()
    freeze(net, ["blocks.0.norm", "blocks.1.norm.weight"])
    first, second = net.blocks[0].norm, net.blocks[1].norm
    first.running_mean.fill_(5.0)
    x = torch.randn(4, 16).double()
    torch.testing.assert_close(first(x), (x - 5) / (1 + first.eps) ** 0.5)
    assert second(x).mean(0).abs().max() < 1e-9  # only half of it is frozen
    assert net.training


@pytest.mark.parametrize(
    "pattern", ["blocks.1", "blocks.1.norm", "blocks.?.norm", "*norm", "*", "blocks"]
)
def test_a_frozen_batchnorm_without_parameters_keeps_its_statistics_too(pattern):
    net = network()
    net.blocks[1].norm = norm = nn.BatchNorm1d(16, affine=False).double()
    freeze(net, [pattern])
    norm(torch.randn(4, 16).double() + 5)
    assert norm.running_mean.count_nonzero() == 0


def test_a_batchnorm_without_parameters_outside_of_what_is_frozen_goes_on():
    net = network()
    net.blocks[1].norm = nn.BatchNorm1d(16, affine=False).double()
    freeze(net, ["stem", "blocks.0", "*.weight", "*.bias"])
    assert net.blocks[1].norm.training
    with pytest.raises(ValueError, match=r"names no parameter; nearest: blocks\.1\.norm"):
        freeze(net, ["blocks.1.nrm"])


def test_a_pattern_that_names_nothing_is_an_error_with_the_nearest_names():
    with pytest.raises(ValueError, match=r"'blocks\.0\.nrm' names no parameter; nearest: blocks"):
        freeze(network(), ["stem", "blocks.0.nrm"])
    with pytest.raises(ValueError, match=r"'norm\.\*x' names no parameter"):
        freeze(network(), ["norm.*x"])
    with pytest.raises(ValueError, match=r"nearest: blocks\.0\.norm\.weight"):
        freeze(network(), ["0.norm"])


# --- gradient checkpointing ----------------------------------------------------------------------


def resnet():
    torch.manual_seed(0)
    return torchvision.models.resnet18(num_classes=3).double()


def gradients(model, x):
    """Of a forward and backward with dropout masks from one seed: (outputs, gradients, statistics
    after a step with BatchNorm's)."""
    statistics = BatchNormStatistics(model)
    statistics.start()
    torch.manual_seed(1)
    outputs = model(x)
    torch.rand(1)  # the masks of the backward must not depend on what was drawn since
    outputs.square().sum().backward()
    statistics.collect(0)
    statistics.commit(lambda terms: torch.stack(terms).sum(0))
    return outputs, {n: p.grad for n, p in model.named_parameters()}, dict(model.named_buffers())


@pytest.mark.parametrize(
    ("build", "shape"), [(network, (4, 64)), (resnet, (2, 3, 32, 32))], ids=["blocks", "resnet"]
)
def test_checkpointed_blocks_give_the_same_gradients_and_statistics_bit_for_bit(build, shape):
    x = torch.randn(*shape).double()
    plain, checkpointed = build(), build()
    gradient_checkpointing.enable(checkpointed)
    assert checkpointed.state_dict().keys() == plain.state_dict().keys()
    for ours, theirs in zip(gradients(checkpointed, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    counts = [b for n, b in checkpointed.named_buffers() if n.endswith("num_batches_tracked")]
    assert all(count == 1 for count in counts)


def test_compiled_checkpointed_blocks_give_the_same_gradients():
    x = torch.randn(4, 64).double()
    plain, compiled = network(), network()
    gradient_checkpointing.enable(compiled)
    compiled.compile(backend="aot_eager")
    for ours, theirs in zip(gradients(compiled, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def saved_bytes(model, x):
    """What a forward keeps for the backward, parameters apart."""
    kept, parameters = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # alive: no address used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(x)
    return sum(size for size, _ in kept.values())


def test_the_forward_keeps_less_for_the_backward():
    x = torch.randn(32, 16)
    plain, checkpointed = (
        nn.Sequential(*(recipe_task.Block(16) for _ in range(8))) for _ in range(2)
    )
    gradient_checkpointing.enable(checkpointed)
    assert 0 < saved_bytes(checkpointed, x) < saved_bytes(plain, x) / 3


def test_a_transformer_keeps_its_gradients_with_frozen_inputs():
    """Where blocks get inputs that need no gradient, the reentrant kind would give none."""
    results = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = recipe_task.vit().double().train()
        freeze(model, ["vit.embeddings"])
        if enabled:
            gradient_checkpointing.enable(model)
        torch.manual_seed(1)
        model(torch.ones(2, 1, 8, 8).double()).logits.square().sum().backward()
        results.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert all(
        gradient.abs().sum() > 0 for n, gradient in results[1].items() if "key.bias" not in n
    )
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_a_model_without_repeated_blocks_is_refused():
    for model in (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torchvision.models.vgg11()):
        with pytest.raises(ValueError, match="gradient_checkpointing needs repeated blocks"):
            gradient_checkpointing.enable(model)


def test_blocks_are_the_outermost_repeated_parts_in_order():
    inner = [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(4)]
    parts = [nn.Sequential(inner[0], inner[1]), nn.Sequential(inner[2], inner[3])]
    assert list(blocks(nn.Sequential(*parts, nn.Linear(2, 2)), "a test")) == ["0", "1"]
    expected = [f"layer{stage}.{i}" for stage in (1, 2, 3, 4) for i in (0, 1)]
    assert list(blocks(torchvision.models.resnet18(), "a test")) == expected


def test_blocks_are_where_the_parameters_are():
    stem = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(4)))
    body = nn.ModuleList(nn.ModuleList([recipe_task.Block(16)]) for _ in range(3))
    found = list(blocks(nn.ModuleDict({"stem": stem, "body": body}), "a test"))
    assert found == [f"body.{i}.0" for i in range(3)]


# --- early stopping ------------------------------------------------------------------------------


def evaluations(values, **rule):
    """A run state after evaluations with these losses, at steps 1, 2, ..., or until it stops."""
    task = SimpleNamespace(best_metric="loss", higher_is_better=False, eval_dataset=[0])
    state = RunState()
    for step, value in enumerate(values, start=1):
        state.step = step
        state.evaluated({"eval/loss": value, "eval/up": -value}, task, EarlyStopping(**rule))
        if state.stopped_early:
            break
    return state


@pytest.mark.parametrize(
    ("values", "rule", "end"),
    [
        ([3, 2, 1, 1, 1, 0], {"patience": 2}, 5),
        ([3, 2, 1, 1, 0.5, 0.5, 0.5], {"patience": 2}, 7),
        ([3, 2.95, 2.85, 2.75], {"patience": 2, "min_delta": 0.1}, None),  # 2.85 is
        ([3, 2.95, 2.92, 2.75], {"patience": 2, "min_delta": 0.1}, 3),
        ([3, 2, 1], {"patience": 1, "metric": "up", "higher_is_better": False}, 2),
        ([3, 2, 1], {"patience": 1, "metric": "eval/up", "higher_is_better": True}, None),
        ([float("nan"), float("nan")], {"patience": 2}, 2),
        ([float("nan"), 1, float("nan"), 2], {"patience": 2}, 4),
    ],
)
def test_a_run_stops_after_so_many_evaluations_without_improvement(values, rule, end):
    state = evaluations(values, **rule)
    assert (state.step if state.stopped_early else None) == end
    assert len(state.remaining(100)) == (0 if end else 100 - len(values))


def test_what_early_stopping_cannot_go_by_is_refused():
    with pytest.raises(ValueError, match=r"'f1' is no metric .* give one of loss, up"):
        evaluations([1], metric="f1", higher_is_better=True)
    with pytest.raises(ValueError, match="higher_is_better as well"):
        evaluations([1], metric="up")
    task = SimpleNamespace(best_metric="loss", higher_is_better=False, eval_dataset=None)
    with pytest.raises(ValueError, match="no evaluation split"):
        check_rule(EarlyStopping(), task, eval_every=1, last_step=100)


def test_early_stopping_that_could_end_no_run_is_refused():
    task = SimpleNamespace(best_metric="loss", higher_is_better=False, eval_dataset=[0])
    check_rule(EarlyStopping(patience=3), task, eval_every=5, last_step=21)
    check_rule(None, task, eval_every=0, last_step=21)
    for every, there_are in ((5, 3), (0, 0)):  # that of step 20 is at the end anyway
        with pytest.raises(ValueError, match=rf"patience=3 .* have {there_are} evaluation\(s\)"):
            check_rule(EarlyStopping(patience=3), task, eval_every=every, last_step=20)


# --- real processes ------------------------------------------------------------------------------

RECIPES = {
    "frozen": [  # and SWA, layer decay, gradient checkpointing
        "freeze=[stem, blocks.0.norm]",
        "gradient_checkpointing=true",
        "optimizer={name: adamw, lr: 0.01, weight_decay: 0.1, layer_decay: 0.7}",
        "swa_start=50%",
    ],
    "muon": ["optimizer={name: muon, lr: 0.02, adamw_lr: 0.01, weight_decay: 0.1}"],
    "schedule_free": [
        "optimizer={name: schedule_free, lr: 0.02, weight_decay: 0.1}",
        "schedule={name: constant, warmup: 4}",
        "gradient_checkpointing=true",
    ],
    "lora": ["task.lora={r: 2, dropout: 0.1}", "ema_decay=0.8"],
    "stopped_early": ["early_stopping={patience: 1, min_delta: 9}", "eval_every=4"],
    "bitwise": [  # the last, since torch keeps its deterministic kernels
        "reproducibility=bitwise",
        "precision=fp32",
        "freeze=[stem]",
        "gradient_checkpointing=true",
        "optimizer={name: muon, lr: 0.02, layer_decay: 0.7}",
        "swa_start=3",
    ],
}


def launched(directory, processes, runs):
    """Each of `runs`, name to overrides, in one launch on so many processes."""
    config = write_config(
        directory, task={"name": "recipe_task"}, steps=12, global_batch_size=32,
        micro_batch_size=8, eval_every=6, save_every=6, keep_checkpoints=9, cpu_threads=1,
    )  # fmt: skip
    lines = [json.dumps([str(config), f"name={name}", *rest]) for name, rest in runs.items()]
    (directory / "runs.jsonl").write_text("\n".join(lines))
    script = ROOT / "tests" / "recipe_runs.py"
    arguments = command(processes, str(directory / "runs.jsonl"), script=script)
    code, output = run(arguments, timeout=200)
    assert code == 0, output
    return output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Each recipe on one process, on two, and on two from the checkpoint of the one at half."""
    directory = tmp_path_factory.mktemp("recipes")
    launched(directory, 1, {f"{name}-1": rest for name, rest in RECIPES.items()})
    runs = {f"{name}-2": rest for name, rest in RECIPES.items()}
    for name, rest in RECIPES.items():
        part = directory / "runs" / f"{name}-resumed"
        shutil.copytree(directory / "runs" / f"{name}-1", part)
        for checkpoint in (part / "checkpoints").glob("step-*"):
            if int(checkpoint.name[5:]) > 6:
                shutil.rmtree(checkpoint)
        (part / "summary.json").unlink()
        runs[part.name] = rest
    output = launched(directory, 2, runs)
    assert output.count("resuming from") == len(RECIPES)
    return directory / "runs"


def weights(run_dir):
    return load_file(run_dir / "final" / "model.safetensors")


@pytest.mark.processes
@pytest.mark.timeout(500)
@pytest.mark.parametrize("kind", ["2", "resumed"])
@pytest.mark.parametrize("name", RECIPES)
def test_two_processes_and_a_resume_on_them_change_nothing(folder, name, kind):
    one, other = folder / f"{name}-1", folder / f"{name}-{kind}"
    if name == "bitwise":
        assert summary(one)["weights_sha256"] == summary(other)["weights_sha256"]
    rows, expected = metrics(other), metrics(one)
    assert len(rows) == len(expected)
    for row, there in zip(rows, expected, strict=True):
        assert row.keys() == there.keys()
        for key in row.keys() - {"train/samples_per_second"}:
            assert row[key] == pytest.approx(there[key], rel=1e-9, abs=1e-9), (key, row)
    ours, theirs = weights(other), weights(one)
    tolerance = 0 if name == "bitwise" else 1e-9
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["1", "2", "resumed"])
def test_a_run_that_stops_early_is_finished_and_says_why(folder, kind):
    found = summary(folder / f"stopped_early-{kind}")
    assert (found["status"], found["step"]) == ("finished", 8)
    assert "has not been better" in found["stopped_early"]
    assert (folder / f"stopped_early-{kind}" / "final" / "model.safetensors").exists()
    # The schedule is that of the whole run.
    lr = [row["train/lr"] for row in metrics(folder / f"stopped_early-{kind}")]
    assert lr == [row["train/lr"] for row in metrics(folder / "frozen-1")][:8]


@pytest.mark.processes
def test_final_holds_the_weights_that_were_evaluated(folder):
    """The mean of the last six, and the schedule-free average; a checkpoint has those trained."""
    for name, key in (("frozen", "ema.head.weight"), ("schedule_free", None)):
        (file,) = (folder / f"{name}-1" / "checkpoints" / "step-00000012").glob("*.safetensors")
        saved = load_file(file)
        final = weights(folder / f"{name}-1")["head.weight"]
        assert not final.equal(saved["model.head.weight"])
        # y = beta x + (1 - beta) z, solved for x
        y, z = saved["model.head.weight"], saved.get("optimizer.head.weight.z")
        expected = saved[key] if key else (y - 0.1 * z) / 0.9
        torch.testing.assert_close(final, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.processes
def test_lora_exports_a_merged_model_and_its_adapter(folder):
    from peft import PeftModel
    from transformers import ViTForImageClassification

    final = folder / "lora-1" / "final"
    merged = ViTForImageClassification.from_pretrained(final, dtype=torch.float64)
    assert not any("lora" in name or "base" in name for name in weights(folder / "lora-1"))
    adapter = load_file(final / "adapter" / "adapter_model.safetensors")
    assert any("lora_B" in name and value.abs().sum() > 0 for name, value in adapter.items())
    base = copy.deepcopy(merged)
    again = PeftModel.from_pretrained(base, final / "adapter")
    assert again.peft_config["default"].r == 2
    assert any("classifier" in name for name in adapter)
