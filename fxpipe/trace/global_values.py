"""Variables around a model that it computes with: a graph has their values as constants.

::

    SCALE = 0.5                          SCALE = 0.7, SETTINGS["scale"] = 0.7 or args.scale = 0.7
    def forward(self, x):                after the trace: the model is compiled anew
        return self.layer(x) * SCALE

They are the global variables, and those of functions around, that the code of the forward, and of
the functions that it calls, reads by their names; defaults of these functions; environment
variables; and attributes of the model's classes. Of their values numbers, texts, flags and the like
count, in lists, tuples, sets and dicts, too; whether a function, a module, a tensor or an array is
another one (a graph reads the values of a tensor in each call); and of an object, a class, a
function or a Python module of the model's own code the attributes that are read somewhere, by their
names. What the model itself assigns does not count: a number of calls, say, would have the model
compiled anew in each of them.
"""

from __future__ import annotations

import argparse
import copy
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache, partial
from multiprocessing.sharedctypes import SynchronizedBase
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, fx, nn

from fxpipe.ir.source import is_a_users, is_installed
from fxpipe.trace.errors import Refused
from fxpipe.trace.functions import code_of_call
from fxpipe.trace.outer import (
    THREAD_LOCAL,
    Key,
    classes_of,
    functions_of,
    globals_read,
    is_users,
    is_users_class,
    thread_local_read_by,
)
from fxpipe.trace.snapshots import (
    MEMORY,
    MISSING,
    content_of,
    difference_of,
    is_constant,
    said_of,
    snapshot,
    tensors_in,
)

_PLAIN: tuple[Any, ...] = (
    *(bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device),
    *(slice, range, np.generic, *MEMORY, SynchronizedBase),
)
_OTHERS = {  # what is compared by what it is, and words for another one
    FunctionType | BuiltinFunctionType | partial: "function",
    nn.Module: "module",
    Tensor: "tensor",
    np.ndarray: "array",
}
_CONTAINERS = list, tuple, deque, set, frozenset, dict
_FEW = 32  # a longer container is data
_DEEP = 3  # how deep containers, and objects in objects, are followed


@dataclass(frozen=True)
class _Variable:
    """What gives the value of a variable, or of a part of it, and words for where it is.
    ``is_shown``: whether it is told of before it has changed. ``also``: the keys of what is a part
    of another variable and a variable of its own, as an attribute of a class is."""

    get: Callable[[], Any]
    said: str
    is_shown: bool = True
    also: frozenset[Key] = frozenset()


class GlobalValues:
    """The variables around a model that some functions, and objects of some classes, read, and the
    states that they have now."""

    def __init__(
        self, functions: Iterable[FunctionType] = (), classes: Iterable[type] = ()
    ) -> None:
        read = list(functions)
        names = _names_of(read)
        found = {
            key: list(_places(place, names, _DEEP))
            for key, place in _variables(read, classes, names)
        }
        every = ((key, each) for key, places in found.items() for each in places)
        self._watch([(key, each, snapshot(each.get())) for key, each in every])

    @staticmethod
    def of(model: nn.Module) -> GlobalValues:
        """Those that the code of a model reads."""
        return GlobalValues(functions_of(model), classes_of(model))

    def settled(self, model: nn.Module, gm: fx.GraphModule) -> GlobalValues:
        """Those that a graph of the model has as constants. What the forward itself has changed
        since is none; nor is what only modules and functions read that the graph calls as they
        are: they run, and read it, in every call."""
        left_out = list(_called_as_they_are(gm))
        functions = list(functions_of(model, left_out))
        classes = classes_of(model, left_out)
        read = {key for key, _ in _variables(functions, classes, _names_of(functions))}
        found = copy.copy(self)
        states = [(k, p, s) for k, p, s in self._states if k in read and snapshot(p.get()) == s]
        found._watch(states)
        return found

    def leave_out(self, keys: Collection[Key]) -> None:
        """Watch these variables no more, since the model itself assigns to them."""
        states = ((key, place, then) for key, place, then in self._states if key not in keys)
        self._watch([state for state in states if state[1].also.isdisjoint(keys)])

    def _watch(self, states: list[tuple[Key, _Variable, Any]]) -> None:
        self._states = states
        # What takes little time to compare, and the rest.
        values = [(place, then, place.get()) for _, place, then in states]
        self._fixed = [(place.get, value) for place, _, value in values if is_constant(value)]
        self._others = [(place, then) for place, then, value in values if not is_constant(value)]

    def hold(self) -> bool:
        """Whether all of them are as they were."""
        if not all(get() is value for get, value in self._fixed):
            return not self.difference()  # an equal value is as good as the same one
        return all(snapshot(place.get()) == then for place, then in self._others)

    @property
    def tensors(self) -> Iterator[Tensor]:
        """The tensors that are in these variables."""
        return (tensor for *_, state in self._states for tensor in tensors_in(state))

    def place_of(self, tensor: Tensor) -> str:
        """Where a tensor is, in words; "" if it is in none of these variables."""
        found = (
            p.said for _, p, state in self._states if any(t is tensor for t in tensors_in(state))
        )
        return next(found, "")

    def difference(self) -> str:
        """The first that has changed, in words; "" if none has."""
        for _, place, then in self._states:
            if (now := snapshot(place.get())) != then:
                value = place.get()
                for kind, word in _OTHERS.items():
                    if isinstance(value, kind):
                        return f"{place.said} is another {word}{_name_of(value)}"
                return difference_of(place.said, then, now)
        return ""

    def said(self) -> Iterator[tuple[str, str]]:
        """Each of them but for defaults, functions, modules, tensors and arrays, in words, and the
        value that it had."""
        for _, place, state in self._states:
            if place.is_shown and not isinstance(place.get(), tuple(_OTHERS)):
                yield place.said, said_of(state)


