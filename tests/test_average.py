"""Averaged weights, against the formula written out."""

import copy
from types import SimpleNamespace

from evenstep.average import Average
from evenstep.learner import Learner

import pytest
import torch
from torch import nn


def network(dtype=torch.float64):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(dtype)
    net[2].weight.requires_grad_(False)
    return net


def averaged(net, decay, **options):
    return Average(dict(net.named_parameters()), decay, **options)


def move(net):
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decay", [0.0, 0.9, 0.999])
def test_each_average_is_the_weighted_sum_of_all_weights_there_were(dtype, decay):
    net = network(dtype)
    average = averaged(net, decay)
    history = [copy.deepcopy(net.state_dict())]
    for _ in range(5):
        move(net)
        average.update()
        history.append(copy.deepcopy(net.state_dict()))
    weights = [decay**5] + [(1 - decay) * decay ** (5 - step) for step in range(1, 6)]
    for name, tensor in average.tensors.items():
        terms = (w * state[name].double() for w, state in zip(weights, history, strict=True))
        assert tensor.dtype == dtype
        torch.testing.assert_close(tensor, sum(terms).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("start", [0, 2, 4])
def test_without_a_decay_it_is_the_mean_of_the_weights_after_each_step_from_the_start_on(
    dtype, start
):
    net = network(dtype)
    average = averaged(net, None, start=start)
    history = []
    for step in range(1, 6):
        move(net)
        average.update()
        history.append(copy.deepcopy(dict(net.named_parameters())))
        if step <= start:
            assert all(average.tensors[name].equal(p) for name, p in net.named_parameters())
    for name, tensor in average.tensors.items():
        mean = torch.stack([weights[name].double() for weights in history[start:]]).mean(0)
        torch.testing.assert_close(tensor, mean.to(dtype))


@pytest.mark.parametrize("skipped", [{1}, {2, 3}, {4}, {5}, {3, 4, 6}, {1, 2, 4, 5}])
@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("resumed_after", [0, 2, 4, 5])
def test_the_start_counts_steps_that_are_left_out_and_the_mean_does_not(
    skipped, start, resumed_after
):
    net = network()
    average = averaged(net, None, start=start)
    history = []
    for step in range(1, 8):
        if step in skipped:
            average.skip()
        else:
            move(net)
            average.update()
            history += [net[0].weight.detach().clone()] * (step > start)
        if step == resumed_after:
            tensors, count = average.tensors, average.count
            average = averaged(net, None, start=start)
            average.tensors, average.count = tensors, count
    torch.testing.assert_close(average.tensors["0.weight"], torch.stack(history).mean(0))


def test_a_step_that_a_learner_leaves_out_counts_for_the_start_also_after_a_resume():
    net = network()
    scaler = SimpleNamespace(state_dict=dict, load_state_dict=dict)
    strategy = SimpleNamespace(step=lambda lr: move(net), discard=lambda: None, scaler=scaler)
    strategy.sum = None
    statistics = SimpleNamespace(commit=lambda add_up: None, discard=lambda: None)

    def learner():
        average = averaged(net, None, start=3)
        return Learner(net, strategy, statistics, average, None, [])

    before = learner()
    before.step(0.1)
    before.discard()
    after = learner()  # a resume, which finds the averages in the checkpoint
    after.restore_numbers(before.numbers())
    after.discard()
    history = []
    for _ in range(3):
        after.step(0.1)
        after.discard()
        history.append(net[0].weight.detach().clone())
    torch.testing.assert_close(after.average.tensors["0.weight"], torch.stack(history).mean(0))


def test_a_step_that_is_left_out_leaves_an_exponential_average_alone():
    net, reference = network(), network()
    ours, theirs = averaged(net, 0.9), averaged(reference, 0.9)
    for step in range(4):
        torch.manual_seed(step)
        move(net)
        ours.update()
        ours.skip()
        torch.manual_seed(step)
        move(reference)
        theirs.update()
    assert all(tensor.equal(theirs.tensors[name]) for name, tensor in ours.tensors.items())


def test_only_parameters_are_averaged():
    assert list(averaged(network(), 0.9).tensors) == [
        f"{layer}.{kind}" for layer in range(3) for kind in ("weight", "bias")
    ]


def test_a_frozen_weight_is_its_own_average_bit_for_bit():
    net = network(torch.float32)
    average = averaged(net, 0.9)
    for _ in range(50):
        move(net)
        average.update()
    assert average.tensors["2.weight"].equal(net[2].weight)


def test_the_averages_are_in_place_within_the_block_and_everything_is_as_before_after_it():
    net = network(torch.float32)
    average = averaged(net, 0.9)
    move(net)
    average.update()
    live, averages = copy.deepcopy(net.state_dict()), copy.deepcopy(average.tensors)

    def evaluate_and_fail():
        with average.in_place():
            for name, parameter in net.named_parameters():
                assert parameter.equal(averages[name])
            raise KeyError

    with pytest.raises(KeyError):
        evaluate_and_fail()
    for name, parameter in net.named_parameters():
        assert parameter.equal(live[name])
        assert average.tensors[name].equal(averages[name])
    assert not average.tensors["0.weight"].equal(net[0].weight)


def test_a_strategy_is_told_whenever_the_weights_have_changed():
    net, seen = network(), []
    average = averaged(net, 0.9, swapped=lambda: seen.append(net[0].weight.sum().item()))
    move(net)
    live = net[0].weight.sum().item()
    with average.in_place():
        assert seen == [average_of_the_initial := net[0].weight.sum().item()]
    assert seen == [average_of_the_initial, live]


def test_weights_of_several_types_are_averaged_each_in_its_own():
    parameters = {"half": torch.ones(2, dtype=torch.bfloat16), "single": torch.ones(2)}
    average = Average(parameters, 0.5)
    for parameter in parameters.values():
        parameter += 2
    average.update()
    assert {t.dtype for t in average.tensors.values()} == {torch.bfloat16, torch.float32}
    assert all(tensor.tolist() == [2.0, 2.0] for tensor in average.tensors.values())
