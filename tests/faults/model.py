"""A small model with all that a failing step could leave in disorder: dropout, running statistics,
a skip over a stage, an output that is used again, one that comes twice, an input that is written
to, a parameter of two stages, hooks, and a function with a backward of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from tests.fxpipe.trace.small import in_a_run

watch: list[Callable[[str], None]] = []
"""The function that is called, by the name of the place, where the model's own code runs."""


def at(place: str) -> None:
    """Tell the watching function that the model's code has come to a place."""
    for each in watch:
        each(place)


class Own(torch.autograd.Function):
    """The identity, with a forward and a backward of a user's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        at("function, forward")
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        at("function, backward")
        return grad


def own(x: Tensor) -> Tensor:
    """:class:`Own`, with a hook on the tensor that it gives."""
    if type(x) is not Tensor:
        return x  # traced with fake tensors
    y = Own.apply(x)
    if y.requires_grad:
        y.register_hook(lambda grad: at("hook of a tensor"))
    return y


fx.wrap("own")


class Net(nn.Module):
    """Four layers, for three stages that begin at "b" and "c".

    ``writes``: whether it writes to its input, which ranks refuse.
    """

    def __init__(self, writes: bool = True) -> None:
        super().__init__()
        self.writes = writes
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.bn, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.d.weight = self.a.weight
        self.c.register_forward_hook(_forward_hook)
        self.c.bias.register_post_accumulate_grad_hook(_gradient_hook)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.a(x.mul_(0.5) if self.writes else x * 0.5)
        y = own(self.drop(self.bn(self.b(torch.tanh(h)))))
        z = self.d(torch.tanh(self.c(y)) + h)
        return z, y, z


def _forward_hook(module: nn.Module, args: Any, output: Any) -> None:
    if in_a_run(output):
        at("hook of a module")


def _gradient_hook(parameter: Tensor) -> None:
    at("hook of a gradient")


def loss_fn(outputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
    """The mean of squares of all outputs."""
    at("loss of the user's")
    return sum((output - target).square().mean() for output in outputs)


def loss_weight(target: Tensor) -> int:
    """The number of values."""
    at("weight of the user's")
    return target.numel()