def refuse_thread_locals(gm: fx.GraphModule) -> None:
    """Raise ``Refused`` if modules or functions of the model's own code that a graph calls, which
    has not looked into them, read a ``threading.local``: they run in the threads of stages, where
    it has other values."""
    for code in reversed(list(_called_as_they_are(gm))):  # what is within a module comes first
        if place := thread_local_read_by(code):
            name = getattr(code, "__name__", type(code).__name__)
            raise Refused(f"{name}, which is called as it is, reads {place}, {THREAD_LOCAL}")


def _called_as_they_are(gm: fx.GraphModule) -> Iterator[Any]:
    """The modules and functions of the model's own code that a graph calls, which has not looked
    into them."""
    for node in gm.graph.nodes:
        if node.op == "call_module":
            yield from gm.get_submodule(str(node.target)).modules()
        elif node.op == "call_function":
            yield code_of_call(node.target)


def _variables(
    functions: Iterable[FunctionType], classes: Iterable[type], names: frozenset[str]
) -> Iterator[tuple[Key, _Variable]]:
    """The variables that functions read, and the attributes of classes that have one of the names:
    with a key for each, under which it may come several times. Installed packages read hundreds,
    which nobody changes; so theirs are left out."""
    for function in functions:
        scope, code = function.__globals__, function.__code__
        if is_installed(code.co_filename):
            continue
        for name in sorted(globals_read(code)):
            if name in scope:
                said = f"the global variable {name} of {function.__module__}"
                yield (id(scope), name), _Variable(partial(scope.get, name, MISSING), said)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                said = f"the variable {name} of {function.__qualname__}"
                yield (id(cell), name), _Variable(partial(_content, cell), said)
        for name in _environment(code):
            said = f"the environment variable {name}"
            yield (id(os.environ), name), _Variable(partial(os.environ.get, name, MISSING), said)
        for name in "__defaults__", "__kwdefaults__":
            if getattr(function, name):
                said = f"a default of {function.__qualname__}"
                yield (id(function), name), _Variable(partial(getattr, function, name), said, False)
    for kind in classes:
        for name in sorted(names & vars(kind).keys()):
            if not _is_a_method(vars(kind)[name]):
                said = f"the class attribute {kind.__qualname__}.{name}"
                yield (id(kind), name), _Variable(partial(_own, kind, name), said)


def _names_of(functions: Iterable[FunctionType]) -> frozenset[str]:
    """The names, and the strings, in the code of functions."""
    return frozenset[str]().union(*(_names_in(each.__code__) for each in functions))


def _content(cell: CellType) -> Any:
    return next(iter(content_of(cell)), MISSING)


def _own(kind: type, name: str) -> Any:
    return vars(kind).get(name, MISSING)


def _name_of(value: Any) -> str:
    return f", {name}" if (name := getattr(value, "__name__", "")) else ""


