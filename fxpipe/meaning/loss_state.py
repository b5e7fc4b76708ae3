"""What a loss function changes, put back after each call that is made for a check.

::

    class Lit(LightningModule):                     loss_fn=lit.loss
        def loss(self, output, target):
            self.calls += 1                         counts the calls of a check, too,
            self.ema.mul_(0.9).add_(output...)      and averages rows that a check has made up

A loss function that is a module is put back as any module is. But it may as well be a method of
one, or a function that refers to modules, to plain objects, and to variables of its own. So all
that its code reads is followed, as it is to find the numbers that it reads
(:mod:`fxpipe.meaning.numbers_read`), and what can be changed there is recorded ahead of a call:

============================  =====================================================
modules                       as by :func:`fxpipe.trace.untouched`, and parameters
objects, functions, classes   their attributes, those in slots included
closures, global variables    the variables that the code assigns to
lists, dicts, sets, deques    what is in them
tensors, arrays               their values, where they are written to
============================  =====================================================

What is not written in Python, such as an iterator or a file, is not put back; nor are the objects
of fxpipe, PyTorch and Python's own library.
"""

from __future__ import annotations

import argparse
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.meaning.numbers_read import WalkToNumbers, attributes_of
from fxpipe.runtime.state import same_entries, slots_of
from fxpipe.runtime.writes import values_put_back
from fxpipe.trace import untouched
from fxpipe.trace.outer import OuterVariable, globals_assigned

_MOST = 4096, 65536
"""How many objects are followed, and how many numbers may be among them."""
_MANY = 100_000
"""A longer container is data, of which no copy is made."""

_OTHERS = frozenset({"fxpipe", "passes", "torch", "numpy"}) | sys.stdlib_module_names
_BAGS = types.SimpleNamespace, argparse.Namespace
_MISSING = object()

_PutBack = Callable[[], object]
_Kept = Callable[[], Iterable[_PutBack]]
"""Records what can be changed about a value, as it is now: what puts it back."""


def left_as_it_was(
    function: Any, *, has_values: bool = True
) -> Callable[[], AbstractContextManager[None]]:
    """What makes contexts in which a function, such as a loss, may be called: all that it reaches
    is at the end of each as it was at its beginning.

    The function is looked into once, now. None: there is none.

    Args:
        has_values: whether it is called with values. Without any, it can write to no tensor.
    """
    return nullcontext if function is None else _Reached(function, has_values).left_as_it_was


class _Reached:
    """What a function reaches that it may change."""

    def __init__(self, function: Any, has_values: bool) -> None:
        met = {id(value): value for value in WalkToNumbers.of([function], _MOST).met}
        modules = [m for value in met.values() for m in _modules(value)]
        inner = {id(part) for m in modules for part in m.modules() if part is not m}
        self._modules = [m for m in dict.fromkeys(modules) if id(m) not in inner]
        own = {id(part) for m in self._modules for part in m.modules()}
        parameters = [p for m in self._modules for p in m.parameters()]
        tensors = [*parameters, *(v for v in met.values() if isinstance(v, Tensor))]
        self._tensors = tensors if has_values else []
        self._kept = [kept for v in met.values() if id(v) not in own and (kept := _kept(v))]

    @contextmanager
    def left_as_it_was(self) -> Iterator[None]:
        """A context at whose end all is as it was at its beginning."""
        back = [put_back for kept in self._kept for put_back in kept()]
        with ExitStack() as stack:
            for module in self._modules:
                stack.enter_context(untouched(module))
            stack.enter_context(values_put_back(self._tensors))
            try:
                yield
            finally:
                for put_back in back:
                    put_back()


def _modules(value: Any) -> Iterable[nn.Module]:
    """The modules that are put back for a value: itself, or those of the model in a pipeline."""
    if not isinstance(value, nn.Module):
        return ()
    return value.children() if _package(type(value)) == "fxpipe" else (value,)


def _package(kind: type) -> str:
    return (kind.__module__ or "").partition(".")[0]


def _is_users(kind: type) -> bool:
    """Whether objects of a class are put back: it is a user's, or one that only has attributes."""
    return kind in _BAGS or _package(kind) not in _OTHERS


def _kept(value: Any) -> _Kept | None:
    """What records a value; None for one that cannot be changed, or is not put back."""
    if isinstance(value, types.FunctionType):
        return partial(_of_function, value)
    if isinstance(value, dict | list | set | deque):
        return partial(_of_container, value)
    if isinstance(value, torch.Generator):
        return lambda: [partial(value.set_state, value.get_state())]
    if type(value).__name__ == "ndarray" and _package(type(value)) == "numpy":
        return partial(_of_array, value)
    if isinstance(value, type):
        return partial(_of_class, value) if _is_users(value) else None
    if isinstance(value, Tensor | nn.Module | types.ModuleType) or not _is_users(type(value)):
        return None
    return partial(_of_object, value)


def _of_function(function: types.FunctionType) -> Iterator[_PutBack]:
    yield from _of_entries(vars(function))
    scope, names = function.__globals__, globals_assigned(function.__code__)
    variables = [OuterVariable(scope, name) for name in names]
    variables += [OuterVariable(cell, "") for cell in function.__closure__ or ()]
    for variable in variables:
        yield partial(variable.set, variable.get())


def _of_object(value: Any) -> Iterator[_PutBack]:
    own = attributes_of(value)
    if isinstance(own, dict):
        yield from _of_entries(own)
    for name in slots_of(value):
        yield partial(_set_attribute, value, name, getattr(value, name, _MISSING))


def _of_class(kind: type) -> Iterator[_PutBack]:
    """The attributes of a class that are data, such as a number of all calls."""
    for name, value in [*vars(kind).items()]:
        if not name.startswith("__") and isinstance(value, bool | int | float | str | Tensor):
            yield partial(_set_attribute, kind, name, value)


def _of_container(value: Any) -> Iterator[_PutBack]:
    if len(value) > _MANY:
        return
    if isinstance(value, dict):
        yield from _of_entries(value)
    elif isinstance(value, list | deque):
        yield partial(_refill, value, list(value))
    else:
        yield partial(_refill_set, value, set(value))


def _of_entries(value: dict[Any, Any]) -> Iterator[_PutBack]:
    yield partial(_refill_dict, value, dict(value))


def _of_array(value: Any) -> Iterator[_PutBack]:
    if value.size <= _MANY and value.flags.writeable:
        yield partial(value.__setitem__, ..., value.copy())


def _refill(value: Any, before: list[Any]) -> None:
    if len(value) == len(before) and all(a is b for a, b in zip(value, before, strict=True)):
        return
    value.clear()
    value.extend(before)


def _refill_set(value: set[Any], before: set[Any]) -> None:
    if value != before:
        value.clear()
        value.update(before)


def _refill_dict(value: dict[Any, Any], before: dict[Any, Any]) -> None:
    if same_entries(value, before):
        return
    kind = OrderedDict if isinstance(value, OrderedDict) else dict
    kind.clear(value)
    kind.update(value, before)


def _set_attribute(owner: Any, name: str, before: Any) -> None:
    if getattr(owner, name, _MISSING) is before:
        return
    if before is _MISSING:
        object.__delattr__(owner, name)
    elif isinstance(owner, type):
        type.__setattr__(owner, name, before)
    else:
        object.__setattr__(owner, name, before)
