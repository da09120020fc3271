"""The summed cross entropy, against PyTorch's own mean over the whole global batch."""

from evenstep.classification import (
    class_weights_of,
    num_targets,
    summed_cross_entropy,
    target_weights,
)
from evenstep.labels import IGNORED

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.utils.class_weight import compute_class_weight

WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 0.25], dtype=torch.float64)
LABELS = [0, 3, IGNORED, 1, 1, 2, IGNORED, 0, 3]


def logits(n=9, classes=4):
    return torch.randn(n, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def mean_over_micro_batches(labels, smoothing, weights, size=2):
    """As the loop adds it up: sums over micro-batches, divided by what they count together."""
    pairs = list(zip(logits(len(labels)).split(size), labels.split(size), strict=True))
    options = {"label_smoothing": smoothing, "class_weights": weights}
    loss = sum(summed_cross_entropy(*pair, **options) for pair in pairs)
    return loss / sum(num_targets(part, weights) for _, part in pairs)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_mean_over_micro_batches_is_that_of_pytorch_over_the_whole_batch(smoothing, weights):
    labels = torch.tensor(LABELS)
    expected = F.cross_entropy(logits(), labels, weight=weights, label_smoothing=smoothing)
    torch.testing.assert_close(
        mean_over_micro_batches(labels, smoothing, weights), expected, rtol=1e-14, atol=0
    )


def test_smoothing_and_weights_equal_the_written_out_sum():
    """(1 - e) w_y (-log p_y) + e / C sum_c w_c (-log p_c), over sum w_y."""
    losses = -logits().log_softmax(1)
    total = torch.tensor(0.0, dtype=torch.float64)
    divisor = 0.0
    for row, label in enumerate(LABELS):
        if label != IGNORED:
            total += 0.9 * WEIGHTS[label] * losses[row, label]
            total += 0.1 / 4 * (WEIGHTS * losses[row]).sum()
            divisor += WEIGHTS[label].item()
    labels = torch.tensor(LABELS)
    computed = summed_cross_entropy(logits(), labels, label_smoothing=0.1, class_weights=WEIGHTS)
    torch.testing.assert_close(computed, total)
    assert num_targets(labels, WEIGHTS) == divisor


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_soft_label_of_one_class_is_a_hard_one_also_where_it_is_ignored(smoothing, weights):
    hard = torch.tensor(LABELS)
    soft = F.one_hot(hard.clamp(min=0), 4).double() * (hard != IGNORED)[:, None]
    options = {"label_smoothing": smoothing, "class_weights": weights}
    torch.testing.assert_close(
        summed_cross_entropy(logits(), soft, **options),
        summed_cross_entropy(logits(), hard, **options),
    )
    assert num_targets(soft, weights) == num_targets(hard, weights)
    assert target_weights(soft, weights).equal(target_weights(hard, weights))


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_a_mixed_label_is_the_mix_of_the_losses(smoothing, weights):
    first, second, share = torch.tensor([0, 3, 2]), torch.tensor([1, 1, 2]), 0.3
    soft = share * F.one_hot(first, 4).double() + (1 - share) * F.one_hot(second, 4).double()
    options = {"label_smoothing": smoothing, "class_weights": weights}
    losses = [summed_cross_entropy(logits(3), each, **options) for each in (first, second)]
    computed = summed_cross_entropy(logits(3), soft, **options)
    torch.testing.assert_close(computed, share * losses[0] + (1 - share) * losses[1])
    counts = [num_targets(each, weights) for each in (first, second)]
    expected = share * counts[0] + (1 - share) * counts[1]
    assert num_targets(soft, weights) == pytest.approx(expected, abs=1e-14)


def test_without_weights_soft_labels_give_the_mean_of_pytorch():
    soft = torch.rand(6, 4, dtype=torch.float64).softmax(1)
    expected = F.cross_entropy(logits(6), soft, label_smoothing=0.2)
    torch.testing.assert_close(mean_over_micro_batches(soft, 0.2, None), expected)


def test_a_micro_batch_of_ignored_labels_has_loss_and_gradient_zero():
    given = logits(3).requires_grad_()
    nothing = torch.full((3,), IGNORED)
    for labels in (nothing, torch.zeros(3, 4)):
        loss = summed_cross_entropy(given, labels, label_smoothing=0.1, class_weights=WEIGHTS)
        (gradient,) = torch.autograd.grad(loss, given)
        assert loss.item() == 0
        assert gradient.count_nonzero() == 0
        assert num_targets(labels, WEIGHTS) == num_targets(labels) == 0


def test_balanced_weights_are_those_of_scikit_learn():
    labels = [0, 0, 0, 1, 2, 2]
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    weights = class_weights_of("balanced", [*labels, IGNORED], 3)
    assert weights.tolist() == pytest.approx(expected.tolist())
    assert class_weights_of("balanced", labels, 4).tolist() == [*weights.tolist(), 0.0]


def test_weights_are_one_number_a_class():
    assert class_weights_of(None, [], 2) is None
    assert class_weights_of([1, 0], [], 2).tolist() == [1.0, 0.0]
    for wrong in ([1.0], [0.0, 0.0]):
        with pytest.raises(ValueError, match="2 classes; give one number a class"):
            class_weights_of(wrong, [], 2)
