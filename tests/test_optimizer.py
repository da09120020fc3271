import sys

from evenstep.checkpoint_tensors import collect, flatten, read, targets, write
from evenstep.config import SGD, AdamW, Muon, ScheduleFree
from evenstep.optimizer import build, lr_scales, parameter_groups, set_lr

import pytest
import recipe_task
import torch
import torchvision
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

SMALL = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
MODELS = {
    "resnet": lambda: torchvision.models.resnet18(num_classes=3),
    "vit": lambda: ViTForImageClassification(ViTConfig(**SMALL)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=20)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(vocab_size=20, **SMALL)),
    "roberta": lambda: RobertaForSequenceClassification(RobertaConfig(vocab_size=20, **SMALL)),
}


@pytest.mark.parametrize("name", MODELS)
def test_only_matrices_decay_and_each_parameter_is_in_one_group(name):
    """CASES 9, by the types of the modules rather than by shape."""
    model = MODELS[name]()
    decays, rests = parameter_groups(model, 0.05)
    assert (decays["weight_decay"], rests["weight_decay"]) == (0.05, 0.0)
    grouped = [id(p) for group in (decays, rests) for p in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(p) for p in model.parameters()}
    decayed = {id(p) for p in decays["params"]}
    for module_name, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            is_norm = "norm" in type(module).__name__.lower()
            if is_norm or parameter_name == "bias":
                assert id(parameter) not in decayed, f"{module_name}.{parameter_name}"
            if (
                isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding)
                and parameter_name == "weight"
            ):
                assert id(parameter) in decayed, f"{module_name}.{parameter_name}"


def test_frozen_parameters_are_in_no_group():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    grouped = [p for group in parameter_groups(model, 0.1) for p in group["params"]]
    assert len(grouped) == 2


def test_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match="nothing to train"):
        build(nn.Linear(2, 2).requires_grad_(False), SGD())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("config", "reference"),
    [
        (
            AdamW(lr=0.1, betas=(0.9, 0.99), weight_decay=0.1),
            lambda p: torch.optim.AdamW(
                p, lr=0.1, betas=(0.9, 0.99), weight_decay=0.1, foreach=False
            ),
        ),
        (
            SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
            lambda p: torch.optim.SGD(
                p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=False
            ),
        ),
    ],
)
def test_the_fast_kernels_compute_what_the_plain_loops_do(config, reference, dtype):
    ours, theirs = (nn.Linear(4, 3, bias=False).to(dtype) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    optimizers = build(ours, config), reference(theirs.parameters())
    assert optimizers[0].defaults["fused"]
    for _ in range(5):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(2, 4, dtype=dtype)).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight)


# --- layer-wise learning-rate decay --------------------------------------------------------------

DEEP = {
    "resnet": (lambda: torchvision.models.resnet18(num_classes=3), 8),
    "vit": (lambda: ViTForImageClassification(ViTConfig(**SMALL | {"num_hidden_layers": 3})), 3),
    "gpt2": (
        lambda: GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=20)),
        3,
    ),
    "llama": (
        lambda: LlamaForCausalLM(LlamaConfig(vocab_size=20, **SMALL | {"num_hidden_layers": 3})),
        3,
    ),
    "roberta": (
        lambda: RobertaForSequenceClassification(
            RobertaConfig(vocab_size=20, **SMALL | {"num_hidden_layers": 3})
        ),
        3,
    ),
}
FIRST = {  # what comes before the first block, and after the last
    "resnet": (("conv1.", "bn1."), ("fc.",)),
    "vit": (("vit.embeddings.",), ("vit.layernorm.", "classifier.")),
    "gpt2": (("transformer.wte.", "transformer.wpe."), ("transformer.ln_f.",)),
    "llama": (("model.embed_tokens.",), ("model.norm.", "lm_head.")),
    "roberta": (("roberta.embeddings.",), ("classifier.",)),
}


