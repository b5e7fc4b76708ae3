"""A loss may take parameters of the model by itself: a penalty on them, say."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.schedule import NAMES, named
from tests.zoo import MLP, MODELS, Tied, gradients, same, step_of_loop

MODELS = MODELS | {"tied": (Tied, lambda batch: (torch.randint(11, (batch, 4)),))}


def penalised(model: nn.Module, own: Tensor | None = None):
    """A loss of output and target, and of all the model's parameters, some of them twice; and of
    one of its own."""

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        squares = [(p * p).sum() for p in model.parameters()]
        data = (torch.sin(output).flatten(1).sum(1) * target).mean()
        penalty = sum(squares) + next(model.parameters()).sum()
        return data + 0.1 * penalty if own is None else own * data + penalty * own

    return loss_fn


def stepped(model, x, schedule, chunks, own=None, reference=None, **options):
    """The gradients of a step, of the next one, and those of the loop in that order."""
    target, twin = torch.randn(len(x[0])), copy.deepcopy(model)
    with fxpipe.compile(
        model,
        ["cpu"] * 2,
        chunks=chunks,
        schedule=schedule,
        loss_fn=penalised(model, own),
        **options,
    ) as pipe:
        found = []
        for _ in range(2):
            model.zero_grad()
            pipe.step(*x, target=target)
            found.append(gradients(model))
        order = named(schedule, lanes=2, microbatches=chunks, stages=len(pipe.stages))
        loss_fn = penalised(twin, reference)
        _, wanted = step_of_loop(twin, x, target, pipe, order, chunks, loss_fn)
    return *found, wanted


@pytest.mark.one_in(2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("name", MODELS)
def test_its_gradients_are_those_of_the_loop_and_the_same_in_every_run(name, schedule):
    make, inputs = MODELS[name]
    first, second, wanted = stepped(make(), inputs(7), schedule, 4)
    assert same(first, second)
    if name == "tied":  # the loop adds a penalty's gradient to that of the first use
        torch.testing.assert_close(first, wanted)
    else:
        assert same(first, wanted)


@pytest.mark.covering(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zbv"])
@pytest.mark.parametrize("segments", [1, 2])
def test_of_a_checkpointed_stage_too(schedule, segments):
    model, x = MLP(depth=8), (torch.randn(6, 12),)
    first, _, wanted = stepped(
        model, x, schedule, 3, checkpoint="always", checkpoint_segments=segments
    )
    assert same(first, wanted)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zbv"])
def test_parameters_of_the_loss_have_theirs_too(schedule):
    own, other = (nn.Parameter(torch.tensor(0.5)) for _ in range(2))
    model, x, target = MLP(), torch.randn(8, 12), torch.randn(8)
    first, _, wanted = stepped(model, (x,), schedule, 4, own, other)
    assert same(first, wanted)
    own.grad = None
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=4, schedule=schedule, loss_fn=penalised(model, own)
    ) as pipe:
        pipe.step(x, target=target)
    full = penalised(model, other)(model(x), target)
    torch.testing.assert_close(own.grad, torch.autograd.grad(full, other)[0])


class Masked(nn.Module):
    """Nothing that carries a gradient leaves its first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.b((self.a(x) > 0) * 1.0)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_of_parameters_that_get_a_gradient_from_nothing_else(schedule):
    x = (torch.randn(8, 12),)
    first, _, wanted = stepped(Masked(), x, schedule, 4, partition=["mul"])
    assert same(first, wanted)


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_of_frozen_parameters_there_are_none(schedule):
    model = MLP()
    for parameter in model.layers[0].parameters():
        parameter.requires_grad_(False)
    first, _, wanted = stepped(model, (torch.randn(6, 12),), schedule, 3)
    assert same(first, wanted) and first[0] is None


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_an_optimizer_steps_with_them(schedule):
    model, x, target = MLP(), torch.randn(8, 12), torch.randn(8)
    results = []
    for in_step in (True, False):
        ours = copy.deepcopy(model)
        optimizer = torch.optim.SGD(ours.parameters(), 0.1)
        with fxpipe.compile(
            ours, ["cpu"] * 2, chunks=4, schedule=schedule, loss_fn=penalised(ours)
        ) as pipe:
            pipe.step(x, target=target, optimizer=optimizer if in_step else None)
        if not in_step:
            optimizer.step()
        results.append([*ours.parameters()])
    assert same(*results)


class Doubled(torch.autograd.Function):
    """A loss may be of a Function of one's own, whose node is called in another way."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@pytest.mark.covering(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("of_its_own", [False, True])
def test_hooks_on_parameters_see_the_sum_as_in_the_loop(schedule, of_its_own):
    """They may clip: what two gradients become one by one is not what their sum becomes."""
    model, x, target = MLP(), torch.randn(8, 12), torch.randn(8)
    reference, added, seen = copy.deepcopy(model), [], {}

    def loss_of(each):
        weight = each.layers[0].weight
        extra = Doubled.apply(weight) if of_its_own else weight * weight
        return lambda output, y: penalised(each)(output, y) + extra.square().sum() / 10

    for each in model, reference:
        calls = seen.setdefault(each, [])
        each.layers[0].weight.register_hook(
            lambda grad, calls=calls: calls.append(grad) or grad.clamp(-0.01, 0.01)
        )
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(added.append)
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=4, schedule=schedule, loss_fn=loss_of(model)
    ) as pipe:
        pipe.step(x, target=target)
    for inputs, y in zip(x.split(2), target.split(2), strict=True):
        (loss_of(reference)(reference(inputs), y) / 4).backward()
    torch.testing.assert_close(gradients(model), gradients(reference))
    ours, loops = ([grad.norm() for grad in calls] for calls in seen.values())
    torch.testing.assert_close(sorted(ours), sorted(loops))
    assert len(added) == 4 * len(list(model.parameters()))
