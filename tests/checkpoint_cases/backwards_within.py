"""A backward within the function, and a checkpoint within a backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.checkpoint_cases.harness import Cases, Checkpoint, leaf

CASES = Cases()
case = CASES.case


@case(memory=False)
def a_backward_within_the_function(c: Checkpoint) -> Any:
    x = leaf(3)

    def fn(x: Tensor) -> Tensor:
        z = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(z.sin().exp().sum(), z)
        return x.sin() * g

    c(fn, x).sum().backward()
    return x.grad


@case(memory=False)
def a_backward_to_the_input_within(c: Checkpoint) -> Any:
    """The function differentiates with respect to its input."""
    x = leaf(3)

    def fn(x: Tensor) -> Tensor:
        y = x.sin().exp()
        (g,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return y * g

    c(fn, x).sum().backward()
    return x.grad


@case(memory=False)
def a_backward_with_a_graph_within(c: Checkpoint) -> Any:
    """The function differentiates with create_graph: a gradient penalty."""
    x = leaf(3)

    def fn(x: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(x.sin().exp().sum(), x, create_graph=True)
        return g.pow(2)

    c(fn, x).sum().backward()
    return x.grad


@case(memory=False)
def a_checkpoint_in_a_backward(c: Checkpoint) -> Any:
    """A checkpoint is made, and gone back through, in the backward of a Function."""
    x = leaf(3)

    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin().exp()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = c(lambda x: x.sin().exp(), x)
                y.backward(grad)
            return x.grad

    Outer.apply(x).sum().backward()
    return x.grad


@case()
def saved_tensors_read_twice(c: Checkpoint) -> Any:
    """A backward that reads its saved tensors twice."""
    x = leaf(3)

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return (ctx.saved_tensors[0] + ctx.saved_tensors[0]) * grad

    c(lambda x: Twice.apply(x.sin()), x).sum().backward()
    return x.grad


@case()
def a_saved_tensor_is_looked_at(c: Checkpoint) -> Any:
    """A saved tensor is looked at before the backward."""
    x = leaf(3)
    y = c(lambda x: x.sin().exp(), x)
    seen = y.grad_fn._saved_result
    y.sum().backward()
    return seen, x.grad


@case(memory=False)
def is_grads_batched(c: Checkpoint) -> Any:
    x = leaf(3)
    y = c(lambda x: x.sin().exp(), x)
    return torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)