@pytest.mark.parametrize("name", DEEP)
def test_the_learning_rate_falls_by_a_factor_a_block_from_the_head_to_the_embeddings(name):
    """By the models' own names: layer1.0 to layer4.1 of a ResNet, "<list>.<number>." elsewhere."""
    build_model, num_blocks = DEEP[name]
    model = build_model()
    before, after = FIRST[name]
    for parameter, scale in lr_scales(model, 0.5).items():
        parts = parameter.split(".")
        if parameter.startswith(before):
            depth = 0
        elif parameter.startswith(after):
            depth = num_blocks + 1
        elif name == "resnet":
            depth = 2 * int(parts[0][-1]) - 1 + int(parts[1])
        else:
            depth = 1 + int(next(part for part in parts if part.isdigit()))
        assert scale == 0.5 ** (num_blocks + 1 - depth), parameter


@pytest.mark.parametrize("config", [AdamW(weight_decay=0.1), SGD(momentum=0.9)])
def test_a_layers_step_is_scaled_and_its_decay_stays(config):
    """Against the same optimizer with one group a parameter, the learning rates written out."""
    config = config.model_copy(update={"layer_decay": 0.5})
    torch.manual_seed(0)
    ours = recipe_task.Blocks().double()
    theirs = recipe_task.Blocks().double()
    theirs.load_state_dict(ours.state_dict())
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    keys = {"momentum": 0.9} if config.name == "sgd" else {}
    depth = {"stem": 0, "blocks.0": 1, "blocks.1": 2, "blocks.2": 3, "norm": 4, "head": 4}
    groups = [
        {
            "params": [parameter],
            "lr": 0.1 * 0.5 ** (4 - next(d for key, d in depth.items() if name.startswith(key))),
            "weight_decay": 0.0 if parameter.ndim == 1 else config.weight_decay,
        }
        for name, parameter in theirs.named_parameters()
    ]
    optimizers = build(ours, config), kinds[config.name](groups, foreach=False, **keys)
    for _ in range(3):
        set_lr(optimizers[0], 0.1)
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            gradients_of(model.eval())
            optimizer.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-12, atol=1e-12)


def gradients_of(model):
    model.zero_grad()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 64, generator=generator, dtype=model.head.weight.dtype)
    model(x).square().sum().backward()


def test_layer_decay_needs_layers():
    with pytest.raises(
        ValueError, match=r"layer_decay needs repeated blocks.*leave that setting out"
    ):
        build(nn.Linear(2, 2), AdamW(layer_decay=0.9))


# --- Muon ----------------------------------------------------------------------------------------


