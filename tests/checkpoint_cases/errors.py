"""Functions that raise, and functions whose second run does something else than the first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.checkpoint_cases.harness import Case, Cases, Checkpoint, leaf

CASES = Cases()
case = CASES.case


@case()
def an_exception_in_the_forward(c: Checkpoint) -> Any:
    def fn(x: Tensor) -> Tensor:
        x.sin().exp()
        raise KeyError("no such thing")

    return c(fn, leaf(3))


def _second(second: Callable[[Tensor], Tensor], **options: Any) -> Callable[[Checkpoint], Any]:
    def run(c: Checkpoint) -> Any:
        runs, x = [], leaf(3)

        def fn(x: Tensor) -> Tensor:
            runs.append(1)
            return torch.exp(torch.sin(x)) if len(runs) == 1 else second(x)

        c(fn, x, **options).sum().backward()
        return x.grad

    return run


def _raise(x: Tensor) -> Tensor:
    raise LookupError("the second time")


SECONDS: dict[str, Callable[[Tensor], Tensor]] = {
    "saves less": lambda x: torch.sin(x),
    "saves nothing": lambda x: x * 1,
    "has another shape": lambda x: torch.exp(torch.sin(x[:1])),
    "has another dtype": lambda x: torch.exp(torch.sin(x.double())),
    "is on another device": lambda x: torch.exp(torch.sin(x.to("meta"))),
    "raises": _raise,
}
CASES += [Case(f"the second run {k}", _second(f), differs=True) for k, f in SECONDS.items()]
CASES += [
    Case(f"the second run {k}, {name}", _second(f, **options), differs=True, memory=False)
    for k, f in SECONDS.items()
    for name, options in (
        ("no early stop", {"early_stop": False}),
        ("determinism_check none", {"determinism_check": "none"}),
    )
    if not (k == "is on another device" and name == "determinism_check none")
]


@case(differs=True, memory=False)
def the_second_run_saves_more(c: Checkpoint) -> Any:
    return _second(lambda x: x.sin().exp().cos(), early_stop=False)(c)


@case(differs=True, memory=False)
def an_unknown_determinism_check(c: Checkpoint) -> Any:
    return c(lambda x: x.sin(), leaf(3), determinism_check="strict")


@case()
def again_after_an_exception_in_the_backward(c: Checkpoint) -> Any:
    x, fail = leaf(3), [True]

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            if fail.pop():
                raise ArithmeticError("this time")
            return grad

    y = c(lambda x: Fails.apply(x.sin()).exp(), x)
    with contextlib.suppress(ArithmeticError):
        y.sum().backward(retain_graph=True)
    fail.append(False)
    y.sum().backward()
    return x.grad


@case()
def a_function_that_catches_exceptions(c: Checkpoint) -> Any:
    """The function catches all exceptions, also that which stops its second run."""
    x = leaf(3)

    def fn(x: Tensor) -> Tensor:
        try:
            return x.sin().exp().cos()
        except Exception:
            return x

    c(fn, x).sum().backward()
    return x.grad
