"""A checkpointed stage in a step runs twice, and both runs are alike."""

from __future__ import annotations

import gc
import weakref
from contextvars import ContextVar

import pytest
import torch
from torch import nn

from fxpipe.runtime.checkpointing.checkpoint import CheckpointError
from fxpipe.runtime.step import backward, forward, replay
from tests.zoo import gradients, same


class Calls(nn.Module):
    """A linear layer, and then a function of the number of calls so far and the layer's output."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function, self.calls = nn.Linear(3, 3), function, 0

    def forward(self, x):
        self.calls += 1
        return self.function(self.calls, self.linear(x))


def run(function, x):
    stage = Calls(function)
    (result,), tape = forward(stage, (x,), (), True, True)
    return stage, result, tape


def inner(rows=2):
    return torch.randn(rows, 3, requires_grad=True)


def test_the_second_run_gives_the_gradients_of_a_run_without_checkpoint():
    x = inner()
    stage, result, tape = run(lambda _, h: h.sin(), x)
    replay(tape)
    (grad,) = backward(tape, (torch.ones_like(result),))
    found = gradients(stage)
    stage.zero_grad()
    stage(x).sum().backward()
    assert stage.calls == 3 and same([grad, *found], [x.grad, *gradients(stage)])


def test_the_graph_of_the_first_run_is_freed_at_once():
    """No reference cycle keeps it until the garbage collector runs."""
    saved = []

    def exponential(_, h):
        y = h.exp()
        saved.append(weakref.ref(y.untyped_storage()))
        return y * 1

    gc.disable()
    try:
        _, result, tape = run(exponential, inner())
        assert saved[0]() is None, "first run"
        replay(tape)
        assert saved[1]() is not None
        backward(tape, (torch.ones_like(result),))
        assert saved[1]() is None, "second run"
    finally:
        gc.enable()


def test_a_tape_that_is_not_used_keeps_its_arguments_no_longer_than_itself():
    x = inner()
    given = weakref.ref(x)
    gc.disable()
    try:
        _, result, tape = run(lambda _, h: h.sin(), x)
        del x, tape
        assert given() is None and result is not None
    finally:
        gc.enable()


def test_without_replay_the_backward_runs_the_stage_again():
    stage, result, tape = run(lambda _, h: h.sin(), inner())
    backward(tape, (torch.ones_like(result),))
    assert stage.calls == 2 and stage.linear.weight.grad is not None


def test_a_stage_whose_results_require_no_gradient_is_not_run_again():
    stage, _, tape = run(lambda _, h: h.detach(), inner())
    replay(tape)
    assert stage.calls == 1 and backward(tape, (None,)) == (None,)


@pytest.mark.parametrize(
    ("function", "difference"),
    [
        (
            lambda calls, h: h[:calls],
            "gave a float32[1, 3] on cpu that requires a gradient, and its recomputation a "
            "float32[2, 3] on cpu that requires a gradient",
        ),
        (
            lambda calls, h: h if calls == 1 else h.detach(),
            "gave a float32[2, 3] on cpu that requires a gradient, and its recomputation a "
            "float32[2, 3] on cpu",
        ),
    ],
)
def test_a_second_run_that_differs_is_an_error(function, difference):
    _, _, tape = run(function, inner())
    with pytest.raises(CheckpointError) as caught:
        replay(tape)
    assert str(caught.value) == (
        f"the forward of Calls {difference}: it must do the same both times, so it may not depend "
        "on anything that changes between them"
    )


class Dropped(nn.Module):
    """Leaves one of its layers out in its second call."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(3, 3), nn.Linear(3, 3), 0

    def forward(self, x):
        self.calls += 1
        return self.first(x) if self.calls == 2 else self.second(self.first(x))


def test_a_second_run_with_other_parameters_is_an_error():
    _, tape = forward(Dropped(), (inner(),), (), True, True)
    with pytest.raises(CheckpointError) as caught:
        replay(tape)
    assert str(caught.value) == (
        "the forward of Dropped used second.weight, second.bias only in the first of its two runs: "
        "it must do the same both times, so it may not depend on anything that changes between them"
    )


def test_operators_that_differ_while_the_first_run_is_watched_are_no_error():
    """The first call of a stage is watched for writes; there, reshape calls another operator."""
    stage, result, tape = run(lambda _, h: h.t().t().reshape(3, -1), inner())
    replay(tape)
    backward(tape, (torch.ones_like(result),))
    assert stage.calls == 2


def test_an_argument_that_is_written_to_between_the_runs_is_an_error():
    x = inner()
    _, _, tape = run(lambda _, h: h, x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="an argument needed for the backward"):
        replay(tape)


def test_a_parameter_that_is_written_to_between_the_runs_is_an_error():
    """An optimizer that steps in the backward of one micro-batch would change the others'."""
    stage, _, tape = run(lambda _, h: h, inner())
    with torch.no_grad():
        stage.linear.bias.add_(1)
    with pytest.raises(RuntimeError, match=r"linear\.bias has been modified by an inplace"):
        replay(tape)


class Weighted(nn.Module):
    """Doubles its parameter in its forward, before it uses the parameter, or a copy of it."""

    def __init__(self, uses_copy):
        super().__init__()
        self.weight, self.uses_copy = nn.Parameter(torch.ones(3)), uses_copy

    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(2)
        return x * (self.weight.detach().clone() if self.uses_copy else self.weight)


@pytest.mark.parametrize("uses_copy", [False, True])
def test_a_stage_that_writes_to_a_parameter_does_so_once_for_each_micro_batch(uses_copy):
    stage, x, y = Weighted(uses_copy), inner(), inner()
    _, first = forward(stage, (x,), (), True, True)
    _, second = forward(stage, (y,), (), True, True)
    replay(second)
    (grad,) = backward(second, (torch.ones(2, 3),))
    assert same(grad, torch.full((2, 3), 4.0))
    replay(first)
    if uses_copy:
        (grad,) = backward(first, (torch.ones(2, 3),))
        assert same(grad, torch.full((2, 3), 2.0))
    else:  # without a checkpoint this is an error, too
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            backward(first, (torch.ones(2, 3),))
    assert same(stage.weight.detach(), torch.full((3,), 4.0))


def test_the_second_run_sees_the_context_variables_of_the_first_and_changes_none():
    scale = ContextVar("scale", default=1.0)

    def doubled(_, h):
        scale.set(scale.get() * 2)
        return h * scale.get()

    stage, result, tape = run(doubled, x := inner())
    assert scale.get() == 2.0
    replay(tape)
    (grad,) = backward(tape, (torch.ones_like(result),))
    assert scale.get() == 2.0 and same(grad, 2 * stage.linear.weight.sum(0).expand_as(x))
