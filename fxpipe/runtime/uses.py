"""Uses: the gradients of all uses of a parameter in one call of a module are summed by themselves.

::

    parameter ── view ─┬─ one use          backward: the parameter gets the sum of this call
                       └─ another

Autograd adds the gradients of a parameter as they come. After several calls of a module that uses a
parameter twice, one for each micro-batch, these are the first use of the last micro-batch, then the
second, then the first use of the one before, and so on. A loop over micro-batches, with a backward
for each, adds those of each micro-batch first, and that may round otherwise. So a module whose
parameters are used nobody knows how often gets views of its parameters for the time of a call:
their gradients meet at the view before they go on to the parameter.

A module finds the views where it would find its parameters. They are parameters to it, with the
same memory, but not leaves of the autograd graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir._torch import FLAT_WEIGHTS
from fxpipe.ir.tensors import memory_of
from fxpipe.runtime.ambient import Ambient
from fxpipe.runtime.engine import first


class ParameterViews:
    """The views of trainable parameters in one call; there is one for each parameter, made where it
    is asked for. ``are_made``: whether there are any."""

    def __init__(self, are_made: bool) -> None:
        self._are_made = are_made
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter, int]] = {}  # by ids of parameters
        self._parameters: dict[int, nn.Parameter] = {}  # by ids of views

    def of(self, value: Any) -> Any:
        """The view of a parameter. Other values are returned as they are, and so are parameters
        without a gradient, and tensors with a history that were put in the place of one."""
        if not (self._are_made and type(value) is nn.Parameter):
            return value
        if not (value.requires_grad and value.is_leaf):
            return value
        if id(value) not in self._made:
            # ``view_as`` would not do: its backward takes no sparse gradients.
            view = value.as_subclass(nn.Parameter)
            first((view,))  # so that its gradient goes on at once, as a leaf's does
            self._made[id(value)] = value, view, memory_of(view)
            self._parameters[id(view)] = value
        return self._made[id(value)][1]

    def parameter(self, value: Any) -> Any:
        """The parameter that a view is of; all other values are returned as they are."""
        return self._parameters.get(id(value), value)

    def as_result(self, value: Any) -> Any:
        """A view as a tensor that is no parameter; all other values are returned as they are."""
        return value.as_subclass(Tensor) if id(value) in self._parameters else value

    def keep_data(self) -> None:
        """Let parameters have the memory that the module has assigned to ``.data`` of a view."""
        for parameter, view, memory in self._made.values():
            if memory_of(view) != memory:
                parameter.data = view.data


@contextmanager
def uses_summed(module: nn.Module, takes_views: bool = True) -> Iterator[ParameterViews]:
    """Inside the ``with`` block the module has views in place of its trainable parameters. Gives
    the views, for a caller that passes parameters to the module.

    There are none where no gradient is recorded, and none under autocast: it casts a parameter
    once for all uses, but would cast a view, which is no leaf, for each.

    Args:
        module: the module that is about to be called.
        takes_views: whether it can be called so; if not, it keeps its parameters.
    """
    are_made = takes_views and torch.is_grad_enabled() and not _is_autocast()
    views = ParameterViews(are_made)
    if not are_made:
        yield views
        return
    _replace(module, views.of)
    try:
        yield views
    finally:
        _replace(module, views.parameter)
        views.keep_data()


def _is_autocast() -> bool:
    return any(enabled for _, enabled, _ in Ambient.here().autocast)


def _replace(module: nn.Module, replaced: Callable[[Any], Any]) -> None:
    """Put ``replaced(parameter)`` in the place of each parameter of a module. Recurrent modules
    have their parameters in a list, too."""
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            value = replaced(parameter)
            if value is not parameter:
                owner._parameters[name] = value
        weights: list[Any] = vars(owner).get(FLAT_WEIGHTS, [])
        for i, weight in enumerate(weights):
            weights[i] = replaced(weight)
