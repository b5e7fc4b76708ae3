"""A step may be given several optimizers, and ones that are wrapped around others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

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
        pytest.raises(TypeError, match=r"optimizer is a str: give an instance"),
    ):
        pipe.step(torch.randn(4, 12), optimizer=[torch.optim.SGD(pipe.parameters()), "adam"])


class Scaled(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output, _):
        return (output * self.scale).square().mean()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_one_that_holds_nothing_with_a_gradient_is_refused_and_nothing_is_stepped(schedule):
    model, other, x = MLP(), MLP(), torch.randn(6, 12)
    before = copy.deepcopy(model.state_dict())
    for parameter in other.parameters():
        parameter.grad = torch.ones_like(parameter)  # of another step
    mine, stale = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, other))
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, schedule=schedule, loss_fn=Scaled()) as pipe:
        for given in (stale, [mine, stale]):
            with pytest.raises(ValueError, match="SGD holds none of the model's parameters"):
                pipe.step(x, optimizer=given)
            assert same(model.state_dict(), before)
        pipe.step(x, optimizer=mine)
        assert not same(model.state_dict(), before)


@pytest.mark.parametrize("within_module", [True, False])
def test_one_for_the_parameters_of_the_loss_steps_these(within_module):
    model, loss = MLP(), Scaled()
    before = loss.scale.item()
    model.requires_grad_(within_module)  # or else the loss alone is trained
    given = [torch.optim.SGD(loss.parameters(), 0.1)]
    given += [torch.optim.SGD(model.parameters(), 0.1)] * within_module
    function = loss if within_module else lambda output, _: loss(output, _)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, loss_fn=function) as pipe:
        pipe.step(torch.randn(6, 12), optimizer=given)
    assert loss.scale.item() != before


def test_one_that_holds_some_parameters_steps_these():
    model, x = MLP(), torch.randn(6, 12)
    before = copy.deepcopy(model.state_dict())
    model.layers[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.layers[2].parameters(), 0.1)
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=3, loss_fn=lambda o, _: o.square().mean()
    ) as pipe:
        pipe.step(x, optimizer=optimizer)
        frozen = torch.optim.SGD(model.layers[0].parameters(), 0.1)
        pipe.step(x, optimizer=frozen)  # as torch does: it steps nothing
    changed = {n for n, value in model.state_dict().items() if not torch.equal(value, before[n])}
    assert changed == {"layers.2.weight", "layers.2.bias"}


class OnCopies(torch.optim.SGD):
    """Steps copies of a model's parameters in double precision, and copies these back."""

    def __init__(self, parameters, lr):
        self.own = list(parameters)
        super().__init__([p.detach().double() for p in self.own], lr)

    def step(self, closure=None):
        copies = self.param_groups[0]["params"]
        for mine, copied in zip(self.own, copies, strict=True):
            copied.grad = mine.grad.double()
        super().step()
        with torch.no_grad():
            for mine, copied in zip(self.own, copies, strict=True):
                mine.copy_(copied)


def test_what_an_optimizer_of_another_kind_does_with_the_parameters_is_its_own_matter():
    model, x = MLP(), torch.randn(6, 12)
    before = copy.deepcopy(model.state_dict())
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=3, loss_fn=lambda o, _: o.square().mean()
    ) as pipe:
        pipe.step(x, optimizer=OnCopies(model.parameters(), 0.1))
    assert not any(torch.equal(value, before[n]) for n, value in model.state_dict().items())


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
