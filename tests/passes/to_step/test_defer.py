"""Gradients of parameters apart from those of the input, to the same bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import fx, nn

import fxpipe
from fxpipe.ir.printing import format_graph
from fxpipe.runtime.step import backward, backward_input, forward, weight_grad
from passes import Defer
from tests.zoo import gradients, same


class Everything(nn.Module):
    """Modules and functions with parameters, some of which can be deferred."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.conv = nn.Conv1d(5, 5, 3, padding=1)
        self.norm = nn.LayerNorm(6)
        self.linear = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.other, self.scale = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))

    def forward(self, tokens, x):
        x = self.norm(self.conv(self.embed(tokens) + x))
        x = torch.relu(self.linear(x)) @ self.weight
        return F.linear(x, self.other, self.scale) * 2


LATE = {"embed", "conv", "linear", "weight", "other", "scale"}  # not the layer norm's


def test_what_can_be_deferred_is_called_by_name():
    gm = Defer()(fx.symbolic_trace(Everything()))
    assert_expected_inline(
        format_graph(gm),
        """\
tokens: input
x: input
embed_module = self.embed
embed = defer(embed_module, tokens)
add = add(embed, x)
conv_module = self.conv
conv = defer(conv_module, add)
norm = norm(conv)
linear_module = self.linear
linear = defer(linear_module, norm)
relu = relu(linear)
weight = self.weight
matmul_module = self.matmul_apply
matmul = defer(matmul_module, relu, weight)
other = self.other
scale = self.scale
linear_1_module = self.linear_1_apply
linear_1 = defer(linear_1_module, matmul, other, scale)
mul = mul(linear_1, 2)
return mul
""",
    )


def test_a_stage_without_any_stays_as_it_is():
    gm = fx.symbolic_trace(nn.Sequential(nn.LayerNorm(4), nn.ReLU()))
    assert Defer()(gm) is gm


@pytest.mark.covering(1)
@pytest.mark.parametrize("tracer", ["symbolic", "export"])
@pytest.mark.parametrize("needs_input_grad", [False, True])
def test_both_halves_together_are_the_whole_backward(needs_input_grad, tracer):
    model, grad = Everything(), torch.randn(3, 5, 6)
    args = torch.randint(7, (3, 5)), torch.randn(3, 5, 6, requires_grad=needs_input_grad)
    gm = fxpipe.compile(model, ["cpu"], example_inputs=args, tracer=tracer).stage_graph.stage_0
    (out,), tape = forward(gm, args, (), True, False)
    found = backward(tape, (grad,))
    expected = dict(zip(dict(model.named_parameters()), gradients(model), strict=True))
    model.zero_grad()
    (other,), tape = forward(Defer()(gm), args, (), True, False)
    assert same(out.detach(), other.detach())
    assert same(list(found), list(backward_input(tape, (grad,))))
    late = {name for name, p in model.named_parameters() if p.grad is None}
    assert late == {n for n in expected if n.split(".")[0] in LATE}
    weight_grad(tape)
    assert same(list(expected.values()), gradients(model))


def test_a_whole_backward_of_a_deferring_stage_is_whole():
    model = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    gm = Defer()(model)
    x, grad = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    _, tape = forward(gm, (x,), (), True, False)
    (found,) = backward(tape, (grad,))
    first = gradients(model)
    model.zero_grad()
    y = x.detach().requires_grad_()
    model(y).backward(grad)
    assert same(found, y.grad) and same(first, gradients(model))


def test_outside_of_a_step_it_is_a_plain_call():
    model = nn.Linear(4, 4)
    gm = Defer()(fx.symbolic_trace(nn.Sequential(model)))
    x = torch.randn(2, 4)
    assert same(gm(x).detach(), model(x).detach())
    gm(x).sum().backward()
    assert model.weight.grad is not None
