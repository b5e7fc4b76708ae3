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


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("name", MODELS)
def test_its_gradients_are_those_of_the_loop(name, schedule):
    make, inputs = MODELS[name]
    model, x, target = make(), inputs(7), torch.randn(7)
    reference = copy.deepcopy(model)
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=4, schedule=schedule, loss_fn=penalised(model)
    ) as pipe:
        pipe.step(*x, target=target)
        order = named(schedule, lanes=2, microbatches=4, stages=len(pipe.stages))
        _, wanted = step_of_loop(reference, x, target, pipe, order, 4, penalised(reference))
        once = gradients(model)
        if name == "tied":  # the loop adds a penalty's gradient to that of the first use
            torch.testing.assert_close(once, wanted)
        else:
            assert same(once, wanted)
        model.zero_grad()
        pipe.step(*x, target=target)
        assert same(gradients(model), once)
        pipe.step(*x, target=target)  # they are added
        torch.testing.assert_close(gradients(model), [2 * grad for grad in once])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zbv"])
@pytest.mark.parametrize("segments", [1, 2])
def test_of_a_checkpointed_stage_too(schedule, segments):
    model, x, target = MLP(depth=8), torch.randn(6, 12), torch.randn(6)
    reference = copy.deepcopy(model)
    with fxpipe.compile(
        model,
        ["cpu"] * 2,
        chunks=3,
        schedule=schedule,
        checkpoint="always",
        checkpoint_segments=segments,
        loss_fn=penalised(model),
    ) as pipe:
        pipe.step(x, target=target)
        order = named(schedule, lanes=2, microbatches=3, stages=len(pipe.stages))
        _, wanted = step_of_loop(reference, (x,), target, pipe, order, 3, penalised(reference))
    assert same(gradients(model), wanted)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zbv"])
def test_in_lanes_as_in_one_thread_with_what_is_the_losss_own(schedule):
    model, x, target = MLP(), torch.randn(8, 12), torch.randn(8)
    reference = copy.deepcopy(model)
    own, others = (nn.Parameter(torch.tensor(0.5)) for _ in range(2))
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=4, schedule=schedule, loss_fn=penalised(model, own)
    ) as pipe:
        pipe.step(x, target=target)
        order = named(schedule, lanes=2, microbatches=4, stages=len(pipe.stages))
        loss_fn = penalised(reference, others)
        _, wanted = step_of_loop(reference, (x,), target, pipe, order, 4, loss_fn)
        assert same(gradients(model), wanted)
        full = loss_fn(reference(x), target)
        torch.testing.assert_close(own.grad, torch.autograd.grad(full, others)[0])


class Masked(nn.Module):
    """Nothing that carries a gradient leaves its first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.b((self.a(x) > 0) * 1.0)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_of_parameters_that_get_a_gradient_from_nothing_else(schedule):
    model, x, target = Masked(), torch.randn(8, 12), torch.randn(8)
    reference = copy.deepcopy(model)
    with fxpipe.compile(
        model,
        ["cpu"] * 2,
        chunks=4,
        schedule=schedule,
        loss_fn=penalised(model),
        partition=["mul"],
    ) as pipe:
        pipe.step(x, target=target)
        order = named(schedule, lanes=2, microbatches=4, stages=2)
        _, wanted = step_of_loop(reference, (x,), target, pipe, order, 4, penalised(reference))
    assert same(gradients(model), wanted)


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_of_frozen_parameters_there_are_none(schedule):
    model, x, target = MLP(), torch.randn(6, 12), torch.randn(6)
    for parameter in model.layers[0].parameters():
        parameter.requires_grad_(False)
    reference = copy.deepcopy(model)
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=3, schedule=schedule, loss_fn=penalised(model)
    ) as pipe:
        pipe.step(x, target=target)
        order = named(schedule, lanes=2, microbatches=3, stages=2)
        _, wanted = step_of_loop(reference, (x,), target, pipe, order, 3, penalised(reference))
    assert same(gradients(model), wanted)


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


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_hooks_on_parameters_come_by_as_often_as_in_the_loop(schedule):
    """Those on the gradient see that of the penalty by itself."""
    model, x, target = MLP(), torch.randn(8, 12), torch.randn(8)
    reference, added = copy.deepcopy(model), []
    for each in model, reference:
        each.layers[0].weight.register_hook(lambda grad: 2 * grad)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(added.append)
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=4, schedule=schedule, loss_fn=penalised(model)
    ) as pipe:
        pipe.step(x, target=target)
    for inputs, y in zip(x.split(2), target.split(2), strict=True):
        (penalised(reference)(reference(inputs), y) / 4).backward()
    torch.testing.assert_close(gradients(model), gradients(reference))
    assert len(added) == 4 * len(list(model.parameters()))
