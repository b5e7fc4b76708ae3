"""What the functions of a model keep outside of its modules: results in caches, and whatever they
put into global variables.

::

    @functools.cache
    def positions(n): return torch.arange(n)     a trace would leave a fake tensor in the cache,
                                                 which every later call of the model would get
    TABLES = {}                                  the same by hand

They are found by the names that the code of a model's functions reads. A cache of ``functools``
cannot be given back what it had: it is emptied, as may happen to it at any time, if it has been
given something. Dictionaries, lists and sets get back what was in them if tensors, or what stands
for values in a trace, are in them now: numbers that a function counts for itself are not touched.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from fxpipe.ir.source import is_a_users
from fxpipe.runtime.state import State
from fxpipe.trace.premises import content_of

_Cache: type[Any] = type(functools.cache(len))
_CONTAINERS = dict, list, set, OrderedDict, defaultdict, deque
_VALUES = Tensor, fx.Proxy, torch.SymInt, torch.SymFloat, torch.SymBool
_DEPTH = 5  # how many calls deep the code of a forward is followed
_MANY = 10_000  # a longer container is data, of which no copy is made

_FOUND: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()


@contextmanager
def put_back_outside(model: nn.Module) -> Iterator[None]:
    """Put back what the functions of a model keep outside of its modules, as it was ahead of the
    ``with`` block."""
    kept = _FOUND.get(model)
    if kept is None:
        kept = _FOUND[model] = list(_kept(model))
    caches = [(each, each.cache_info().misses) for each in kept if isinstance(each, _Cache)]
    contents = [(each, State(())) for each in kept if type(each) in _CONTAINERS]
    for container, state in contents:
        if len(container) <= _MANY:
            state.look_into(container)
    try:
        yield
    finally:
        for container, state in contents:
            if _has_values(container):
                state.put_back()
        for cache, misses in caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()


def _has_values(container: Any, depth: int = 3) -> bool:
    """Whether there are tensors, or what stands for values in a trace, in a container."""
    if isinstance(container, _VALUES):
        return True
    if not depth or not isinstance(container, (*_CONTAINERS, tuple)) or len(container) > _MANY:
        return False
    parts = [*container, *(container.values() if isinstance(container, dict) else ())]
    return any(_has_values(part, depth - 1) for part in parts)


def _kept(model: nn.Module) -> Iterator[Any]:
    """The caches, and the containers in global variables, classes and closures, that the code of a
    model's forward reads, as far as they are found by names."""
    modules = list(model.modules())
    classes = {kind for module in modules for kind in type(module).__mro__ if _is_users_class(kind)}
    values = [value for module in modules for value in vars(module).values() if callable(value)]
    known = set(map(id, values))
    names = {"forward"}
    for _ in range(_DEPTH):
        for kind in classes:  # what a function reads of any object may be one of these
            values += _new((vars(kind)[name] for name in names & vars(kind).keys()), known)
        yield from (value for value in values if type(value) in (_Cache, *_CONTAINERS))
        functions = [each for each in values if isinstance(each, FunctionType) and _is_users(each)]
        names = {name for function in functions for name in _names(function.__code__)}
        values = [part for value in values for part in _new(_read_by(value), known)]


def _new(values: Iterable[Any], known: set[int]) -> list[Any]:
    """Those of the values that are not known yet. From now on they are."""
    found = [value for value in values if id(value) not in known]
    known.update(map(id, found))
    return found


def _is_users_class(kind: type) -> bool:
    """Whether a class may be of the model's code. It is told by a function of the class."""
    functions = (each for each in vars(kind).values() if isinstance(each, FunctionType))
    return any(map(_is_users, islice(functions, 1)))


def _is_users_object(value: Any) -> bool:
    """Whether a value is an object of a class of the model's code, other than a module."""
    return not isinstance(value, nn.Module) and _is_users_class(type(value))


def _is_users(function: FunctionType) -> bool:
    """Whether a function may be of the model's code."""
    return is_a_users(function.__code__.co_filename, function.__module__ or "")


def _read_by(value: Any) -> Iterable[Any]:
    """What a value leads to: of a function, what its code reads by names."""
    if isinstance(value, _Cache | staticmethod | classmethod):
        return (value.__wrapped__,)
    if isinstance(value, property | functools.cached_property):
        return (value.fget if isinstance(value, property) else value.func,)
    if isinstance(value, MethodType):
        return (value.__func__,)
    if isinstance(value, functools.partial):
        return (value.func,)
    if isinstance(value, type):
        return vars(value).values() if _is_users_class(value) else ()
    if not isinstance(value, FunctionType):
        return (
            [type(value), *getattr(value, "__dict__", {}).values()]
            if _is_users_object(value)
            else ()
        )
    if not _is_users(value):
        return ()
    names = set(_names(value.__code__))
    found = list(_named(value.__globals__, names))
    found += [each for cell in value.__closure__ or () for each in content_of(cell)]
    return found


def _named(scope: Mapping[str, Any], names: set[str]) -> Iterator[Any]:
    """The values of these names in a scope, and in the Python modules of the model's among them."""
    for name in names & scope.keys():
        value = scope[name]
        yield value
        if isinstance(value, ModuleType) and is_a_users(str(vars(value).get("__file__")), name):
            yield from (vars(value)[each] for each in names & vars(value).keys())


def _names(code: CodeType) -> Iterator[str]:
    """The names that code reads, that of the functions within it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
