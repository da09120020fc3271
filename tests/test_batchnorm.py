"""BatchNorm statistics against an independent computation from the micro-batches themselves."""

from evenstep.batchnorm import BatchNormStatistics

import pytest
import torch
from torch import nn


def add_up(terms):
    return torch.stack(terms).sum(0)


def step(model, statistics, micro_batches):
    statistics.start()
    for turn, x in enumerate(micro_batches):
        model(x).sum().backward()
        statistics.collect(turn)
    statistics.commit(add_up)


@pytest.mark.parametrize("momentum", [0.1, 0.3, None])
def test_one_update_a_step_from_the_mean_over_micro_batches(momentum):
    torch.manual_seed(0)
    layer = nn.BatchNorm1d(4, momentum=momentum).double()
    statistics = BatchNormStatistics(layer)
    mean, var = torch.zeros(4).double(), torch.ones(4).double()
    for number in range(1, 4):
        batches = [torch.randn(6, 4).double() * number + 1 for _ in range(3)]
        step(layer, statistics, batches)
        rate = 1 / number if momentum is None else momentum
        mean += rate * (torch.stack([b.mean(0) for b in batches]).mean(0) - mean)
        var += rate * (torch.stack([b.var(0, unbiased=True) for b in batches]).mean(0) - var)
        torch.testing.assert_close(layer.running_mean, mean)
        torch.testing.assert_close(layer.running_var, var)
        assert layer.num_batches_tracked == number


def test_a_discarded_step_leaves_no_trace():
    layer = nn.BatchNorm1d(4)
    statistics = BatchNormStatistics(layer)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    statistics.start()
    layer(torch.randn(6, 4))
    statistics.collect(0)
    statistics.discard()
    assert all(before[name].equal(value) for name, value in layer.state_dict().items())


def test_frozen_layers_keep_their_statistics_and_use_them():
    layer = nn.BatchNorm1d(4)
    layer.running_mean += 5
    layer.eval()
    statistics = BatchNormStatistics(layer)
    statistics.start()
    out = layer(torch.full((2, 4), 5.0))
    statistics.collect(0)
    statistics.commit(add_up)
    torch.testing.assert_close(out, torch.zeros(2, 4))
    assert (layer.running_mean == 5).all()
    assert layer.num_batches_tracked == 0


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.norm(x) * self.scale if x.mean() > 0 else x * self.scale


def test_a_layer_that_some_micro_batches_skip_averages_over_the_others():
    model = Sometimes()
    statistics = BatchNormStatistics(model)
    used, skipped = torch.rand(8, 2), -torch.rand(8, 2)
    step(model, statistics, [skipped, used, skipped])
    torch.testing.assert_close(model.norm.running_mean, 0.1 * used.mean(0))
    step(model, statistics, [skipped, skipped])
    torch.testing.assert_close(model.norm.running_mean, 0.1 * used.mean(0))
    assert model.norm.num_batches_tracked == 1


def test_sync_batchnorm_is_refused():
    with pytest.raises(ValueError, match="0 is a SyncBatchNorm"):
        BatchNormStatistics(nn.Sequential(nn.SyncBatchNorm(3)))


def test_a_model_without_batchnorm_costs_nothing():
    model = nn.Linear(4, 2)
    step(model, BatchNormStatistics(model), [torch.randn(2, 4)])
