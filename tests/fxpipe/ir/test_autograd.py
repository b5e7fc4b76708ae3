"""The walk over an autograd graph visits each node once."""

import torch
from torch import Tensor

from fxpipe.ir.autograd import leaf_of, leaves_reached, reached


def test_each_node_is_visited_once_and_those_nearer_to_the_results_first():
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    left, right = y.exp(), y.sin()
    names = [node.name() for node in reached([left.grad_fn, right.grad_fn, left.grad_fn])]
    ends = "torch::autograd::AccumulateGrad"
    assert names == ["ExpBackward0", "SinBackward0", "MulBackward0", ends]


def test_a_long_chain_needs_no_recursion():
    x = torch.ones((), requires_grad=True)
    y = x
    for _ in range(20_000):
        y = y + 1
    *_, last = reached([y.grad_fn])
    assert last.variable is x


class Scaled(torch.autograd.Function):
    """Multiplies, and keeps the factor under a name that nodes of leaves have, too."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(x, factor)
        ctx.variable = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, factor = ctx.saved_tensors
        return grad * factor, grad * x


def test_only_the_node_that_accumulates_into_a_leaf_is_the_leafs():
    x, factor = (torch.ones(2, requires_grad=True) for _ in range(2))
    nodes = reached([Scaled.apply(x, factor).grad_fn])
    assert [leaf_of(node) for node in nodes] == [None, x, factor]


def test_the_leaves_that_are_reached_come_in_the_order_of_the_walk_and_end_where_it_is_told_to():
    x, factor, beside = (torch.ones(2, requires_grad=True) for _ in range(3))
    scaled = Scaled.apply(x, factor)
    value = (scaled + beside * beside).grad_fn
    found = leaves_reached([value, value])
    assert list(map(id, found)) == [
        id(leaf) for node in reached([value]) if (leaf := leaf_of(node)) is not None
    ]
    assert set(map(id, found)) == {id(x), id(factor), id(beside)}
    ends = []
    assert list(map(id, leaves_reached([value], type(scaled.grad_fn), ends))) == [id(beside)]
    assert ends == [scaled.grad_fn]
