from evenstep.data import EvalBatches
from evenstep.evaluation import Rows, merge, write_predictions

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch


def evaluated(n, batch_size, num_processes):
    """What `num_processes` would gather, values being 0..n-1."""
    batches = list(EvalBatches(n, batch_size, num_processes))
    parts = []
    for rank in range(num_processes):
        rows = Rows()
        for batch in batches[rank::num_processes]:
            rows.add(list(batch), {"value": torch.tensor(list(batch), dtype=torch.float32)})
        parts.append(rows.columns())
    return merge(parts)


@pytest.mark.parametrize("num_processes", [1, 2, 4])
@pytest.mark.parametrize("n", [1, 3, 7, 9, 10])
def test_every_sample_is_one_row_in_dataset_order(n, num_processes):
    table = evaluated(n, 4, num_processes)
    assert table["index"].tolist() == list(range(n))  # CASES 16
    assert table["value"].dtype == np.float64


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_the_mean_is_over_samples_not_over_batches(num_processes):
    assert evaluated(9, 4, num_processes)["value"].mean() == 4.0  # CASES 17


@pytest.mark.parametrize("num_processes", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [1, 5, 16, 17])
def test_processes_run_the_same_number_of_forwards(n, num_processes):
    batches = list(EvalBatches(n, 4, num_processes))
    assert len({len(batches[rank::num_processes]) for rank in range(num_processes)}) == 1


def test_a_column_of_another_length_is_named():
    with pytest.raises(ValueError, match=r"shape \(2,\) in column 'loss' for a batch of 3 samples"):
        Rows().add([0, 1, 2], {"loss": torch.zeros(2)})


def test_a_column_may_not_take_the_place_of_the_index():
    with pytest.raises(ValueError, match="'index'"):
        Rows().add([0], {"index": torch.zeros(1)})


def test_predictions_are_read_back(tmp_path):
    table = {"index": np.arange(2), "loss": np.array([0.5, 1.5]), "logits": np.ones((2, 3))}
    write_predictions(tmp_path / "predictions.parquet", table)
    read = pq.read_table(tmp_path / "predictions.parquet").to_pydict()
    assert read == {"index": [0, 1], "loss": [0.5, 1.5], "logits": [[1.0] * 3] * 2}


def test_half_precision_columns_become_float64():
    rows = Rows()
    rows.add([0], {"p": torch.ones(1, dtype=torch.bfloat16)})
    assert rows.columns()["p"].dtype == np.float64
