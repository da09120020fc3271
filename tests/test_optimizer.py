from types import SimpleNamespace

from evenstep.optimizer import build, parameter_groups

import pytest
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
    config = SimpleNamespace(name="sgd", lr=0.1, momentum=0.9, nesterov=False, weight_decay=0.0)
    with pytest.raises(ValueError, match="nothing to train"):
        build(nn.Linear(2, 2).requires_grad_(False), config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("config", "reference"),
    [
        (
            SimpleNamespace(name="adamw", lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1),
            lambda p: torch.optim.AdamW(
                p, lr=0.1, betas=(0.9, 0.99), weight_decay=0.1, foreach=False
            ),
        ),
        (
            SimpleNamespace(name="sgd", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
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