def _places(place: _Variable, names: frozenset[str], depth: int) -> Iterator[_Variable]:
    """This place, if its value is watched as a whole; else those of its parts that are read."""
    value = place.get()
    if isinstance(value, ref):
        what = partial(_referred_to, place.get)
        place, value = replace(place, get=what, said=f"{place.said}, ()"), what()
    is_whole = _is_watched(value)
    if is_whole:
        yield place
    if depth and (not is_whole or isinstance(value, FunctionType)):
        for name in _parts(value, names):
            said = f"{place.said}, {name!r}"
            also = place.also | _keys(value, name)
            part = _Variable(partial(_part, place.get, name), said, place.is_shown, also)
            yield from _places(part, names, depth - 1)


def _referred_to(get: Callable[[], Any]) -> Any:
    """The object that a variable's weak reference refers to, None if it is gone; the value of the
    variable, if that is no weak reference by now."""
    value = get()
    return value() if isinstance(value, ref) else value


def _parts(value: Any, names: frozenset[str]) -> Iterable[str | int]:
    """The names or places of the parts of a value that may be read."""
    if isinstance(value, list | tuple):
        return range(len(value) if len(value) <= _FEW else 0)
    if not _has_parts(value):
        return ()
    if isinstance(value, type):
        return sorted(names.intersection(_of_class(value)))
    found: set[Any] = set(value if isinstance(value, Mapping) else vars(value))
    if not isinstance(value, Mapping | ModuleType | FunctionType):
        found.update(_of_class(type(value)))
    return sorted(names.intersection(name for name in found if isinstance(name, str)))


def _of_class(kind: type) -> Iterator[str]:
    """The names of what is no method in a class, and in those of the model's own code that it
    inherits from."""
    for each in kind.__mro__:
        if hasattr(each, "__dataclass_fields__") or is_users_class(each):
            yield from (name for name, value in vars(each).items() if not _is_a_method(value))


def _is_a_method(value: Any) -> bool:
    """Whether what is in a class is a method, a property or the like."""
    return hasattr(value, "__get__")


def _part(get: Callable[[], Any], name: str | int) -> Any:
    """An element, an entry of a dict, or an attribute of an object."""
    value = get()
    if isinstance(name, int):
        is_there = isinstance(value, list | tuple) and name < len(value)
        return value[name] if is_there else MISSING
    if isinstance(value, Mapping):
        return value.get(name, MISSING)
    own = () if isinstance(value, type) else (getattr(value, "__dict__", {}),)
    kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
    return next((each[name] for each in (*own, *map(vars, kinds)) if name in each), MISSING)


def _keys(value: Any, name: str | int) -> frozenset[Key]:
    """The keys of the variable that a part of a value may be."""
    if isinstance(name, int):
        return frozenset()
    if isinstance(value, ModuleType):
        return frozenset([(id(vars(value)), name)])
    kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
    return frozenset((id(kind), name) for kind in kinds)


def _is_watched(value: Any, depth: int = _DEEP) -> bool:
    if isinstance(value, (*_PLAIN, *_OTHERS)):
        return True
    if not depth or type(value) not in _CONTAINERS or len(value) > _FEW:
        return False
    parts = value.values() if isinstance(value, dict) else value
    return all(_is_watched(part, depth - 1) for part in parts)


def _has_parts(value: Any) -> bool:
    """Whether parts of a value are looked at: those of dicts, settings and the model's own code."""
    if isinstance(value, nn.Module | Tensor):
        return False
    if isinstance(value, ModuleType):
        return is_a_users(str(vars(value).get("__file__")), value.__name__)
    if isinstance(value, FunctionType):
        return is_users(value)
    if isinstance(value, dict | argparse.Namespace | SimpleNamespace | threading.local):
        return True
    kind = value if isinstance(value, type) else type(value)
    if issubclass(kind, nn.Module) or not hasattr(value, "__dict__"):
        return False
    return hasattr(kind, "__dataclass_fields__") or is_users_class(kind)


@lru_cache(maxsize=4096)
def _environment(code: CodeType) -> tuple[str, ...]:
    """The texts in code that reads environment variables: they may be names of some."""
    if not {"environ", "getenv"} & _names_in(code):
        return ()
    return tuple(each for each in code.co_consts if isinstance(each, str) and each.isidentifier())


@lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> frozenset[str]:
    """The names in code, and in the functions within it, and strings, which may be keys."""
    texts = {each for each in code.co_consts if isinstance(each, str)}
    return frozenset({*code.co_names, *texts}.union(*map(_names_in, _within(code))))


def _within(code: CodeType) -> list[CodeType]:
    return [each for each in code.co_consts if isinstance(each, CodeType)]
