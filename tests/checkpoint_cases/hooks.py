"""Hooks on saved tensors, on tensors, on modules, and after gradients are accumulated."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.checkpoint_cases.harness import Case, Cases, Checkpoint, leaf

CASES = Cases()
case = CASES.case


def _hooks(pack: Any, unpack: Any, inside: bool) -> Callable[[Checkpoint], Any]:
    def run(c: Checkpoint) -> Any:
        hooks = functools.partial(torch.autograd.graph.saved_tensors_hooks, pack, unpack)
        model, x = nn.Linear(4, 4), leaf(3, 4)

        def fn(x: Tensor) -> Tensor:
            with hooks() if inside else contextlib.nullcontext():
                return model(x.sin()).exp()

        with contextlib.nullcontext() if inside else hooks():
            y = c(fn, x)
        y.sum().backward()
        return y, x.grad, model.weight.grad

    return run


STORE: list[Tensor] = []
PACKED: dict[str, tuple[Any, Any]] = {
    "a list": (lambda t: [t], lambda packed: packed[0]),
    "a copy": (lambda t: t.clone(), lambda packed: packed),
    "a number": (lambda t: STORE.append(t) or len(STORE) - 1, lambda number: STORE[number]),
    "double": (lambda t: t.double(), lambda packed: packed.float()),
}
CASES += [
    Case(f"saved tensors packed to {name}, {'inside' if i else 'outside'}", _hooks(*pair, i))
    for name, pair in PACKED.items()
    for i in (False, True)
]


@case()
def packed_to_bfloat16(c: Checkpoint) -> Any:
    """Saved tensors packed to bfloat16 outside: the forward."""
    x = leaf(50)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
        y = c(lambda x: x.sin().exp(), x)
    return y


@case()
def packed_to_bfloat16_nested(c: Checkpoint) -> Any:
    """Saved tensors packed to bfloat16 outside, nested: the forward."""
    x = leaf(50)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
        y = c(lambda x: c(lambda x: x.sin().exp(), x.cos()).sin(), x)
    return y


@case()
def saved_tensors_hooks_are_disabled(c: Checkpoint) -> Any:
    x = leaf(3)
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        return c(lambda x: x.sin().exp(), x)


@case()
def a_hook_on_the_input(c: Checkpoint) -> Any:
    seen, x = [], leaf(3)
    x.register_hook(lambda g: seen.append(1) or g * 2)
    c(lambda x: x.sin().exp(), x).sum().backward()
    return x.grad, seen


@case()
def a_hook_on_a_tensor_within(c: Checkpoint) -> Any:
    seen, x = [], leaf(3)

    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(lambda g: seen.append(1) or g * 2)
        return y.exp()

    c(fn, x).sum().backward()
    return x.grad, seen


@case()
def a_hook_that_the_function_registers_on_its_input(c: Checkpoint) -> Any:
    """The function registers a hook on its input."""
    seen, x = [], leaf(3)

    def fn(h: Tensor) -> Tensor:
        h.register_hook(lambda g: seen.append(1) or g * 2)
        return h.sin().exp()

    c(fn, x * 1).sum().backward()
    return x.grad, seen


@case()
def a_hook_after_accumulation(c: Checkpoint) -> Any:
    seen, linear = [], nn.Linear(3, 3)
    linear.weight.register_post_accumulate_grad_hook(lambda p: seen.append(1))
    c(lambda x: linear(x).sin(), leaf(2, 3)).sum().backward()
    return linear.weight.grad, seen


@case()
def an_optimizer_within_the_backward(c: Checkpoint) -> Any:
    """A hook steps each parameter as soon as its gradient is there."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), leaf(2, 3)

    def step(p: Tensor) -> None:
        with torch.no_grad():
            p.sub_(p.grad)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    c(model[:2], x).sin().sum().backward()
    return x.grad, list(model.parameters())


@case()
def a_forward_hook_of_a_module(c: Checkpoint) -> Any:
    linear, x = nn.Linear(3, 3), leaf(2, 3)
    linear.register_forward_hook(lambda m, args, out: out * 2)
    c(linear, x).sin().sum().backward()
    return x.grad, linear.weight.grad


@case()
def a_backward_hook_of_a_module(c: Checkpoint) -> Any:
    seen, linear, x = [], nn.Linear(3, 3), leaf(2, 3)
    linear.register_full_backward_hook(lambda m, gi, go: seen.append(1))
    c(nn.Sequential(linear, nn.Tanh()), x).sum().backward()
    return x.grad, seen


@case()
def retain_grad_within(c: Checkpoint) -> Any:
    kept, x = [], leaf(3)

    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        y.retain_grad()
        kept.append(y)
        return y.exp()

    c(fn, x).sum().backward()
    return x.grad, kept[0].grad


@case()
def a_multi_grad_hook(c: Checkpoint) -> Any:
    seen, a, b = [], leaf(3), leaf(3)
    torch.autograd.graph.register_multi_grad_hook([a, b], lambda grads: seen.append(len(grads)))
    c(lambda a, b: a.sin() * b.exp(), a, b).sum().backward()
    return a.grad, b.grad, seen
