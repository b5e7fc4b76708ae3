"""Grad mode, autocast, default device and function modes that change between the two runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.checkpoint_cases.harness import Case, Cases, Checkpoint, leaf

CASES = Cases()
case = CASES.case


@case()
def no_grad(c: Checkpoint) -> Any:
    x = leaf(3)
    with torch.no_grad():
        y = c(lambda x: x.sin().exp(), x)
    return y, y.requires_grad


@case()
def inference_mode(c: Checkpoint) -> Any:
    x = leaf(3)
    with torch.inference_mode():
        y = c(lambda x: x.sin().exp(), x)
    return y.is_inference()


@case()
def enable_grad_within_no_grad(c: Checkpoint) -> Any:
    """Gradients are enabled within the function only."""
    x = leaf(3)

    def fn(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x.sin().exp()

    with torch.no_grad():
        y = c(fn, x)
    y.sum().backward()
    return x.grad


@case()
def autocast_of_the_backward_does_not_count(c: Checkpoint) -> Any:
    """Autocast in the backward only."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), leaf(2, 3)
    y = c(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        loss = y.sum()
        y.backward(torch.ones_like(y))
    return x.grad, loss


@case()
def autocast_within(c: Checkpoint) -> Any:
    model, x = nn.Linear(3, 3), leaf(2, 3)

    def fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x).sin()
        return y.float().exp()

    c(fn, x).sum().backward()
    return x.grad, model.weight.grad


def _autocast_cache(enabled: bool) -> Callable[[Checkpoint], Any]:
    def run(c: Checkpoint) -> Any:
        model, x = nn.Linear(3, 3), leaf(2, 3)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=enabled):
            y = c(lambda x: model(model(x).sin()), x) + model(x)
        y.float().sum().backward()
        return x.grad, model.weight.grad

    return run


CASES += [Case(f"autocast, cache {on}", _autocast_cache(on)) for on in (True, False)]


@case()
def default_device_of_the_forward(c: Checkpoint) -> Any:
    """The default device of the forward."""
    x = leaf(3)
    with torch.device("cpu"):
        y = c(lambda x: (x * torch.ones(3)).sin().exp(), x)
    with torch.device("meta"):
        torch.autograd.backward(y, torch.ones(3, device="cpu"))
    return x.grad


@case()
def a_function_mode(c: Checkpoint) -> Any:
    """A torch function mode in the forward only."""

    class Cosine(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return (torch.cos if func is torch.sin else func)(*args, **(kwargs or {}))

    x = leaf(3)
    with Cosine():
        y = c(lambda x: torch.sin(x).exp(), x)
    y.sum().backward()
    return x.grad


class Cosines(Tensor):
    """Its sine is the cosine."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.cos if func is torch.sin else func
        return super().__torch_function__(func, types, args, kwargs)


@case()
def a_subclass_whose_backward_is_called(c: Checkpoint) -> Any:
    """A subclass with a __torch_function__; backward of the subclass."""
    x = leaf(3)
    c(lambda x: torch.sin(x).exp(), x.as_subclass(Cosines)).sum().backward()
    return x.grad


@case()
def a_subclass_and_a_plain_backward(c: Checkpoint) -> Any:
    """A subclass with a __torch_function__; backward of a plain tensor."""
    x = leaf(3)
    y = c(lambda x: torch.sin(x).exp(), x.as_subclass(Cosines))
    y.as_subclass(Tensor).sum().backward()
    return x.grad


@case(memory=False)
def a_wrapper_subclass(c: Checkpoint) -> Any:
    """A subclass with a __torch_dispatch__."""
    from torch.testing._internal.two_tensor import TwoTensor

    x = leaf(3)
    y = c(lambda t: t.sin().exp(), TwoTensor(x, x * 2))
    y.sum().backward()
    return x.grad


@case(memory=False)
def a_wrapper_subclass_as_parameter(c: Checkpoint) -> Any:
    from torch.testing._internal.two_tensor import TwoTensor

    linear, x = nn.Linear(3, 3), leaf(2, 3)
    linear.weight = nn.Parameter(TwoTensor(torch.ones(3, 3), torch.ones(3, 3) * 2))
    nn.init.ones_(linear.bias)
    c(linear, x).sin().sum().backward()
    return x.grad


@case()
def a_dispatch_mode(c: Checkpoint) -> Any:
    """A dispatch mode around forward and backward, which counts operators."""
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = leaf(3)
    with Seen():
        c(lambda x: x.sin().exp(), x).sum().backward()
    return x.grad, torch.ops.aten.sin.default in seen
