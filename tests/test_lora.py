"""LoRA through peft, against the formula and against peft and transformers themselves."""

import json
import sys

from evenstep.lora import Lora, adapted, exporting
from evenstep.models import transformers

import pytest
import recipe_task
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    RobertaConfig,
    RobertaForCausalLM,
    RobertaForSequenceClassification,
    ViTForImageClassification,
)

X = torch.linspace(-1, 1, 128).view(2, 1, 8, 8)


def vit():
    torch.manual_seed(0)
    return recipe_task.vit().eval()


def trained(section):
    """A vision transformer with adapters that are no longer those at the start."""
    model = adapted(vit(), section)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(X).logits


def test_at_the_start_the_adapters_change_nothing():
    torch.testing.assert_close(logits(adapted(vit(), Lora(r=2))), logits(vit()), rtol=0, atol=0)
    plain = vit()
    assert adapted(plain, None) is plain


def test_only_the_adapters_and_the_head_are_trained():
    model = adapted(vit(), Lora(r=2, target_modules=["q_proj", "v_proj"]))
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    heads = {name for name in names if "classifier.modules_to_save" in name}
    assert {name.rpartition("default.")[2] for name in heads} == {"weight", "bias"}
    adapters = names - heads
    assert len(adapters) == 2 * 2 * 2  # layers, modules, A and B
    assert all("lora_" in name and ("q_proj" in name or "v_proj" in name) for name in adapters)


def test_a_layer_computes_what_the_paper_says():
    """W x + alpha / r * B A x."""
    model = trained(Lora(r=2, alpha=6))
    layer = model.get_submodule("base_model.model.vit.layers.0.mlp.fc1")
    x = torch.randn(3, 16)
    a, b = (getattr(layer, f"lora_{name}")["default"].weight for name in "AB")
    assert a.shape == (2, 16)
    expected = layer.base_layer(x) + 6 / 2 * x @ a.T @ b.T
    torch.testing.assert_close(layer(x), expected)


def test_the_output_layer_of_a_language_model_is_neither_trained_nor_adapted():
    config = GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=20, bos_token_id=0, eos_token_id=0
    )
    model = adapted(GPT2LMHeadModel(config), Lora())
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert names
    assert all("lora_" in name and ".h.0." in name for name in names)


def test_the_new_head_of_a_text_classifier_is_trained_whole():
    config = RobertaConfig(
        vocab_size=20, num_hidden_layers=1, hidden_size=16, num_attention_heads=2,
        intermediate_size=16,
    )  # fmt: skip
    model = adapted(RobertaForSequenceClassification(config), Lora())
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    whole = [name for name in names if "lora_" not in name]
    ends = ("dense.weight", "dense.bias", "out_proj.weight", "out_proj.bias")
    assert len(whole) == 4
    assert all(name.endswith(end) for name, end in zip(whole, ends, strict=True))
    assert not any("classifier" in name for name in names if "lora_" in name)


@pytest.mark.parametrize("kind", ["siglip", "clip"])
def test_a_head_is_told_from_a_base_model_of_another_name(kind):
    from transformers import AutoConfig, AutoModelForImageClassification

    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "image_size", "patch_size"), 16)
    config = AutoConfig.for_model(
        kind, vision_config={**sizes, "num_hidden_layers": 1, "num_attention_heads": 2}
    )
    model = adapted(AutoModelForImageClassification.from_config(config), Lora(r=2))
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert {n for n in names if "lora_" not in n} == {n for n in names if ".classifier." in n}
    assert any("lora_A" in name for name in names)


def test_a_head_that_holds_the_output_layer_is_not_new():
    config = RobertaConfig(
        vocab_size=20, num_hidden_layers=1, hidden_size=16, num_attention_heads=2,
        intermediate_size=16, is_decoder=True,
    )  # fmt: skip
    model = adapted(RobertaForCausalLM(config), Lora())
    assert all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)


def test_a_pretrained_base_trains_with_dropout_and_keeps_its_statistics(tmp_path):
    vit().save_pretrained(tmp_path / "vit")
    names = {"hidden_sizes": [8, 8], "depths": [1, 1], "embedding_size": 8, "num_channels": 1}
    ResNetForImageClassification(ResNetConfig(**names)).save_pretrained(tmp_path / "resnet")
    for name in ("vit", "resnet"):
        section = transformers.Config(name=str(tmp_path / name), lora=Lora(r=2, target_modules=None
            if name == "vit" else ["convolution"]))  # fmt: skip
        model = transformers.build(section, num_classes=3, channels=1, image_size=8)
        norms = [part for part in model.modules() if isinstance(part, nn.BatchNorm2d)]
        assert [part for part in model.modules() if not part.training] == norms
    assert norms


def test_final_is_the_merged_model_and_the_adapter_loads_on_the_base(tmp_path):
    model = trained(Lora(r=2, dropout=0.1))
    expected = logits(model)
    assert (expected - logits(vit())).abs().max() > 1e-3
    exporting(lambda merged, folder: merged.save_pretrained(folder))(model, tmp_path)
    merged = ViTForImageClassification.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(merged), expected)
    vit().save_pretrained(tmp_path / "plain")
    files = (folder / "model.safetensors" for folder in (tmp_path, tmp_path / "plain"))
    names, plain = (load_file(file).keys() for file in files)
    assert names == plain
    again = PeftModel.from_pretrained(vit(), tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(again), expected)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 2


def test_without_an_export_of_the_task_the_merged_model_is_saved_all_the_same(tmp_path):
    model = trained(Lora(r=2))
    expected = logits(model)
    exporting(None)(model, tmp_path)
    merged = ViTForImageClassification.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(merged), expected)


def test_the_first_adapters_depend_on_the_seed_alone():
    weights = []
    for noise in (0, 5):
        torch.rand(noise)
        torch.manual_seed(3)
        weights.append(adapted(recipe_task.vit(), Lora()).state_dict())
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def test_what_cannot_be_adapted_is_an_error_that_says_why(monkeypatch):
    with pytest.raises(ValueError, match=r"'q_prj'; nearest linear layers: .*q_proj"):
        adapted(vit(), Lora(target_modules=["v_proj", "q_prj"]))
    with pytest.raises(ValueError, match=r"'xyz'; nearest linear layers: .*q_proj.*, fc1"):
        adapted(vit(), Lora(target_modules=["xyz"]))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match="pip install peft"):
        adapted(vit(), Lora())
