"""How much an optimizer keeps for each parameter, and what its step takes while it runs, found by
letting it take a step.

No table of optimizers has to be right: one of the same kind steps small parameters, and the bytes
of its state, and of what it makes, reads and writes meanwhile, are counted. So optimizers that are
not PyTorch's are counted as well.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from fxpipe.ir.load import Counting, Load
from fxpipe.ir.text import kind as in_words
from passes.cost.analytic import ADAMS_UPDATE
from passes.cost.update import Update

SIDE = 64  # of the square parameters that are stepped
MANY = 16  # parameters, of which an optimizer that steps one at a time needs little meanwhile
_IN_ONE_WAY = {"foreach": False, "fused": False, "capturable": False}  # as any device can


def optimizer_states(given: str | float | Optimizer | None, usual: float) -> float:
    """How many bytes an optimizer keeps for each byte of a parameter: 2 for Adam.

    Args:
        given: the name of a class of ``torch.optim``, in any case; an optimizer, whose settings
            decide (SGD keeps nothing without momentum); or that number itself. None: ``usual``.

    Raises:
        ValueError: for a name that is no optimizer's, or a number below zero.
        TypeError: for anything else, and for an optimizer that cannot be made or stepped for a
            parameter alone.
    """
    if given is None:
        return usual
    if isinstance(given, int | float) and not isinstance(given, bool):
        if not 0 <= given < float("inf"):
            raise ValueError(f"optimizer is {given!r}: give how many tensors it keeps, 0 or more")
        return float(given)
    if isinstance(given, str):
        return _counted(_named(given), {})
    if isinstance(given, Optimizer):
        kind = type(given)
        return max(_counted(kind, _settings(kind, group)) for group in given.param_groups)
    raise TypeError(
        f"optimizer is {in_words(given)}: give the name of a class of torch.optim, such as "
        '"adamw", an optimizer, or how many tensors it keeps for each parameter'
    )


def optimizer_update(given: str | float | Optimizer | None) -> Update:
    """What the step of an optimizer takes while it runs. An Adam, which on accelerators steps all
    parameters of a device at once, needs as much memory as these for the roots of their second
    moments.

    Args:
        given: as for :func:`optimizer_states`. For None an Adam is taken whose time is not counted.
            Of an optimizer that is given as a number, nobody knows what its step takes: if it keeps
            something, it is taken to be like that.
    """
    if given is None:
        return ADAMS_UPDATE
    if isinstance(given, int | float):
        return replace(ADAMS_UPDATE, memory=min(ADAMS_UPDATE.memory, given))
    if isinstance(given, str):
        return _taken(_named(given), {})
    kind = type(given)
    found = [_taken(kind, _settings(kind, group)) for group in given.param_groups]
    is_at_once = all(each.is_at_once for each in found)
    launches = [each.operators for each in found]
    return Update(
        max(each.memory for each in found),
        max(each.bytes for each in found),
        sum(launches) if is_at_once else max(launches),
        is_at_once,
    )


def _taken(kind: type[Optimizer], settings: dict[str, Any]) -> Update:
    """What the step of an optimizer of this kind takes if it steps its parameters as it does on
    accelerators: all at once, or, if it is fused, each in one kernel."""
    is_fused, is_one_by_one = bool(settings.get("fused")), settings.get("foreach") is False
    ways = _IN_ONE_WAY | {"foreach": not (is_fused or is_one_by_one), "fused": is_fused}
    optimizer, parameters = _stepped(kind, settings | ways, MANY)
    with Counting(found := Load()):
        optimizer.step(lambda: 0.0)
    size = sum(parameter.nbytes for parameter in parameters)
    is_at_once = is_fused or not is_one_by_one
    each = found.operators if is_at_once else found.operators // MANY
    return Update(found.memory / size, found.bytes / size, each, is_at_once)


def _named(name: str) -> type[Optimizer]:
    kinds = {
        key.lower(): kind
        for key, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    if name.lower() not in kinds:
        raise ValueError(
            f"optimizer is {name!r}: give one of {', '.join(map(repr, sorted(kinds)))}, an "
            "optimizer, or how many tensors it keeps for each parameter"
        )
    return kinds[name.lower()]


def _settings(kind: type[Optimizer], group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a group of parameters that the class of its optimizer takes."""
    taken = inspect.signature(kind).parameters
    return {key: value for key, value in group.items() if key in taken and key != "params"}


def _counted(kind: type[Optimizer], settings: dict[str, Any]) -> float:
    """The bytes that an optimizer of this kind keeps for each byte of a parameter."""
    optimizer, (parameter,) = _stepped(kind, settings | _IN_ONE_WAY, 1)
    kept = [t for t in _tensors(optimizer.state[parameter]) if t.ndim]
    return sum(t.nbytes for t in kept) / parameter.nbytes


def _stepped(
    kind: type[Optimizer], settings: dict[str, Any], count: int
) -> tuple[Optimizer, list[nn.Parameter]]:
    """An optimizer of this kind that has stepped so many parameters, with those of the settings
    that it takes."""
    taken = inspect.signature(kind).parameters
    settings = {key: value for key, value in settings.items() if key in taken}
    if "lr" in taken:
        settings["lr"] = 1e-3
    parameters = [nn.Parameter(torch.zeros(SIDE, SIDE, device="cpu")) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    try:
        with torch.enable_grad():
            optimizer = kind(parameters, **settings)
            optimizer.step(lambda: 0.0)
    except Exception as error:
        raise TypeError(
            f"{kind.__name__} cannot be made and stepped to count what it keeps ({error}): give "
            "optimizer= the number of tensors that it keeps for each parameter"
        ) from error
    return optimizer, parameters


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [t for part in parts for t in _tensors(part)] if isinstance(value, dict | list) else []
