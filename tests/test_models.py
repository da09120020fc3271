"""Every way to name a model builds one that maps images to logits."""

import inspect
import sys

from evenstep import models
from evenstep.task import find_module, module_names

import pytest
import torch


def takes_images(name):
    return "image_size" in inspect.signature(find_module("models", name).build).parameters


NAMES = set(module_names("models")) - {"timm", "transformers"}  # which go by other names
OWN = sorted(name for name in NAMES if takes_images(name))
TINY_VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "patch_size": 4,
}


def build(name, num_classes=7, channels=3, image_size=16, **keys):
    module = find_module("models", name)
    sizes = {"num_classes": num_classes, "channels": channels, "image_size": image_size}
    return module.build(module.Config(name=name, **keys), **sizes).eval()


def logits(model, channels=3, image_size=16):
    with torch.no_grad():
        output = model(torch.rand(2, channels, image_size, image_size))
    return getattr(output, "logits", output)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", OWN)
def test_every_file_in_models_gives_logits(name, channels):
    assert logits(build(name, channels=channels), channels).shape == (2, 7)


def test_the_small_resnet_keeps_the_resolution_up_to_the_first_stage():
    model = build("resnet18")
    sizes = []
    model.layer1.register_forward_hook(lambda *call: sizes.append(call[2].shape[-1]))
    logits(model)
    assert sizes == [16]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("vit", TINY_VIT),
        ("convnext", {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}),
        ("resnet", {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]}),
    ],
)
def test_a_model_type_of_transformers_is_built_without_a_download(name, config, channels):
    model = build(name, channels=channels, image_size=32, config=config)
    assert logits(model, channels, image_size=32).shape == (2, 7)
    for key, value in config.items():
        assert getattr(model.config, key) == value


def test_an_unknown_configuration_key_is_an_error_with_the_nearest():
    with pytest.raises(ValueError, match=r"'hiden_size'; nearest: .*hidden_size"):
        build("vit", config={"hiden_size": 16})


@pytest.fixture
def pretrained(tmp_path):
    model = build("vit", config=TINY_VIT)
    model.bfloat16().save_pretrained(tmp_path / "vit")
    return model, str(tmp_path / "vit")


def test_a_local_folder_gives_its_weights_in_float32_with_a_new_head(pretrained):
    saved, name = pretrained
    model = build(name, num_classes=3)
    assert logits(model).shape == (2, 3)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    for key, value in saved.vit.state_dict().items():
        torch.testing.assert_close(model.vit.state_dict()[key], value.float(), rtol=0, atol=0)


def test_pretrained_weights_refuse_images_of_another_kind(pretrained):
    _, name = pretrained
    with pytest.raises(ValueError, match=r"image_size 16, the data has 32.*task.image_size=16"):
        build(name, image_size=32)
    with pytest.raises(ValueError, match=r"num_channels 3, the data has 1.*task.channels=3"):
        build(name, channels=1)
    bigger = build(name, image_size=32, config={"image_size": 32})
    assert logits(bigger, image_size=32).shape == (2, 7)
    with pytest.raises(ValueError, match="'patchsize'; nearest: patch_size"):
        build(name, config={"patchsize": 8})


def test_code_from_a_model_repository_does_not_run_by_itself(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}'
    )
    (tmp_path / "own.py").write_text("raise SystemExit('this code ran')")
    with pytest.raises(ValueError, match="trust_remote_code"):
        build(str(tmp_path))


def test_a_model_that_cannot_be_reached_is_named():
    with pytest.raises(ValueError, match="'nobody/nothing' cannot be read"):
        build("nobody/nothing")


@pytest.mark.parametrize("name", ["timm/resnet10t", "timm/vit_tiny_patch16_224"])
@pytest.mark.parametrize("channels", [1, 3])
def test_timm_models_take_the_images_as_they_are(name, channels):
    pytest.importorskip("timm")
    model = build(name, channels=channels, image_size=32)
    assert logits(model, channels, image_size=32).shape == (2, 7)


def test_timm_options_reach_the_model_and_wrong_ones_are_errors():
    pytest.importorskip("timm")
    model = build("timm/resnet10t", options={"drop_rate": 0.25})
    assert model.drop_rate == 0.25
    with pytest.raises(ValueError, match="droprate"):
        build("timm/resnet10t", options={"droprate": 0.25})
    with pytest.raises(ValueError, match=r"no model 'resnte18'; nearest: .*resnet18"):
        build("timm/resnte18")


def test_without_timm_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match="pip install timm"):
        build("timm/resnet18")


def test_a_misspelt_name_is_an_error_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'resnet18'"):
        find_module("models", "resnte18")


def test_which_module_a_name_leads_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert models.fallback("timm/anything") == "timm"
    assert models.fallback("google/vit-base-patch16-224") == "transformers"
    assert models.fallback("swin") == "transformers"
    assert models.fallback("my_package.my_model") is None


@pytest.mark.parametrize("name", ["train.jsonl", "test.csv", "corpus", "no_such.parquet"])
def test_files_and_folders_of_data_are_no_modules(tmp_path, monkeypatch, name):
    """Beside train.py, and with the folder on Python's path; `test` is a package of Python's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "corpus").mkdir()
    for file in ("train.py", "train.jsonl", "test.csv", "corpus/mine.py"):
        (tmp_path / file).write_text("Config = build = None\n")
    assert find_module("datasets", name, "text").__name__ == "evenstep.datasets.text"
    assert find_module("datasets", "corpus.mine", "text").__name__ == "corpus.mine"
