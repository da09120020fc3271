"""Metrics of text classification from the evaluation table, in float64; NaN where undefined."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from evenstep.task import Table
from evenstep.text_labels import Kind

import numpy as np

Summary = dict[str, Any]
Array = np.ndarray[Any, Any]


def single_label(table: Table) -> Summary:
    """F1 is averaged over the classes that occur as a label or a prediction; with two classes, f1
    and auroc are those of the second one."""
    from sklearn import metrics

    label, prediction, probabilities = (
        table[name] for name in ("label", "prediction", "probabilities")
    )
    summary = {
        "accuracy": float(np.mean(label == prediction)),
        "loss": _mean(table["loss"]),
        "macro_f1": _f1(label, prediction, "macro"),
        "mcc": _mcc(label, prediction),
    }
    if probabilities.shape[1] == 2:
        summary["f1"] = float(metrics.f1_score(label, prediction, zero_division=0.0))
        summary["auroc"] = _auroc(label, probabilities[:, 1])
    return summary


def multi_label(table: Table) -> Summary:
    """accuracy: all labels of a sample are right. auroc: the mean over the classes that some
    samples have and others have not."""
    label, prediction = table["label"], table["prediction"]
    by_class = [_auroc(*pair) for pair in zip(label.T, table["probabilities"].T, strict=True)]
    defined = [area for area in by_class if not math.isnan(area)]
    return {
        "accuracy": float(np.mean((label == prediction).all(1))),
        "loss": _mean(table["loss"]),
        "macro_f1": _f1(label, prediction, "macro"),
        "micro_f1": _f1(label, prediction, "micro"),
        "auroc": _mean(np.array(defined)) if defined else math.nan,
    }


def regression(table: Table) -> Summary:
    """loss is the mean squared error."""
    from scipy import stats

    label, prediction = table["label"], table["prediction"]
    constant = any(np.ptp(values) == 0 for values in (label, prediction))
    return {
        "loss": _mean(table["loss"]),
        "mae": _mean(np.abs(label - prediction)),
        "pearson": math.nan if constant else float(stats.pearsonr(label, prediction)[0]),
        "spearman": math.nan if constant else float(stats.spearmanr(label, prediction)[0]),
    }


SUMMARIES: Mapping[Kind, Callable[[Table], Summary]] = {
    "single_label": single_label,
    "multi_label": multi_label,
    "regression": regression,
}
BEST: Mapping[Kind, str] = {
    "single_label": "accuracy",
    "multi_label": "macro_f1",
    "regression": "pearson",
}


def names(kind: Kind, num_classes: int) -> list[str]:
    """The metrics of an evaluation."""
    shape = (2,) if kind != "multi_label" else (2, num_classes)
    zeros = {name: np.zeros(shape) for name in ("label", "prediction")}
    table = {**zeros, "loss": np.zeros(2), "probabilities": np.zeros((2, num_classes))}
    return list(SUMMARIES[kind](table))


def _mean(values: Array) -> float:
    return float(np.mean(values, dtype=np.float64))


def _f1(label: Array, prediction: Array, average: str) -> float:
    from sklearn import metrics

    if label.ndim == 2 and label.shape[1] == 1:  # which scikit-learn takes for two classes
        label, prediction, average = label[:, 0], prediction[:, 0], "binary"
    return float(metrics.f1_score(label, prediction, average=average, zero_division=0.0))


def _mcc(label: Array, prediction: Array) -> float:
    from sklearn import metrics

    if len(np.unique([label, prediction])) < 2:
        return 0.0  # of which scikit-learn would warn
    return float(metrics.matthews_corrcoef(label, prediction))


def _auroc(label: Array, probability: Array) -> float:
    from sklearn import metrics

    if len(np.unique(label)) < 2 or not np.isfinite(probability).all():
        return math.nan
    return float(metrics.roc_auc_score(label, probability))
