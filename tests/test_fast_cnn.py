"""The small network for small images: its fixed filters, its first state, its limits."""

from evenstep import optimizer
from evenstep.config_sections import Muon
from evenstep.models import fast_cnn
from evenstep.models.fast_cnn import whitening_filters

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images


def build(image_size=32, channels=3, **keys):
    config = fast_cnn.Config(**keys)
    return fast_cnn.build(config, num_classes=10, channels=channels, image_size=image_size)


@pytest.fixture(scope="module")
def photos():
    """(2, 3, H, W), each channel of mean 0 and variance 1."""
    images = torch.stack([torch.tensor(image) for image in load_sample_images().images])
    images = images.permute(0, 3, 1, 2).double()
    std, mean = torch.std_mean(images, (0, 2, 3), keepdim=True)
    return (images - mean) / std


def test_the_filters_decorrelate_real_photos_and_even_out_their_variances(photos):
    patches = F.unfold(photos, 2).transpose(0, 1).flatten(1)
    whitened = F.conv2d(photos, whitening_filters(3)[:12].double()).transpose(0, 1).flatten(1)

    def strongest(values):
        return (torch.corrcoef(values) - torch.eye(12)).abs().sum().item()

    def condition(values):
        return torch.linalg.cond(torch.cov(values)).item()

    assert strongest(whitened) < strongest(patches) / 4
    assert condition(whitened) < condition(patches) / 50


@pytest.mark.parametrize("channels", [1, 3])
def test_the_filters_whiten_exactly_the_images_they_are_made_for(channels):
    """Images drawn with the stated correlations: 0.95 to a neighbour, 0.9 between channels."""
    side = torch.tensor([[1, 0.95], [0.95, 1]]).double()
    colour = torch.full((channels, channels), 0.9).fill_diagonal_(1).double()
    covariance = torch.einsum("cd,hi,wj->chwdij", colour, side, side)
    filters = whitening_filters(channels).double()
    kept, negatives = filters.chunk(2)
    torch.testing.assert_close(negatives, -kept)
    outputs = torch.einsum("achw,chwdij,bdij->ab", kept, covariance, kept)
    torch.testing.assert_close(outputs, torch.eye(len(kept)).double(), atol=1e-4, rtol=0)


def test_the_first_layer_and_the_scales_of_the_norms_are_not_trained():
    model = build(widths=[8, 8])
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    norms = {f"blocks.{i}.norm{j}.bias" for i in range(2) for j in (1, 2)}
    convs = {f"blocks.{i}.conv{j}.weight" for i in range(2) for j in (1, 2)}
    assert trained == {"head.weight", *norms, *convs}
    # Muon steps the filters, AdamW the rest.
    first, _ = optimizer.build(model, Muon())._parts
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert {names[p] for group in first.param_groups for p in group["params"]} == convs


def test_a_block_at_first_passes_on_as_many_channels_as_fit():
    conv = build(widths=[30]).blocks[0].conv1
    x = torch.rand(1, 24, 5, 5)
    torch.testing.assert_close(conv(x)[:, :24], x)


def test_images_that_the_blocks_would_halve_to_nothing_are_refused_with_the_size_that_works():
    with pytest.raises(ValueError, match=r"3 blocks.*8x8.*task.image_size=9"):
        build(image_size=8)
    assert build(image_size=9)(torch.rand(2, 3, 9, 9)).shape == (2, 10)
    assert build(image_size=8, widths=[8, 8])(torch.rand(2, 3, 8, 8)).shape == (2, 10)
