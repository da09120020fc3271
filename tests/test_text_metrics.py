"""Metrics of text classification against values computed by hand."""

import math

from evenstep import text_metrics

import numpy as np
import pytest


def test_metrics_of_one_label_equal_hand_computed_values():
    labels, predictions = [0, 0, 0, 1, 1], [0, 0, 1, 1, 0]
    scores = np.array([0.1, 0.2, 0.7, 0.9, 0.4])
    found = text_metrics.single_label(
        {
            "label": np.array(labels),
            "prediction": np.array(predictions),
            "probabilities": np.stack([1 - scores, scores], 1),
            "loss": np.arange(5.0),
        }
    )
    # tp 1, fp 1, fn 1, tn 2
    assert found["accuracy"] == pytest.approx(3 / 5)
    assert found["loss"] == 2.0
    assert found["f1"] == pytest.approx(1 / 2)
    assert found["macro_f1"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert found["mcc"] == pytest.approx((1 * 2 - 1 * 1) / math.sqrt(2 * 2 * 3 * 3))
    assert found["auroc"] == pytest.approx(5 / 6)  # of 6 pairs, 0.4 < 0.7 is the wrong one


def test_metrics_of_several_labels_equal_hand_computed_values():
    labels = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 0]])
    probabilities = np.array([[0.9, 0.6, 0.2], [0.8, 0.7, 0.1], [0.1, 0.4, 0.3]])
    found = text_metrics.multi_label(
        {
            "label": labels,
            "prediction": probabilities > 0.5,
            "probabilities": probabilities,
            "loss": np.array([1.0, 2.0, 6.0]),
        }
    )
    assert found["accuracy"] == pytest.approx(1 / 3)
    assert found["loss"] == 3.0
    assert found["macro_f1"] == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert found["micro_f1"] == pytest.approx(2 * 3 / (2 * 3 + 1 + 1))
    assert found["auroc"] == pytest.approx((1 + 1 / 2) / 2)  # the third has no positive sample


def test_metrics_of_numbers_equal_hand_computed_values():
    label, prediction = np.array([1.0, 2, 3, 4]), np.array([1.0, 3, 2, 40])
    found = text_metrics.regression({"label": label, "prediction": prediction, "loss": label})
    assert found["spearman"] == pytest.approx(1 - 6 * 2 / (4 * 15))
    assert found["pearson"] == pytest.approx(np.corrcoef(label, prediction)[0, 1])
    assert found["mae"] == pytest.approx((0 + 1 + 1 + 36) / 4)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("n", [1, 3])
def test_what_is_not_defined_is_nan_and_needs_no_warning(n):
    same = {"label": np.zeros(n, dtype=int), "loss": np.zeros(n)}
    one = {**same, "prediction": np.zeros(n, dtype=int), "probabilities": np.full((n, 2), 0.5)}
    found = text_metrics.single_label(one)
    assert math.isnan(found["auroc"])
    assert (found["accuracy"], found["mcc"]) == (1, 0)
    found = text_metrics.regression({**same, "prediction": np.arange(n)})
    assert math.isnan(found["pearson"])
    assert math.isnan(found["spearman"])
    wide = {name: np.zeros((n, 2)) for name in ("label", "prediction", "probabilities")}
    assert math.isnan(text_metrics.multi_label({**wide, "loss": np.zeros(n)})["auroc"])


def test_one_class_of_several_labels_is_judged_by_itself():
    """scikit-learn takes one column for two classes, and would praise a model that finds none."""
    label, prediction = np.array([[1], [0], [0], [0]]), np.zeros((4, 1), dtype=int)
    losses, probabilities = np.zeros(4), np.zeros((4, 1))
    table = {"label": label, "prediction": prediction, "loss": losses}
    found = text_metrics.multi_label({**table, "probabilities": probabilities})
    assert found["macro_f1"] == found["micro_f1"] == 0
