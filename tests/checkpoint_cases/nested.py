"""Checkpoints within checkpoints, in a row, and within PyTorch's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as pytorch
from torch import Tensor, nn

from tests.checkpoint_cases.harness import Case, Cases, Checkpoint, leaf

CASES = Cases()
case = CASES.case


def _depth(depth: int, saves: bool) -> Callable[[Checkpoint], Any]:
    def run(c: Checkpoint) -> Any:
        def nested(level: int) -> Callable[[Tensor], Tensor]:
            def fn(x: Tensor) -> Tensor:
                x = x.sin() if saves else x * 1
                y = x.exp() if level == 1 else c(nested(level - 1), x)
                return y.cos() if saves else y * 2

            return fn

        x = leaf(5)
        y = c(nested(depth), x)
        y.sum().backward()
        return y, x.grad

    return run


def _siblings(count: int, way: str) -> Callable[[Checkpoint], Any]:
    def run(c: Checkpoint) -> Any:
        model = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

        def block(i: int) -> Callable[[Tensor], Tensor]:
            return lambda x: x + model[i](x).tanh().exp()

        def all_of_them(x: Tensor) -> Tensor:
            for i in range(count):
                x = c(block(i), x)
            return x

        x = leaf(3, 4)
        y = c(all_of_them, x) if way == "within one" else all_of_them(x)
        y.sum().backward()
        return y, x.grad, [p.grad for p in model.parameters()]

    return run


CASES += [
    Case(f"depth {d}, {'saving' if s else 'not saving'}", _depth(d, s))
    for d in range(1, 7)
    for s in (True, False)
]
CASES += [
    Case(f"{n} siblings {way}", _siblings(n, way), memory=way == "within one")
    for n in range(1, 13)
    for way in ("in a row", "within one")
]


@case()
def a_tree(c: Checkpoint) -> Any:
    """A tree of checkpoints, three deep, two wide."""

    def node(level: int) -> Callable[[Tensor], Tensor]:
        def fn(x: Tensor) -> Tensor:
            if level == 0:
                return x.sin().exp()
            return c(node(level - 1), x) * c(node(level - 1), x.cos())

        return fn

    x = leaf(4)
    c(node(3), x).sum().backward()
    return x.grad


@case()
def nested_writes_to_its_input(c: Checkpoint) -> Any:
    """Nested, the inner one writes to its input."""
    x = leaf(4)
    y = c(lambda x: c(lambda h: h.mul_(3) * 2, x * 1), x)
    y.sum().backward()
    return y, x.grad


@case()
def nested_writes_to_its_input_and_more_follows(c: Checkpoint) -> Any:
    """Nested, the inner one writes to its input, and more is saved after it."""
    x = leaf(4)
    y = c(lambda x: c(lambda h: (h.mul_(3) * 2).sin(), x * 1).sin().exp(), x)
    y.sum().backward()
    return y, x.grad


@case()
def written_to_after_a_nested_one(c: Checkpoint) -> Any:
    """The outer one writes to the input of the inner one, after it."""

    def outer(x: Tensor) -> Tensor:
        h = x * 1
        y = c(lambda h: h.exp().sin(), h)
        h.add_(1)
        return y.cos() + h

    x = leaf(4)
    c(outer, x).sum().backward()
    return x.grad


@case()
def a_nested_call_of_a_closure(c: Checkpoint) -> Any:
    """Nested, the inner one has no arguments."""

    def outer(x: Tensor) -> Tensor:
        y = x.sin().exp()
        return y + c(lambda: torch.ones(4))

    x = leaf(4)
    c(outer, x).sum().backward()
    return x.grad


@case()
def one_within_pytorchs(c: Checkpoint) -> Any:
    """Within PyTorch's own checkpoint."""
    x = leaf(4)
    outer = functools.partial(pytorch.checkpoint, use_reentrant=False)
    outer(lambda x: c(lambda x: x.sin().exp(), x.cos()).sin(), x).sum().backward()
    return x.grad


@case()
def pytorchs_within_one(c: Checkpoint) -> Any:
    """Around PyTorch's own checkpoint."""
    x = leaf(4)
    inner = functools.partial(pytorch.checkpoint, use_reentrant=False)
    c(lambda x: inner(lambda x: x.sin().exp(), x.cos()).sin(), x).sum().backward()
    return x.grad


@case()
def within_a_reentrant_one(c: Checkpoint) -> Any:
    """Within PyTorch's reentrant checkpoint."""
    x = leaf(4)
    y = pytorch.checkpoint(lambda x: c(lambda x: x.sin().exp(), x), x, use_reentrant=True)
    y.sum().backward()
    return x.grad
