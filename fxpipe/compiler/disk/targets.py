"""The functions, operators, methods and attributes that a graph in a file may name.

A name is looked up in a table that is made of modules which only compute; it is never a path along
which attributes are read, so that a file cannot reach anything else.
"""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fxpipe.compiler.disk.errors import NotKept, Unusable
from fxpipe.ir._torch import (
    OpOverload,
    is_kernel,
    is_wrapped,
    wrap_with_autocast,
    wrap_with_set_grad_enabled,
)
from fxpipe.ir.checks import check

_NO_TENSORS = {"from_file", "load", "save", "compile", "call", "attrgetter", "itemgetter"}
_NO_TENSORS |= {"methodcaller", "apply_", "map_", "map2_", "register_hook", "numpy", "storage"}
_NO_TENSORS |= {"untyped_storage", "share_memory_", "module_load", "set_", "as_subclass"}
_NO_TENSORS |= {"register_post_accumulate_grad_hook", "pin_memory", "resize_as_sparse_", "backward"}
"""Names of what does something else than to compute with tensors."""

_ATTRIBUTES = {"shape", "dtype", "device", "ndim", "T", "mT", "H", "mH", "real", "imag", "layout"}
_ATTRIBUTES |= {"requires_grad", "data", "itemsize", "nbytes", "is_sparse"}
"""The attributes of tensors that a graph may read by ``getattr``."""

_OF_DICTS = {"keys", "values", "items"}
_METHODS = {name for name in dir(Tensor) if not name.startswith("_")} - _NO_TENSORS | _OF_DICTS


@cache
def _functions() -> dict[str, Any]:
    found = {
        "getattr": getattr,
        "set_grad_enabled": wrap_with_set_grad_enabled,
        "autocast": wrap_with_autocast,
        "check": check,
    }
    for module in (torch.nn.functional, torch.functional, torch.linalg, torch.fft, torch.special):
        found |= _of_module(module)
    found |= {f"torch.{n}": f for n, f in vars(torch).items() if is_kernel(f)}
    for module in (operator, math):
        found |= _of_module(module)
    return {n: f for n, f in found.items() if n.rpartition(".")[2] not in _NO_TENSORS}


def _of_module(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        is_own = isinstance(value, types.FunctionType) and (
            value.__module__ == module.__name__ or value.__qualname__.startswith(_DISPATCHED)
        )
        is_builtin = isinstance(value, types.BuiltinFunctionType)
        if (is_own or is_builtin) and not name.startswith("_") and "torch_function" not in name:
            yield f"{module.__name__}.{name}", value


_DISPATCHED = "boolean_dispatch.<locals>"  # max_pool2d, say, with and without indices


@cache
def _names() -> dict[int, str]:
    return {id(function): name for name, function in reversed(_functions().items())}


def name_of(target: Any, args: tuple[Any, ...], own: Mapping[str, Any]) -> Any:
    """The name of a function that a node calls, as JSON.

    Args:
        args: the arguments of the call.
        own: functions of the user's, by "module:name", of which a graph may call those that have
            been given to ``fx.wrap``.

    Raises NotKept for a function that is not in the table.
    """
    if isinstance(target, OpOverload):
        name = ["op", target.namespace, *str(target).split(".")[1:]]
        if target.namespace == "aten" and name[2] not in _NO_TENSORS:
            return name
        raise NotKept(f"its graph calls the operator {target}, which is not one of PyTorch's")
    found = _names().get(id(target))
    if found is not None and _may_be_called(found, args):
        return ["function", found]
    if isinstance(target, types.FunctionType):
        found = f"{target.__module__}:{target.__qualname__}"
        if own.get(found) is target and is_wrapped(target):
            return ["own", found]
    raise NotKept(f"its graph calls {getattr(target, '__qualname__', target)!r}")


def function_of(name: Any, args: tuple[Any, ...], own: Mapping[str, Any]) -> Any:
    """The function that :func:`name_of` has named.

    Raises Unusable for a name that is not in the table.
    """
    kind, *parts = name
    if kind == "op" and len(parts) == 3 and parts[0] == "aten" and parts[1] not in _NO_TENSORS:
        packet = getattr(torch.ops.aten, str(parts[1]), None)
        target = getattr(packet, str(parts[2]), None)
        if isinstance(target, OpOverload):
            return target
    if kind == "function" and parts[0] in _functions() and _may_be_called(parts[0], args):
        return _functions()[parts[0]]
    if kind == "own" and is_wrapped(own.get(parts[0])):
        return own[parts[0]]
    raise Unusable(f"it calls {name!r}")


def _may_be_called(name: str, args: tuple[Any, ...]) -> bool:
    return name != "getattr" or (len(args) == 2 and args[1] in _ATTRIBUTES)


def method(name: str) -> str:
    """The name of a method, if a graph in a file may call it.

    Raises Unusable if not.
    """
    if name not in _METHODS:
        raise Unusable(f"it calls a method {name!r}")
    return name
