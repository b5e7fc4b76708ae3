"""Functions that have a state: batch norm, shared parameters, counters, caches."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn

from tests.checkpoint_cases.harness import Cases, Checkpoint, leaf

CASES = Cases()
case = CASES.case


@case()
def batch_norm_in_evaluation(c: Checkpoint) -> Any:
    model, x = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)).eval(), leaf(5, 3)
    c(model, x).sin().sum().backward()
    return x.grad, list(model.buffers())


@case()
def batch_norm_in_training(c: Checkpoint) -> Any:
    """Batch norm in training: its statistics, too."""
    model, x = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)), leaf(5, 3)
    c(model, x).sin().sum().backward()
    return x.grad, list(model.buffers())


@case()
def shared_parameters(c: Checkpoint) -> Any:
    linear, x = nn.Linear(3, 3), leaf(2, 3)
    c(nn.Sequential(linear, nn.Tanh(), linear), x).sum().backward()
    return x.grad, linear.weight.grad


@case()
def parameters_of_a_closure(c: Checkpoint) -> Any:
    w, x = leaf(3, 3), leaf(2, 3)
    c(lambda x: (x @ w).sin() @ w.t(), x).sum().backward()
    return x.grad, w.grad


@case()
def a_bound_method(c: Checkpoint) -> Any:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), leaf(2, 3)
    c(model.forward, x).sum().backward()
    return x.grad, model[0].weight.grad


@case()
def a_partial(c: Checkpoint) -> Any:
    model, x = nn.Linear(3, 3), leaf(2, 3)
    c(functools.partial(lambda m, x: m(x).sin().exp(), model), x).sum().backward()
    return x.grad, model.weight.grad


@case()
def functional_call(c: Checkpoint) -> Any:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), leaf(2, 3)
    lent = {name: torch.randn_like(p).requires_grad_() for name, p in model.named_parameters()}
    call = lambda x: torch.func.functional_call(model, lent, (x,))  # noqa: E731
    c(call, x).sum().backward()
    return x.grad, [p.grad for p in lent.values()]


@case(memory=False)
def lent_parameters(c: Checkpoint) -> Any:
    """functional_call of a module that checkpoints a part of it."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return c(self.inner, x)

    model, x = Around(), leaf(2, 3)
    lent = {name: torch.randn_like(p).requires_grad_() for name, p in model.named_parameters()}
    torch.func.functional_call(model, lent, (x,)).sum().backward()
    return x.grad, [p.grad for p in lent.values()]


@case()
def lazy_modules(c: Checkpoint) -> Any:
    model = nn.Sequential(nn.LazyLinear(3), nn.Tanh(), nn.LazyLinear(2))
    x = leaf(4, 5)
    c(model, x).sum().backward()
    return x.grad, [p.grad for p in model.parameters()]


@case(memory=False)
def a_copy_of_the_model(c: Checkpoint) -> Any:
    """A deep copy of a model that has been checkpointed."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval(), leaf(4, 3)
    c(model, x).sum().backward()
    twin = copy.deepcopy(model)
    c(twin, x).sum().backward()
    return x.grad, [p.grad for p in twin.parameters()]


@case()
def a_counter_of_calls(c: Checkpoint) -> Any:
    """The function counts its calls and does not compute with that."""
    count, x = [0], leaf(3)

    def fn(x: Tensor) -> Tensor:
        count[0] += 1
        return x.sin().exp()

    c(fn, x).sum().backward()
    return x.grad


@case()
def a_cache_that_the_second_run_finds(c: Checkpoint) -> Any:
    """The function keeps a constant at its first call."""
    kept, x = {}, leaf(3)

    def fn(x: Tensor) -> Tensor:
        if "table" not in kept:
            kept["table"] = torch.arange(3.0)
        return (x * kept["table"]).sin().exp()

    c(fn, x).sum().backward()
    return x.grad


@case(differs=True)
def a_parameter_is_changed_before_the_backward(c: Checkpoint) -> Any:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), leaf(2, 3)
    y = c(model, x)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    y.sum().backward()
    return x.grad


@case()
def an_input_is_changed_before_the_backward(c: Checkpoint) -> Any:
    x = leaf(3)
    h = x * 1
    y = c(lambda h: h.sin().exp(), h)
    h.add_(1)
    y.sum().backward()
    return x.grad


@case()
def a_saved_tensor_is_written_to(c: Checkpoint) -> Any:
    """The function writes to a tensor that is saved."""

    def fn(x: Tensor) -> Tensor:
        y = x * 1
        z = y.sin()
        y.add_(1)
        return z.exp()

    x = leaf(3)
    c(fn, x, early_stop=False).sum().backward()
    return x.grad
