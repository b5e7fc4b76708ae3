"""The walk over an autograd graph visits each node once."""

import torch

from fxpipe.ir.autograd import reached


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
