"""Global variables that a model computes with: a graph has their values as constants.

::

    SCALE = 0.5                          SCALE = 0.7, SETTINGS["scale"] = 0.7 or args.scale = 0.7
    def forward(self, x):                after the trace: the model is compiled anew
        return self.layer(x) * SCALE

They are found by the names that the code of the forward, and of the functions that it calls, reads
as globals. Of their values numbers, texts, flags and the like count, in lists, tuples, sets and
dicts, too, and functions of the model's own code; whether a tensor is another one (a graph reads
its values in each call); and of an object, a class or a Python module of the model's own code the
attributes that are read somewhere, by their names. What the forward itself
assigns does not count: a number of calls, say, would have the model compiled anew in each of them.
"""

from __future__ import annotations

import argparse
import copy
import dis
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.ir.source import is_a_users
from fxpipe.trace.outer import functions_of, is_users, is_users_class
from fxpipe.trace.snapshots import MISSING, difference_of, is_constant, said_of, snapshot

_PLAIN = bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device
_FEW = 32  # a longer container is data
_DEEP = 3  # how deep containers, and objects in objects, are followed


@dataclass(frozen=True)
class _GlobalPlace:
    """What gives the value of a global variable, or of a part of it, and words for where it is."""

    get: Callable[[], Any]
    said: str


_Key = tuple[int, str]  # which dictionary of global variables, by its id, and the name there


class GlobalValues:
    """The global variables that some functions read, and the states that they have now."""

    def __init__(self, functions: Iterable[FunctionType] = ()) -> None:
        read = list(functions)
        names = frozenset[str]().union(*(_names_in(each.__code__) for each in read))
        found: dict[_Key, list[_GlobalPlace]] = {}
        for function in read:
            scope, module = function.__globals__, function.__module__
            for key in _keys_of(function):
                if key not in found and (name := key[1]) in scope:
                    place = _GlobalPlace(partial(scope.get, name, MISSING), f"{name} of {module}")
                    found[key] = list(_places(place, names, _DEEP))
        self._watch([(k, each, _now(each)) for k, places in found.items() for each in places])

    @staticmethod
    def of(model: nn.Module) -> GlobalValues:
        """Those that the code of a model reads."""
        return GlobalValues(functions_of(model))

    def settled(self, model: nn.Module, gm: fx.GraphModule) -> GlobalValues:
        """Those that a graph of the model has as constants. What the forward itself has changed
        since is none; nor is what only modules and functions read that the graph calls as they
        are: they run, and read it, in every call."""
        functions = functions_of(model, _called_as_they_are(gm))
        read = {key for function in functions for key in _keys_of(function)}
        found = copy.copy(self)
        found._watch([(k, p, then) for k, p, then in self._states if k in read and _now(p) == then])
        return found

    def _watch(self, states: list[tuple[_Key, _GlobalPlace, Any]]) -> None:
        self._states = states
        # The same once more, in a list that takes little time to compare.
        values = [(place.get, place.get()) for _, place, _ in states]
        self._fixed = [(get, value) for get, value in values if is_constant(value)]

    def hold(self) -> bool:
        """Whether all of them are as they were."""
        are_the_same = all(get() is value for get, value in self._fixed)
        if are_the_same and len(self._fixed) == len(self._states):
            return True
        return not self.difference()

    def difference(self) -> str:
        """The first that has changed, in words; "" if none has."""
        for _, place, then in self._states:
            if (now := _now(place)) != then:
                value = place.get()
                if isinstance(value, FunctionType):
                    return f"the global variable {place.said} is another function, {value.__name__}"
                if isinstance(value, Tensor):
                    return f"the global variable {place.said} is another tensor"
                return difference_of(f"the global variable {place.said}", then, now)
        return ""

    def said(self) -> Iterator[tuple[str, str]]:
        """Each of them but for functions and tensors, in words, and the value that it had."""
        for _, place, state in self._states:
            if not isinstance(place.get(), FunctionType | Tensor):
                yield f"the global variable {place.said}", said_of(state)


def _called_as_they_are(gm: fx.GraphModule) -> Iterator[Any]:
    """The modules and functions of the model's own code that a graph calls, which has not looked
    into them."""
    for node in gm.graph.nodes:
        if node.op == "call_module":
            yield from gm.get_submodule(str(node.target)).modules()
        elif node.op == "call_function":
            yield node.target
            if isinstance(kind := getattr(node.target, "__self__", None), type):
                yield from (kind, *vars(kind).values())  # an autograd.Function


def _keys_of(function: FunctionType) -> Iterator[_Key]:
    """The keys of the global variables that a function reads."""
    return ((id(function.__globals__), name) for name in _globals_in(function.__code__))


def _now(place: _GlobalPlace) -> Any:
    return snapshot(place.get())


def _places(place: _GlobalPlace, names: frozenset[str], depth: int) -> Iterator[_GlobalPlace]:
    """This place, if its value is watched as a whole; else those of its parts that are read."""
    value = place.get()
    if _is_watched(value):
        yield place
    elif depth and _has_parts(value):
        parts = value if isinstance(value, Mapping) else vars(value)
        for name in sorted(names & {name for name in parts if isinstance(name, str)}):
            part = _GlobalPlace(partial(_part, place.get, name), f"{place.said}, {name!r}")
            yield from _places(part, names, depth - 1)


def _part(get: Callable[[], Any], name: str) -> Any:
    """An entry of a dict, or an attribute of an object, that has this name."""
    value = get()
    if isinstance(value, Mapping):
        return value.get(name, MISSING)
    return getattr(value, "__dict__", {}).get(name, MISSING)


def _is_watched(value: Any, depth: int = _DEEP) -> bool:
    if isinstance(value, (*_PLAIN, Tensor)):
        return True
    if isinstance(value, FunctionType):
        return depth == _DEEP and is_users(value)
    if not depth or type(value) not in (list, tuple, set, frozenset, dict) or len(value) > _FEW:
        return False
    parts = value.values() if isinstance(value, dict) else value
    return all(_is_watched(part, depth - 1) for part in parts)


def _has_parts(value: Any) -> bool:
    """Whether parts of a value are looked at: those of dicts, settings and the model's own code."""
    if isinstance(value, nn.Module | Tensor):
        return False
    if isinstance(value, ModuleType):
        return is_a_users(str(vars(value).get("__file__")), value.__name__)
    if isinstance(value, dict | argparse.Namespace | SimpleNamespace):
        return True
    kind = value if isinstance(value, type) else type(value)
    if issubclass(kind, nn.Module) or not hasattr(value, "__dict__"):
        return False
    return hasattr(kind, "__dataclass_fields__") or is_users_class(kind)


@lru_cache(maxsize=4096)
def _globals_in(code: CodeType) -> tuple[str, ...]:
    """The names that code, and the functions within it, read as global variables."""
    loads = "LOAD_GLOBAL", "LOAD_NAME"
    read = {each.argval for each in dis.get_instructions(code) if each.opname in loads}
    return tuple(sorted(read.union(*map(_globals_in, _within(code)))))


@lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> frozenset[str]:
    """The names in code, and in the functions within it, and strings, which may be keys."""
    texts = {each for each in code.co_consts if isinstance(each, str)}
    return frozenset({*code.co_names, *texts}.union(*map(_names_in, _within(code))))


def _within(code: CodeType) -> list[CodeType]:
    return [each for each in code.co_consts if isinstance(each, CodeType)]
