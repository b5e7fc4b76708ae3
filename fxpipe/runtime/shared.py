"""Parameters as values, and modules that are run with such values in place of their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir._torch import FLAT_WEIGHTS


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def share(parameter: Tensor) -> Tensor:
    """The parameter, as a value at which the gradients of all uses meet.

    A plain view could not: PyTorch's does not take sparse gradients, those of embeddings.
    """
    value: Tensor = _Share.apply(parameter)  # type: ignore[no-untyped-call]
    return value


def call(module: nn.Module, values: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    """``module(*args, **kwargs)`` with these values for the parameters of those names.

    Unlike ``torch.func.functional_call`` it leaves the module alone, which another lane may be
    running at the same time, and it also reaches the weights of recurrent modules.
    """
    replica = _replica(module)
    replicas: dict[str, nn.Module] = {"": replica}
    for path, value in values.items():
        *parents, name = path.split(".")
        owner, prefix = replica, ""
        for parent in parents:
            prefix += f"{parent}."
            if prefix not in replicas:
                replicas[prefix] = _replica(owner._modules[parent])
                owner._modules[parent] = replicas[prefix]
            owner = replicas[prefix]
        parameters = owner._parameters
        owner._parameters = {}
        setattr(owner, name, value)  # recurrent modules take note of it
        delattr(owner, name)
        owner._parameters = {**parameters, name: value}  # type: ignore[dict-item]
    return replica(*args, **kwargs)


def _replica(module: nn.Module | None) -> nn.Module:
    """A module of the same parts. Buffers stay common: what one stores, the other sees."""
    assert module is not None
    replica: nn.Module = object.__new__(type(module))  # a graph module's own would make a class
    replica.__dict__.update(module.__dict__)
    for part in ("_parameters", "_modules", FLAT_WEIGHTS):  # the last one: recurrent modules
        if part in replica.__dict__:
            replica.__dict__[part] = replica.__dict__[part].copy()
    return replica
