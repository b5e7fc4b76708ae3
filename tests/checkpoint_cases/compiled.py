"""Checkpoints that are compiled or exported, run on fake tensors, or given compiled functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as pytorch
from torch import Tensor, nn

import fxpipe
from tests.checkpoint_cases.contexts import SAVE_MM
from tests.checkpoint_cases.harness import Case, Cases, Checkpoint, leaf

CASES = Cases()
case = CASES.case


def _compiled(fn: Any, **options: Any) -> Callable[[Checkpoint], Any]:
    def run(c: Checkpoint) -> Any:
        torch._dynamo.reset()
        model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), leaf(2, 3)
        checkpoint: Any = {
            "plain": lambda fn, x, **_: fn(x),
            "torch": functools.partial(pytorch.checkpoint, use_reentrant=False),
            "ours": fxpipe.checkpoint,
        }[c.kind]
        whole = torch.compile(
            lambda x: fn(functools.partial(checkpoint, **options), model, x),
            fullgraph=True,
            backend="aot_eager",
        )
        y = whole(x)
        y.sum().backward()
        return y, x.grad, model[0].weight.grad

    return run


CASES += [
    Case("torch.compile(fullgraph=True)", _compiled(lambda c, m, x: c(m, x.sin()).cos()), False),
    Case("torch.compile, nested", _compiled(lambda c, m, x: c(lambda x: m(m(x)), x).cos()), False),
    Case(
        "torch.compile, selective",
        _compiled(lambda c, m, x: c(m, x.sin()).cos(), context_fn=SAVE_MM),
        False,
    ),
]


@case(memory=False)
def a_compiled_function_within(c: Checkpoint) -> Any:
    """A compiled module is checkpointed."""
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), leaf(2, 3)
    c(torch.compile(model, backend="aot_eager"), x).exp().sum().backward()
    return x.grad, model[0].weight.grad


@case(memory=False)
def exported(c: Checkpoint) -> Any:
    """torch.export of a module that checkpoints a part of it."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return c.made(self.inner, (x,), {}).exp()

    x = torch.randn(2, 3)
    program = torch.export.export(Around(), (x,))
    return program.module()(x), sorted(str(node.target) for node in program.graph.nodes)


@case(memory=False)
def fake_tensors(c: Checkpoint) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        linear, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
        c(linear, x).sin().sum().backward()
        return tuple(x.grad.shape), tuple(linear.weight.grad.shape)
