"""One step in one process, against arithmetic written out independently."""

import copy
from functools import partial
from types import SimpleNamespace

import train
from evenstep import learner, nonfinite
from evenstep.config import SGD, AdamW
from evenstep.data import train_loader
from evenstep.hardware import Hardware
from evenstep.plan import Plan
from evenstep.precision import cast_batch
from evenstep.task import Task

import exact_task
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.func import functional_call


@pytest.fixture(scope="module")
def hardware():
    return Hardware(Accelerator(cpu=True), channel=None)


def configured(**changes):
    defaults = {
        "seed": 0,
        "precision": "fp64",
        "reproducibility": "rounding",
        "compile": False,
        "ema_decay": None,
        "gradient_checkpointing": False,
        "freeze": (),
        "on_nonfinite": "stop",
        "optimizer": SGD(name="sgd", lr=0.1),
    }
    return SimpleNamespace(**{**defaults, **changes})


def image_task(model):
    """Classification of 8x8 images; a batch is (images, labels)."""
    return Task(
        model=lambda: model,
        train_dataset=[0],
        eval_dataset=None,
        collate=list,
        count=lambda batch: len(batch[1]),
        loss=lambda model, batch: nn.functional.cross_entropy(
            model(batch[0]), batch[1], reduction="sum"
        ),
        score=None,
        summarize=None,
        best_metric="",
    )


def network(batchnorm):
    norm = nn.BatchNorm2d(6) if batchnorm else nn.Identity()
    layers = [nn.Conv2d(1, 6, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 10)]
    return nn.Sequential(*layers).double()


def build_run(config, hardware, task):
    return train.Run(config, hardware, task, learner.build(config, task, hardware))


def step_once(run, micro_batches, lr=0.0, step=1):
    counted = [(run.task.count(batch), batch) for batch in micro_batches]
    return train.train_step(run, step, counted, targets=sum(n for n, _ in counted), lr=lr)


def data_parallel_gradients(net, x, y, num_devices):
    """What nn.DataParallel and one backward do: the batch split along dimension 0, a replica for
    each part, the outputs gathered, the mean loss over the whole batch."""
    parameters = dict(net.named_parameters())
    outputs = [
        functional_call(copy.deepcopy(net), parameters, part) for part in x.chunk(num_devices)
    ]
    loss = nn.functional.cross_entropy(torch.cat(outputs), y)
    return dict(zip(parameters, torch.autograd.grad(loss, parameters.values()), strict=True))


@pytest.mark.parametrize("batchnorm", [False, True])
def test_gradients_are_those_of_data_parallel(hardware, batchnorm):
    torch.manual_seed(0)
    x, y = torch.randn(32, 1, 8, 8).double(), torch.randint(10, (32,))
    net = network(batchnorm)
    expected = data_parallel_gradients(copy.deepcopy(net), x, y, num_devices=4)
    run = build_run(configured(), hardware, image_task(net))
    step_once(run, list(zip(x.chunk(4), y.chunk(4), strict=True)))
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-9)


def test_uneven_target_counts_weigh_alike(hardware):
    """The loss is the mean over all targets of the global batch, not a mean of means."""
    torch.manual_seed(0)
    x, y = torch.randn(10, 1, 8, 8).double(), torch.randint(10, (10,))
    net = network(batchnorm=False)
    whole = nn.functional.cross_entropy(net(x), y)
    expected = torch.autograd.grad(whole, list(net.parameters()))
    run = build_run(configured(), hardware, image_task(net))
    result = step_once(run, [(x[:1], y[:1]), (x[1:], y[1:])])
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-9)
    loss = sum(result.losses) / result.targets
    assert loss.item() == pytest.approx(whole.item(), rel=1e-12)


