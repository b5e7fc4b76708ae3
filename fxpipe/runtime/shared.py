"""Parameters as values, and modules that are run with such values in place of their parameters."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir._torch import FLAT_WEIGHTS, lean


@lean
class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@lean
class _LentViews(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, count: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(parameter.view_as(parameter) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        given = sorted((g for g in grads if g is not None), key=lambda g: g.is_sparse)
        return functools.reduce(operator.add, given) if given else None, None


def lend(parameter: Tensor, count: int) -> tuple[Tensor, ...]:
    """Views of a parameter, whose gradients are added up in the order of the views, whichever of
    them comes first; sparse ones at the end, since PyTorch adds them to dense ones only."""
    views: tuple[Tensor, ...] = _LentViews.apply(parameter, count)  # type: ignore[no-untyped-call]
    return views


def share(parameter: Tensor) -> Tensor:
    """A view of a parameter to be used in its place, at which the gradients of all uses are summed.

    The view has an autograd node of its own, since the backward of PyTorch's ``view_as`` takes no
    sparse gradients, which embeddings may have.
    """
    value: Tensor = _Share.apply(parameter)  # type: ignore[no-untyped-call]
    return value


def call(module: nn.Module, values: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    """Call ``module(*args, **kwargs)`` with values in place of parameters.

    ``values`` are by the parameters' paths in the module. Unlike ``torch.func.functional_call``
    this does not change the module meanwhile, since another lane may be running it at the same
    time, and it also replaces the weights of recurrent modules.
    """
    return replica(module, values)[0](*args, **kwargs)


def replica(
    module: nn.Module, values: Mapping[str, Tensor]
) -> tuple[nn.Module, list[tuple[nn.Module, str, Tensor]]]:
    """A copy of a module that has values in place of some parameters and buffers, and shares all
    others.

    Also returns, for each value: the (sub)module of the copy that has it, its name there, and the
    value.
    """
    made = _replica(module)
    replicas: dict[str, nn.Module] = {"": made}
    places = []
    for path, value in values.items():
        *parents, name = path.split(".")
        owner, prefix = made, ""
        for parent in parents:
            prefix += f"{parent}."
            if prefix not in replicas:
                replicas[prefix] = _replica(owner._modules[parent])
                owner._modules[parent] = replicas[prefix]
            owner = replicas[prefix]
        places.append((owner, name, value))
        if name in owner._buffers:
            owner._buffers = {**owner._buffers, name: value}
            continue
        parameters = owner._parameters
        owner._parameters = {}
        setattr(owner, name, value)  # a recurrent module puts it in its list of weights, too
        delattr(owner, name)
        owner._parameters = {**parameters, name: value}  # type: ignore[dict-item]
    return made, places


@contextmanager
def assigned_to_both(module: nn.Module, replica: nn.Module) -> Iterator[None]:
    """At the end of the ``with`` block a module has the attributes that have been assigned to a
    replica of it within the block, as a module does to itself that counts its calls."""
    if replica is module:
        yield
        return
    twins = [(replica.get_submodule(path), part) for path, part in module.named_modules()]
    pairs = [(twin, part, dict(vars(twin))) for twin, part in twins if twin is not part]
    try:
        yield
    finally:
        for twin, part, before in pairs:
            now = vars(twin)
            for name in before.keys() - now.keys():
                vars(part).pop(name, None)
            for name, value in now.items():
                if name not in before or before[name] is not value:
                    vars(part)[name] = value


def _replica(module: nn.Module | None) -> nn.Module:
    """A module with the same parameters, buffers and submodules, some of which can be replaced.

    It shares the dict of buffers with the original, so that a buffer which it assigns is assigned
    in the original, too.
    """
    assert module is not None
    replica: nn.Module = object.__new__(type(module))  # GraphModule's __new__ would make a class
    replica.__dict__.update(module.__dict__)
    for part in ("_parameters", "_modules", FLAT_WEIGHTS):  # the last: of recurrent modules
        if part in replica.__dict__:
            replica.__dict__[part] = replica.__dict__[part].copy()
    return replica
