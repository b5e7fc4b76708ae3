"""A step may be given several optimizers, and ones that are wrapped around others."""

from __future__ import annotations

import copy

import pytest
import torch

import fxpipe
from tests.zoo import MLP, gradients, same


def halves(model):
    """Two optimizers for a model: plain matrices by one, all else by the other."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.SGD(matrices, 0.1, momentum=0.9), torch.optim.AdamW(others, 0.01)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zbv"])
def test_several_optimizers_step_what_each_of_them_has(schedule):
    model, x = MLP(), torch.randn(6, 12)
    twin = copy.deepcopy(model)
    options = dict(chunks=3, schedule=schedule, loss_fn=lambda o, _: o.square().mean())
    with (
        fxpipe.compile(model, ["cpu"] * 2, **options) as pipe,
        fxpipe.compile(twin, ["cpu"] * 2, **options) as other,
    ):
        within, after = halves(model), halves(twin)
        for _ in range(3):
            model.zero_grad()
            twin.zero_grad()
            pipe.step(x, optimizer=within)
            other.step(x)
            for optimizer in after:
                optimizer.step()
    assert same(list(model.parameters()), list(twin.parameters()))


def test_one_that_is_no_optimizer_among_them_is_refused():
    with (
        fxpipe.compile(MLP(), ["cpu"] * 2, loss_fn=lambda o, _: o.square().mean()) as pipe,
        pytest.raises(TypeError, match=r"optimizer is a str: give one of torch.optim"),
    ):
        pipe.step(torch.randn(4, 12), optimizer=[torch.optim.SGD(pipe.parameters()), "adam"])


class Wrapped(torch.optim.Optimizer):
    """An optimizer only by name, as those that mixed precision is hidden in."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    @property
    def state(self):
        return self.optimizer.state

    def step(self, closure=None):
        self.steps += 1
        self.optimizer.step(closure)


def test_a_wrapper_around_an_optimizer_steps_once_at_the_end():
    model, x = MLP(), torch.randn(6, 12)
    before = copy.deepcopy(model.state_dict())
    wrapped = Wrapped(torch.optim.SGD(model.parameters(), 0.5))
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=3, loss_fn=lambda o, _: o.square().mean()
    ) as pipe:
        pipe.step(x, optimizer=wrapped)
    assert wrapped.steps == 1
    for (name, parameter), gradient in zip(model.named_parameters(), gradients(model), strict=True):
        torch.testing.assert_close(parameter.detach(), before[name] - 0.5 * gradient)