def test_muon_steps_the_matrices_of_the_blocks_and_adamw_all_else_each_at_its_rate():
    """Against torch's two optimizers, each on its own parameters."""
    torch.manual_seed(0)
    ours = recipe_task.Blocks()
    theirs = recipe_task.Blocks()
    theirs.load_state_dict(ours.state_dict())
    config = Muon(lr=0.02, adamw_lr=0.01, weight_decay=0.1, betas=(0.9, 0.95))
    optimizer = build(ours, config)
    inner = [block.linear.weight for block in theirs.blocks]
    others = [p for p in theirs.parameters() if all(p is not matrix for matrix in inner)]
    muon = torch.optim.Muon(inner, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    decayed = [
        {"params": [p for p in others if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(decayed, betas=(0.9, 0.95))
    optimizer.load_state_dict(optimizer.state_dict())  # as Accelerate does when it prepares
    for step in range(1, 4):
        set_lr(optimizer, 0.02 / step)
        for part, lr in ((muon, 0.02), (adamw, 0.01)):
            for group in part.param_groups:
                group["lr"] = lr / step
        for model, parts in ((ours, [optimizer]), (theirs, [muon, adamw])):
            gradients_of(model.eval())
            for part in parts:
                part.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-6, atol=1e-7)


def test_a_step_of_muon_is_nearly_orthogonal():
    """The singular values of a first step, divided by lr * 0.2 sqrt(16), are about 1: as many as
    there are samples in the gradient, 8."""
    torch.manual_seed(0)
    model = recipe_task.Blocks()
    before = model.blocks[1].linear.weight.detach().clone()
    optimizer = build(model, Muon(lr=0.1))
    gradients_of(model.eval())
    optimizer.step()
    step = (before - model.blocks[1].linear.weight.detach()) / (0.1 * 0.2 * 16**0.5)
    singular = torch.linalg.svdvals(step)[:8]
    assert 0.6 < singular.min() < singular.max() < 1.3


def test_muon_needs_matrices_within_blocks():
    with pytest.raises(ValueError, match="steps matrices within repeated blocks"):
        build(torchvision.models.resnet18(), Muon())


# --- schedule-free -------------------------------------------------------------------------------


def test_schedule_free_steps_are_those_of_the_paper():
    """Defazio et al. 2024, Algorithm 1, with a warmup: y, z and x written out; x is evaluated."""
    torch.manual_seed(0)
    beta, beta2, eps, decay = 0.8, 0.95, 1e-8, 0.1
    model = nn.Linear(4, 3, bias=False).double()
    config = ScheduleFree(betas=(beta, beta2), eps=eps, weight_decay=decay)
    optimizer = build(model, config)
    z = x = model.weight.detach().clone()
    square, total = torch.zeros_like(z), 0.0
    for step in range(1, 7):
        lr = 0.1 * min(1, step / 3)
        y = (1 - beta) * z + beta * x
        torch.testing.assert_close(model.weight.detach(), y, rtol=1e-12, atol=1e-12)
        gradient = y * step  # of y.square().sum() * step / 2
        square = beta2 * square + (1 - beta2) * gradient**2
        scaled = gradient / ((square / (1 - beta2**step)).sqrt() + eps)
        z = z - lr * (scaled + decay * y)
        total += lr**2
        x = (1 - lr**2 / total) * x + lr**2 / total * z
        optimizer.zero_grad()
        (model.weight.square().sum() * step / 2).backward()
        set_lr(optimizer, lr)
        optimizer.step()
    held = model.weight.detach().clone()
    with optimizer.in_place():
        torch.testing.assert_close(model.weight.detach(), x, rtol=1e-12, atol=1e-12)
    assert model.weight.equal(held)


def test_a_trial_of_memory_and_a_step_of_zeros_leave_no_trace_once_the_state_is_cleared():
    models = []
    for trial in (False, True):
        torch.manual_seed(0)
        models.append(recipe_task.Blocks())
        optimizer = build(models[-1], ScheduleFree(lr=0.1))
        if trial:
            set_lr(optimizer, 0.0)
            for parameter in models[-1].parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.state.clear()
            set_lr(optimizer, 0.1)
        for _ in range(2):
            gradients_of(models[-1].eval())
            optimizer.step()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert one.equal(other)


def test_without_schedulefree_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "evenstep.schedule_free", None)
    with pytest.raises(ValueError, match="pip install schedulefree"):
        build(nn.Linear(2, 2), ScheduleFree())


# --- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [Muon(lr=0.1, layer_decay=0.5), ScheduleFree(lr=0.1)], ids=lambda c: c.name
)
def test_a_checkpoint_names_the_state_by_parameters_and_goes_on_bit_for_bit(config, tmp_path):
    def steps(model, optimizer, first, last):
        for step in range(first, last + 1):
            set_lr(optimizer, 0.1 * min(1, step / 4))
            gradients_of(model.eval())
            optimizer.step()

    torch.manual_seed(0)
    whole = recipe_task.Blocks()
    optimizer = build(whole, config)
    steps(whole, optimizer, 1, 3)
    saved = flatten(collect(whole, optimizer, None))
    keys = {"muon": "momentum_buffer", "schedule_free": "weight_sum"}
    assert f"optimizer.blocks.0.linear.weight.{keys[config.name]}" in saved
    write(tmp_path, saved)
    steps(whole, optimizer, 4, 6)
    resumed = recipe_task.Blocks()
    optimizer = build(resumed, config)
    read(tmp_path, targets(tmp_path, resumed, optimizer, None), resumed)
    steps(resumed, optimizer, 4, 6)
    assert all(p.equal(q) for p, q in zip(whole.parameters(), resumed.parameters(), strict=True))
