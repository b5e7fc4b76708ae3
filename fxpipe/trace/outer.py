"""What the functions of a model keep outside of its modules: results in caches, and whatever they
put into global variables.

::

    @functools.cache
    def positions(n): return torch.arange(n)     a trace would leave a fake tensor in the cache,
                                                 which every later call of the model would get
    TABLES = {}                                  the same by hand

They are found by the names that the code of a model's functions reads: of its forward, of the
functions that this calls, and of the methods of objects that modules hold; the defaults of these
functions count as well. A cache of ``functools`` cannot be given back what it had: it is emptied,
as may happen to it at any time, if it has been given something. Dictionaries, lists and sets get
back what was in them if tensors, or what stands for values in a trace, are in them now: numbers
that a function counts for itself are not touched.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from fxpipe.ir.source import is_a_users, is_installed, is_users_type
from fxpipe.runtime.state import OF_MODULES, State
from fxpipe.trace.snapshots import content_of

_Cache: type[Any] = type(functools.cache(len))
_CONTAINERS = dict, list, set, OrderedDict, defaultdict, deque
_BASES = dict, list, set, tuple, deque
_VALUES = Tensor, fx.Proxy, torch.SymInt, torch.SymFloat, torch.SymBool
_DEPTH = 5  # how many calls deep the code of a forward is followed
_MANY = 10_000  # a longer container is data, of which no copy is made
_FEW = 256  # in a longer container no functions and objects of the model's are looked for
_NEVER_READ = frozenset({"__init__", "__new__", "__post_init__", "__init_subclass__", "__del__"})
_NEVER_READ |= {"__repr__", "__str__", "__copy__", "__deepcopy__", "__getstate__", "__setstate__"}
"""Methods that Python calls by itself, but in no forward."""

_Named = tuple[str, Any]
"""A value, and words that say where it is found."""
_FOUND: WeakKeyDictionary[nn.Module, list[_Named]] = WeakKeyDictionary()


class Outside:
    """A record of what the functions of a model keep outside of its modules, as it is now."""

    def __init__(self, model: nn.Module) -> None:
        kept = _FOUND.get(model)
        if kept is None:
            kept = _FOUND[model] = list(_kept(model))
        self._caches = [(c, c.cache_info().misses) for _, c in kept if isinstance(c, _Cache)]
        self.met = [value for _, value in kept if isinstance(value, nn.Module | nn.Parameter)]
        """The modules and parameters that the code reads, and those in containers that it reads."""
        self._contents: list[tuple[str, Any, State]] = []
        for name, container in kept:
            if type(container) in _CONTAINERS and len(container) <= _MANY:
                state = State(())
                state.look_into(container)
                self.met += state.met
                self._contents.append((name, container, state))

    def changed(self) -> list[str]:
        """The containers that have tensors, or what stands for values in a trace, and have other
        contents than they had: each in words."""
        return [name for name, kept, state in self._contents if _has_changed(kept, state)]

    def put_back(self) -> None:
        """Put back what has changed, and empty each cache that has been given something."""
        for _, container, state in self._contents:
            if _has_changed(container, state):
                state.put_back()
        for cache, misses in self._caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()


def _has_changed(container: Any, state: State) -> bool:
    return state.differs(container) and _has_values(container)


def _has_values(container: Any, depth: int = 3) -> bool:
    """Whether there are tensors, or what stands for values in a trace, in a container."""
    if isinstance(container, _VALUES):
        return True
    if not depth or not isinstance(container, _BASES) or len(container) > _MANY:
        return False
    parts = [*container, *(container.values() if isinstance(container, dict) else ())]
    return any(_has_values(part, depth - 1) for part in parts)


def _kept(model: nn.Module) -> Iterator[_Named]:
    """The caches, and the containers, modules and parameters in global variables, classes, closures
    and defaults, that the code of a model's forward reads, as far as they are found by names."""
    kinds = nn.Module, nn.Parameter
    for name, value in (pair for values in _read(model) for pair in values):
        if type(value) in (_Cache, *_CONTAINERS) or isinstance(value, kinds):
            yield name, value


def functions_of(model: nn.Module, but: Iterable[Any] = ()) -> Iterator[FunctionType]:
    """The functions of the model's own code that its forward calls, as far as they are found by
    names, each once. ``but``: the modules and functions that are not looked into."""
    for values in _read(model, list(but)):
        yield from (f for _, f in values if isinstance(f, FunctionType) and is_users(f))


def classes_of(model: nn.Module, but: Iterable[Any] = ()) -> list[type]:
    """The classes of the model's own code that its modules are of. ``but``: the modules that are
    left out."""
    left_out = {id(each) for each in but}
    modules = (module for module in model.modules() if id(module) not in left_out)
    classes = dict.fromkeys(kind for module in modules for kind in type(module).__mro__)
    return list(filter(is_users_class, classes))


