"""What a loss function changes is what the micro-batches of the steps have changed: the calls that
a check makes of it leave nothing behind, wherever it keeps it."""

from __future__ import annotations

import functools
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.meaning.loss_state import left_as_it_was


class Lit(nn.Module):
    """A loss beside its network, as in Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("ema", torch.zeros(4))
        self.steps, self.history = 0, []
        self.centre = nn.Parameter(torch.zeros(4), requires_grad=False)

    def loss(self, output, target):
        self.calls += 1
        self.ema.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        self.centre.data.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        self.steps += 1
        self.history.append(self.steps)
        return F.mse_loss(output, target)

    def state(self):
        return self.calls.item(), self.ema.tolist(), self.centre.tolist(), self.history


class Trainer:
    """A loss of a plain object, with state of many kinds."""

    def __init__(self) -> None:
        self.steps, self.ema, self.counts = 0, torch.zeros(4), np.zeros(2)
        self.history = list(range(40))
        self.log = types.SimpleNamespace(calls=0)

    def loss(self, output, target):
        self.steps += 1
        self.log.calls += 1
        self.counts[0] += 1
        self.history.append(self.steps)
        self.ema = 0.9 * self.ema + 0.1 * output.detach().mean(0)
        return F.mse_loss(output, target) * (1 if self.steps <= 8 else 3)

    __call__ = loss

    def state(self):
        own = self.steps, self.log.calls, self.history[40:]
        return *own, self.counts.tolist(), self.ema.tolist()


class InSlots:
    __slots__ = ("ema", "steps")

    def __init__(self) -> None:
        self.steps, self.ema = 0, torch.zeros(4)

    def loss(self, output, target):
        self.steps += 1
        self.ema.add_(output.detach().mean(0))
        return F.mse_loss(output, target)

    def state(self):
        return self.steps, self.ema.tolist()


def method(kind):
    own = kind()
    return own.loss, own.state


def in_lambda(kind):
    own = kind()
    return (lambda output, target: own.loss(output, target)), own.state


def in_partial(kind):
    def loss(owner, output, target):
        return owner.loss(output, target)

    own = kind()
    return functools.partial(loss, own), own.state


def in_attribute(kind):
    own = types.SimpleNamespace(inner=kind())
    return (lambda output, target: own.inner.loss(output, target)), own.inner.state


def in_dict(kind):
    own = {"inner": kind()}
    return (lambda output, target: own["inner"].loss(output, target)), own["inner"].state


def as_global(kind):
    globals()["OWNER"] = own = kind()
    return (lambda output, target: OWNER.loss(output, target)), own.state  # noqa: F821


def callable_object():
    own = Trainer()
    return own, own.state


def in_closure():
    calls = 0

    def loss(output, target):
        nonlocal calls
        calls += 1
        return F.mse_loss(output, target)

    return loss, lambda: calls


def in_global():
    globals()["CALLS"] = 0

    def loss(output, target):
        global CALLS
        CALLS += 1
        return F.mse_loss(output, target)

    return loss, lambda: CALLS


def on_the_function():
    def loss(output, target):
        loss.calls += 1
        return F.mse_loss(output, target)

    loss.calls = 0
    return loss, lambda: loss.calls


def on_the_class():
    class Counting:
        calls = 0

        def loss(self, output, target):
            Counting.calls += 1
            return F.mse_loss(output, target)

    return Counting().loss, lambda: Counting.calls


WAYS = [
    *(
        functools.partial(way, kind)
        for kind in (Lit, Trainer, InSlots)
        for way in (method, in_lambda, in_partial, in_attribute, in_dict, as_global)
    ),
    *(callable_object, in_closure, in_global, on_the_function, on_the_class),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("make", WAYS, ids=range(len(WAYS)))
def test_a_step_changes_what_a_loss_keeps_as_a_loop_over_its_micro_batches_does(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    xs, ys = torch.randn(2, 8, 6), torch.randn(2, 8, 4)
    loss, state = make()
    expected = [
        loss(model(part), wanted).item() / 4
        for x, y in zip(xs, ys, strict=True)
        for part, wanted in zip(x.chunk(4), y.chunk(4), strict=True)
    ]
    after = state()
    loss, state = make()
    pipe = fxpipe.compile(model, ["cpu", "cpu"], chunks=4, loss_fn=loss)
    found = [pipe.step(x, target=y).item() for x, y in zip(xs, ys, strict=True)]
    assert found == pytest.approx([sum(expected[:4]), sum(expected[4:])])
    torch.testing.assert_close(torch.tensor(_flat(state())), torch.tensor(_flat(after)))


def _flat(value):
    several = isinstance(value, tuple | list)
    return [x for each in value for x in _flat(each)] if several else [float(value)]


def test_a_plan_by_an_example_of_the_target_leaves_no_tensor_without_values_behind():
    own = Trainer()
    x, y = torch.randn(8, 6), torch.randn(8, 4)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    pipe = fxpipe.compile(
        model, ["cpu", "cpu"], chunks=4, loss_fn=own.loss, example_target=y, example_inputs=(x,)
    )
    assert own.steps == 0 and type(own.ema) is torch.Tensor and not own.ema.any()
    pipe.step(x, target=y)
    assert own.steps == 4


def test_an_error_in_a_loss_puts_back_what_it_has_changed_too():
    own = Trainer()
    with pytest.raises(RuntimeError), left_as_it_was(own.loss)():
        own.loss(torch.ones(2, 4), torch.ones(3, 4, 5, 6))
    assert own.state() == Trainer().state()


@pytest.mark.parametrize("kind", [object, nn.Module])
def test_a_pipeline_that_a_loss_reaches_is_let_be(kind):
    class Owner(kind):
        def __init__(self) -> None:
            super().__init__()
            model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
            self.pipe = fxpipe.compile(model, ["cpu", "cpu"], chunks=4, loss_fn=self.loss)
            self.calls = 0

        def loss(self, output, target):
            self.calls += 1
            decay = sum(each.square().sum() for each in self.pipe.parameters())
            return F.mse_loss(output, target) + 0.1 * decay

    own = Owner()
    for rows in 8, 8, 8, 12, 12:
        own.pipe.step(torch.randn(rows, 6), target=torch.randn(rows, 4))
    assert own.calls == 20
    assert len(own.pipe.compilations) == 1