def test_clipping_scales_the_whole_gradient_once(hardware):
    torch.manual_seed(0)
    x, y = torch.randn(8, 1, 8, 8).double(), torch.randint(10, (8,))
    net = network(batchnorm=False)
    gradients = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters()))
    norm = torch.stack([g.norm() for g in gradients]).norm()
    config = configured(optimizer=SGD(name="sgd", lr=0.1, max_grad_norm=0.1))
    run = build_run(config, hardware, image_task(net))
    result = step_once(run, list(zip(x.chunk(2), y.chunk(2), strict=True)))
    assert result.grad_norm == pytest.approx(norm.item())  # logged: before clipping
    clipped = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
    assert clipped.item() == pytest.approx(0.1, rel=1e-4)


def test_the_average_of_the_weights_moves_once_a_step(hardware):
    """CASES 10: with several micro-batches a step, against the formula."""
    torch.manual_seed(0)
    net = network(batchnorm=True)
    run = build_run(configured(ema_decay=0.9), hardware, image_task(net))
    x, y = torch.randn(8, 1, 8, 8).double(), torch.randint(10, (8,))
    average = net[0].weight.detach().clone()
    for step in range(1, 4):
        step_once(run, list(zip(x.chunk(4), y.chunk(4), strict=True)), lr=0.1, step=step)
        average = 0.9 * average + 0.1 * net[0].weight.detach()
    weight = net[0].weight.detach().clone()
    with run.learner.evaluating() as model:
        torch.testing.assert_close(model[0].weight.detach(), average)
    assert net[0].weight.equal(weight)
    assert net[1].num_batches_tracked == 3


def exact_run(hardware, config, **task_changes):
    task = exact_task.build(exact_task.Config(**task_changes))
    plan = Plan(len(task.train_dataset), global_batch_size=8, micro_batch_size=2, seed=0)
    run = build_run(config, hardware, task)
    cast = partial(cast_batch, precision=config.precision)
    batches = list(train_loader(task, plan, first_step=1, last_step=1, cast=cast))
    return run, batches, sum(count for count, _ in batches)


@pytest.mark.parametrize("kind", [{}, {"nan_gradient": True}], ids=["loss", "gradient"])
def test_what_is_not_finite_stops_the_run_before_the_weights_move(hardware, kind):
    plan = Plan(50, global_batch_size=8, micro_batch_size=2, seed=0)
    bad = plan.samples(range(5, 6))[0][1]  # position 5 is in micro-batch 2
    run, batches, targets = exact_run(hardware, configured(), nan_at_index=bad, **kind)
    before = {k: v.clone() for k, v in run.learner.bare.state_dict().items()}
    result = train.train_step(run, 1, batches, targets=targets, lr=0.1)
    assert not result.finite
    again = partial(train.forward, run, 1, batches=batches)
    message = nonfinite.locate(1, result.losses, again, run.learner, hardware)
    assert "step 1" in message
    assert "micro-batch 2" in message
    assert ("gradient" if kind else "loss") in message
    after = run.learner.bare.state_dict()
    assert all(before[name].equal(after[name]) for name in before)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
def test_bitwise_adds_the_same_gradients(hardware, count):
    """And the same statistics, in another order; a parameter that nothing uses has no gradient."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 1, 8, 8).double(), torch.randint(10, (12,))
    batches = list(zip(x.chunk(count), y.chunk(count), strict=True))
    states = []
    for mode in ("rounding", "bitwise"):
        torch.manual_seed(0)
        net = network(batchnorm=True)
        net.unused = nn.Parameter(torch.ones(3).double())
        config = configured(reproducibility=mode, optimizer=AdamW(lr=0.1, weight_decay=0.1))
        step_once(build_run(config, hardware, image_task(net)), batches, lr=0.1)
        assert net.unused.grad is None
        assert (net.unused == 1).all()
        states.append(net.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=1e-9, atol=1e-9)


def test_dropout_depends_on_step_and_micro_batch_alone(hardware):
    """Whatever was drawn before, from any generator."""
    grads = []
    for noise in (0, 5):
        run, batches, targets = exact_run(hardware, configured(optimizer=AdamW(lr=0.1)))
        torch.rand(noise)
        train.train_step(run, 1, batches, targets=targets, lr=0.0)
        grads.append(run.learner.bare.inner.weight.grad.clone())
    assert grads[0].equal(grads[1])