def _read(model: nn.Module, but: Sequence[Any] = ()) -> Iterator[list[_Named]]:
    """What the code of a model's forward reads by names, what the functions among this read, and so
    on: a list for each of these levels."""
    left_out = {id(each) for each in but}
    modules = [module for module in model.modules() if id(module) not in left_out]
    own = [pair for m in modules for pair in vars(m).items() if pair[0] not in OF_MODULES]
    classes = [*classes_of(model, but), *_classes_held([value for _, value in own])]
    values = [pair for pair in own if callable(pair[1])]
    values += [part for _, value in own if isinstance(value, _BASES) for part in _read_by(value)]
    values += [pair for kind in classes for pair in _called_by_python(kind)]
    known = {id(value) for _, value in values} | left_out
    names = {"forward"}
    for _ in range(_DEPTH):
        for kind in classes:  # what a function reads of any object may be one of these
            values += _new(_of_class(kind, sorted(names & vars(kind).keys())), known)
        yield values
        functions = [f for _, f in values if isinstance(f, FunctionType) and is_users(f)]
        names = {name for function in functions for name in _names(function.__code__)}
        values = [part for _, value in values for part in _new(_read_by(value), known)]


def _classes_held(values: Sequence[Any]) -> list[type]:
    """The classes of the model's own code, but for those of modules, whose objects are these values
    or in them, be it in containers or in other objects."""
    found: dict[type, None] = {}
    known: set[int] = set()
    for _ in range(_DEPTH):
        new = [value for value in values if id(value) not in known]
        known.update(map(id, new))
        for kind in dict.fromkeys(map(type, new)):
            if not issubclass(kind, nn.Module | Tensor):
                found |= dict.fromkeys(filter(is_users_class, kind.__mro__))
        values = [part for value in new for part in _parts_of(value)]
    return list(found)


def _parts_of(value: Any) -> Iterable[Any]:
    """What an object of the model's own code, or one that only holds attributes, has as attributes;
    or what is in a container. Code of the container's own class does not run: it may load things.
    """
    kind: Any = next((kind for kind in _BASES if isinstance(value, kind)), None)
    if kind is not None:
        is_long = kind.__len__(value) > _FEW
        return () if is_long else list(dict.values(value) if kind is dict else kind.__iter__(value))
    if isinstance(value, nn.Module | Tensor | type | FunctionType):
        return ()
    is_looked_into = isinstance(value, SimpleNamespace) or is_users_class(type(value))
    return list(getattr(value, "__dict__", {}).values()) if is_looked_into else ()


def _called_by_python(kind: type) -> Iterator[_Named]:
    """The methods of a class that code calls without their names: ``__getitem__`` as ``x[0]``.
    Those of installed packages are left out: most are for other uses than a forward's."""
    for name, value in vars(kind).items():
        is_method = isinstance(value, FunctionType) and name.startswith("__")
        if is_method and name not in _NEVER_READ and not is_installed(value.__code__.co_filename):
            yield f"{kind.__name__}.{name}", value


def _new(values: Iterable[_Named], known: set[int]) -> list[_Named]:
    """Those of the values that are not known yet. From now on they are."""
    found = [pair for pair in values if id(pair[1]) not in known]
    known.update(id(value) for _, value in found)
    return found


def is_users_class(kind: type) -> bool:
    """Whether a class may be of the model's code. It is told by a function of the class or, where
    it has none, as one of settings, by its module."""
    functions = [each for each in vars(kind).values() if isinstance(each, FunctionType)]
    return is_users(functions[0]) if functions else is_users_type(kind)


def _is_users_object(value: Any) -> bool:
    """Whether a value is an object of a class of the model's code, other than a module."""
    return not isinstance(value, nn.Module) and is_users_class(type(value))


def is_users(function: FunctionType) -> bool:
    """Whether a function may be of the model's code."""
    return is_a_users(function.__code__.co_filename, function.__module__ or "")


def _of_class(kind: type, names: Iterable[str]) -> Iterator[_Named]:
    yield from ((f"{kind.__name__}.{name}", vars(kind)[name]) for name in names)


def _read_by(value: Any) -> Iterable[_Named]:
    """What a value leads to: of a function, what its code reads by names."""
    if isinstance(value, _Cache | staticmethod | classmethod):
        return [("", value.__wrapped__)]
    if isinstance(value, property | functools.cached_property):
        return [("", value.fget if isinstance(value, property) else value.func)]
    if isinstance(value, MethodType):
        return [("", value.__func__)]
    if isinstance(value, functools.partial):
        return [("", value.func)]
    if isinstance(value, type):
        names = (name for name in vars(value) if name != "__annotations__")
        return _of_class(value, names) if is_users_class(value) else ()
    if isinstance(value, FunctionType):
        return _read_by_function(value) if is_users(value) else ()
    if isinstance(value, _BASES):  # such as a table of functions
        code = FunctionType, MethodType, functools.partial, _Cache, type
        return [("", v) for v in _parts_of(value) if isinstance(v, code) or _is_users_object(v)]
    if not _is_users_object(value):
        return ()
    kind, own = type(value), getattr(value, "__dict__", {})
    return [("", kind), *((f"{kind.__name__}.{name}", each) for name, each in own.items())]


def _read_by_function(function: FunctionType) -> Iterator[_Named]:
    code, scope = function.__code__, function.__globals__
    names = set(_names(code))
    for name in sorted(names & scope.keys()):
        value = scope[name]
        yield f"the global variable {name} of {function.__module__}", value
        if isinstance(value, ModuleType) and is_a_users(str(vars(value).get("__file__")), name):
            inside = sorted(names & vars(value).keys())
            yield from ((f"the global variable {n} of {name}", vars(value)[n]) for n in inside)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        for each in content_of(cell):
            yield f"the variable {name} around {function.__qualname__}", each
    defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    yield from ((f"a default of {function.__qualname__}", each) for each in defaults)


def _names(code: CodeType) -> Iterator[str]:
    """The names that code reads, that of the functions within it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
