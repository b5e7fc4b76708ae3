"""Each stage's forward and backward by themselves."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fxpipe.runtime.step import (
    average,
    backward,
    backward_input,
    forward,
    loss,
    loss_backward,
    replay,
    send,
    weight_grad,
    weights,
)
from passes import Defer
from tests.zoo import MLP, gradients, same


class Two(nn.Module):
    def forward(self, x, y):
        return x * 2, y.sin()


def test_results_have_no_history_but_say_whether_they_had_one():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    (a, b, passed), tape = forward(Two(), (x, y), (0,), False, False)
    assert a.requires_grad and a.grad_fn is None and not b.requires_grad
    assert same(passed.detach(), x.detach()) and passed.requires_grad
    gx, gy = backward(tape, (torch.ones(2), None, torch.full((2,), 5.0)))
    assert same(gx, torch.full((2,), 7.0)) and gy is None
    assert x.grad is None, "the gradient is handed on, not kept"


def test_what_nobody_wants_a_gradient_for_costs_nothing():
    (a, _), tape = forward(Two(), (torch.ones(2), torch.ones(2)), (), False, False)
    assert not a.requires_grad and backward(tape, (None, None)) == (None, None)


def test_a_gradient_is_handed_on_as_it_came_and_not_copied():
    """In another layout in memory, a kernel of the stage before might sum in another order."""

    class Cat(nn.Module):
        def forward(self, x, y):
            return torch.cat([x, y], 1)

    x, y = torch.ones(2, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    _, tape = forward(Cat(), (x, y), (), True, False)
    grad = torch.randn(2, 6)
    gx, gy = backward(tape, (grad,))
    assert gx.data_ptr() == grad.data_ptr() and gx.stride() == gy.stride() == (6, 1)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_tape_does_not_keep_the_output_of_its_stage(checkpoint):
    """Once it is sent, the output is needed by the next stage only, and its copy there suffices."""
    x = torch.ones(2, 3, requires_grad=True)
    (output,), tape = forward(nn.Linear(3, 3), (x,), (), True, checkpoint)
    memory = weakref.ref(output.untyped_storage())
    del output
    assert memory() is None
    (grad,) = backward(tape, (torch.ones(2, 3),))
    assert same(grad, tape.stage.weight.sum(0).expand(2, 3))


def test_a_tape_lets_go_of_all_in_the_backward():
    kept = []

    class Keeps(nn.Module):
        def forward(self, x):
            y = torch.exp(x)
            kept.append(weakref.ref(y.untyped_storage()))
            return y * 1

    x = torch.ones(2, requires_grad=True)
    results, tape = forward(Keeps(), (x,), (), True, False)
    assert kept[0]() is not None
    backward(tape, (torch.ones(2),))
    assert kept[0]() is None and results is not None


def test_values_that_are_no_tensors_pass():
    class Mixed(nn.Module):
        def forward(self, x, n):
            return {"y": x * n, "n": (n, None)}

    x = torch.ones(2, requires_grad=True)
    (result,), tape = forward(Mixed(), (x, 3), (), True, False)
    assert result["n"] == (3, None)
    gx, gn = backward(tape, ({"y": torch.ones(2), "n": (None, None)},))
    assert same(gx, torch.full((2,), 3.0)) and gn is None


def test_a_loss_is_weighted_and_scaled_in_the_backward():
    class Half(nn.Module):
        def forward(self, output, target):
            return (output * target).sum() / 2

    output, target = torch.ones(3, requires_grad=True), torch.tensor([1.0, 2.0, 3.0])
    value, tape = loss(Half(), output, target, 0, ())
    assert value.item() == 3.0 and not value.requires_grad
    assert same(loss_backward(tape, 0.25, torch.tensor(8.0)), target)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_loss_of_a_tensor_within_a_stage_is_refused(checkpoint):
    """Its gradient would not get to the stages ahead of that stage."""

    class Keeps(nn.Module):
        def forward(self, x):
            self.kept = x.sin()
            return self.kept * 2

    class Penalty(nn.Module):
        def forward(self, output, target):
            return output.sum() + stage.kept.sum()

    stage, x = Keeps(), torch.ones(3, requires_grad=True)
    (output,), tape = forward(stage, (x,), (), True, checkpoint)
    with pytest.raises(ValueError, match="the loss of micro-batch 0 depends on a tensor within"):
        loss(Penalty(), output, None, 0, (tape,))
    stage.kept = stage.kept.detach()
    loss(Penalty(), output, None, 0, (tape,))


def test_a_loss_keeps_no_memory_but_its_own():
    """What F.mse_loss returns lies within the memory of the losses of all elements. A step returns
    the losses of all micro-batches at its end, and would keep all of that memory until then."""

    class MeanSquare(nn.Module):
        def forward(self, output, target):
            value = F.mse_loss(output, target)
            kept.append(weakref.ref(value.untyped_storage()))
            return value

    kept, output, target = [], torch.randn(4, 256, requires_grad=True), torch.zeros(4, 256)
    value, tape = loss(MeanSquare(), output, target, 0, ())
    assert value == F.mse_loss(output, target)
    assert kept[0]() is None and value.untyped_storage().nbytes() == value.element_size()
    expected = torch.autograd.grad(F.mse_loss(output, target), output)
    assert same(loss_backward(tape, 1.0, None), *expected)


def test_weights_are_shares_of_the_rows():
    parts = [torch.ones(1, 3), torch.ones(1, 1)]
    assert weights(parts, 1) == (0.75, 0.25) and weights((None, None), None) == (0.5, 0.5)
    assert average([torch.tensor(1.0), torch.tensor(5.0)], (0.75, 0.25)).item() == 2.0


def test_a_mean_over_no_rows_is_refused_and_a_sum_over_none_is_not():
    parts = [torch.ones(0, 3)]
    with pytest.raises(ValueError, match="the mini-batch has no rows"):
        weights(parts, 0)
    assert weights(parts, 0, summed=True) == (1.0,)


def test_what_is_sent_says_whether_it_carries_gradient():
    x = torch.ones(2, requires_grad=True)
    moved, n = send((x, 3), "cpu/copy", "meta/copy")
    assert moved.device.type == "meta" and moved.requires_grad and n == 3


def test_a_value_without_history_is_sent_on_the_host_as_it_is_but_for_the_callers():
    x = torch.ones(2, requires_grad=True)
    (sent,), (made,) = (send((value,), "cpu/copy", "cpu/copy") for value in (x, x * 2))
    assert sent is x and made.grad_fn is None and made.requires_grad
    (given,) = send((x,), "caller", "cpu/copy")
    assert given is not x and given.data_ptr() == x.data_ptr() and given.requires_grad


def test_a_checkpointed_stage_is_run_again_once_and_its_gradients_come_in_halves():
    plain, x = MLP(), torch.randn(3, 12, requires_grad=True)
    model = Defer()(fx.symbolic_trace(plain))
    runs = []
    plain.layers[0].register_forward_hook(lambda *_: runs.append(1))
    (y,), tape = forward(model, (x,), (), True, True)
    assert y.requires_grad and runs == [1]
    replay(tape)
    (grad,) = backward_input(tape, (torch.ones_like(y),))
    assert gradients(plain) == [None] * 10 and runs == [1, 1]
    weight_grad(tape)
    found = gradients(plain)
    plain.zero_grad()
    plain(x).sum().backward()
    assert same(found, gradients(plain)) and same(grad, x.grad)


class Mixed(nn.Module):
    """Two values and a parameter, by position and by name."""

    def __init__(self, function):
        super().__init__()
        self.function, self.w = function, nn.Parameter(torch.randn(3, 3))
        self.v = nn.Parameter(torch.randn(3, 3, 3))

    def forward(self, x, y):
        return self.function(self, x, y)


@pytest.mark.parametrize(
    "function",
    [
        lambda own, x, y: torch.addmm(x, y, own.w),
        lambda own, x, y: torch.addmm(x, mat1=y, mat2=own.w),
        lambda own, x, y: torch.addmm(mat2=own.w, mat1=y, input=x),
        lambda own, x, y: torch.addmm(own.w, mat2=x, mat1=y),
        lambda own, x, y: F.bilinear(x, input2=y, weight=own.v),
    ],
)
def test_each_argument_gets_its_own_gradient_however_it_is_given(function):
    model, grad = Mixed(function), torch.randn(3, 3)
    x, y = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    _, tape = forward(Defer()(fx.symbolic_trace(model)), (x, y), (), True, False)
    found = backward_input(tape, (grad,))
    weight_grad(tape)
    halves = [*found, *gradients(model)]
    model.zero_grad()
    model(x, y).backward(grad)
    assert same(halves, [x.grad, y.grad, *gradients(model)])


def test_a_checkpointed_stage_that_saves_nothing_is_not_run_again():
    class Twice(nn.Module):
        def forward(self, x):
            return x + x

    x = torch.randn(3, requires_grad=True)
    (y,), tape = forward(Twice(), (x,), (), True, True)
    replay(tape)
    (grad,) = backward_input(tape, (torch.ones_like(y),))
    weight_grad(tape)
    assert same(grad, torch.full((3,), 2.0))
