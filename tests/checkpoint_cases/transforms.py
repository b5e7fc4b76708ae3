"""Transforms of torch.func, around a checkpoint and within it, and forward-mode derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from tests.checkpoint_cases.functions import SetUp, chain
from tests.checkpoint_cases.harness import Case, Cases, Checkpoint, leaf

CASES = Cases()
case = CASES.case


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "vmap of vmap": lambda f, x: torch.func.vmap(torch.func.vmap(f))(x),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.exp(),)),
    "linearize": lambda f, x: torch.func.linearize(f, x)[1](x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
    "autograd.functional.hessian": lambda f, x: torch.autograd.functional.hessian(
        lambda x: f(x).sum(), x, vectorize=True
    ),
    "autograd.functional.jvp": lambda f, x: torch.autograd.functional.jvp(f, x, x),
    "autograd.functional.vhp": lambda f, x: torch.autograd.functional.vhp(
        lambda x: f(x).sum(), x, x
    ),
}


def _transformed(transform: Any, module: bool) -> Callable[[Checkpoint], Any]:
    def run(c: Checkpoint) -> Any:
        fn = nn.Sequential(nn.Tanh(), nn.Linear(4, 4)) if module else chain
        return transform(lambda x: c(fn, x), torch.randn(3, 4))

    return run


CASES += [
    Case(f"{name}{' of a module' if m else ''}", _transformed(transform, m), memory=False)
    for name, transform in TRANSFORMS.items()
    for m in (False, True)
    if not (m and name == "vmap of vmap")
]


@case(memory=False)
def backward_through_vmap(c: Checkpoint) -> Any:
    x = leaf(3, 4)
    torch.func.vmap(lambda x: c(chain, x))(x).sum().backward()
    return x.grad


@case(memory=False)
def vmap_within(c: Checkpoint) -> Any:
    """vmap within the function."""
    x = leaf(3, 4)
    c(lambda x: torch.func.vmap(chain)(x).exp(), x).sum().backward()
    return x.grad


@case(memory=False)
def a_vmap_rule_within(c: Checkpoint) -> Any:
    """vmap of a custom Function within the function."""
    x = leaf(3, 4)
    c(lambda x: torch.func.vmap(SetUp.apply)(x).exp(), x).sum().backward()
    return x.grad


@case(memory=False)
def grad_within(c: Checkpoint) -> Any:
    """torch.func.grad within the function."""
    x = leaf(3)
    fn = lambda x: torch.func.grad(lambda y: y.sin().sum())(x).exp()  # noqa: E731
    c(fn, x).sum().backward()
    return x.grad


@case(memory=False)
def forward_mode(c: Checkpoint) -> Any:
    x = torch.randn(3)
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(c(chain, forward_ad.make_dual(x, x.exp()))))


@case(memory=False)
def forward_over_reverse(c: Checkpoint) -> Any:
    x = leaf(3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x.detach().exp())
        (grad,) = torch.autograd.grad(c(chain, dual).sum(), dual, create_graph=True)
        return tuple(forward_ad.unpack_dual(grad))


@case(memory=False)
def reverse_after_forward_mode(c: Checkpoint) -> Any:
    x = leaf(3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x.detach().exp())
        value, tangent = forward_ad.unpack_dual(c(chain, dual))
    (value.sum() + tangent.sum()).backward()
    return x.grad
