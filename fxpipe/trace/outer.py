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

A variable to which the code assigns gets back whatever it had, a number as well as a tensor::

    global LAST; LAST = h.mean()                 a global variable, of this or another Python module
    type(self).calls += 1                        an attribute of a class
    nonlocal last; last = h.mean()               a variable of the function around

But what is no data stays, as it may have been made known elsewhere: a function that the first call
compiles, a Python module that it imports, or an object of another package, such as a handler of
``logging``.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, fx, nn

from fxpipe.ir.source import is_a_users, is_installed, is_users_type
from fxpipe.runtime.state import OF_MODULES, PLAIN, State, in_slots, same
from fxpipe.trace.snapshots import MISSING, content_of

_Cache: type[Any] = type(functools.cache(len))
_CONTAINERS = dict, list, set, OrderedDict, defaultdict, deque
_BASES = dict, list, set, tuple, deque
_VALUES = Tensor, fx.Proxy, torch.SymInt, torch.SymFloat, torch.SymBool
_DATA = *_VALUES, *_BASES, SimpleNamespace, np.ndarray, np.generic, torch.dtype, torch.device
_DEPTH = 5  # how many calls deep the code of a forward is followed
_MANY = 10_000  # a longer container is data, of which no copy is made
_FEW = 256  # in a longer container no functions and objects of the model's are looked for
_NEVER_READ = frozenset({"__init__", "__new__", "__post_init__", "__init_subclass__", "__del__"})
_NEVER_READ |= {"__repr__", "__str__", "__copy__", "__deepcopy__", "__getstate__", "__setstate__"}
"""Methods that Python calls by itself, but in no forward."""

_Named = tuple[str, Any]
"""A value, and words that say where it is found."""
Key = tuple[int, str]
"""What has a variable, by its id, and the name there."""
ASSIGNED: WeakKeyDictionary[nn.Module, set[Key]] = WeakKeyDictionary()
"""The variables to which runs of a model, with their backwards, have assigned."""


@dataclass(frozen=True)
class OuterVariable:
    """A variable outside of modules: a name in ``owner``, which is the table of the global
    variables of a file, a class, or a cell of a closure. ``said``: words for it."""

    owner: Any
    name: str
    said: str = ""

    @property
    def key(self) -> Key:
        """What tells it from all other variables."""
        return id(self.owner), self.name

    def get(self) -> Any:
        """Its value; MISSING if there is none."""
        if isinstance(self.owner, CellType):
            return next(iter(content_of(self.owner)), MISSING)
        own = vars(self.owner) if isinstance(self.owner, type) else self.owner
        return own.get(self.name, MISSING)

    def set(self, value: Any) -> None:
        """Give the variable a value, or remove the variable if the value is MISSING."""
        owner, name, is_gone = self.owner, self.name, value is MISSING
        if self.get() is value:
            return
        if isinstance(owner, CellType):
            if is_gone:
                del owner.cell_contents
            else:
                owner.cell_contents = value
        elif isinstance(owner, type):
            type.__delattr__(owner, name) if is_gone else type.__setattr__(owner, name, value)
        elif is_gone:
            del owner[name]
        else:
            owner[name] = value


_Found = tuple[list[_Named], list[OuterVariable]]
_FOUND: WeakKeyDictionary[nn.Module, _Found] = WeakKeyDictionary()


class Outside:
    """A record of what the functions of a model keep outside of its modules, as it is now."""

    def __init__(self, model: nn.Module) -> None:
        found = _FOUND.get(model)
        if found is None:
            read = list(read_by(model))
            found = _FOUND[model] = list(_kept(read)), _assigned(model, read)
        kept, variables = found
        self._variables = [(variable, variable.get()) for variable in variables]
        self._noted = ASSIGNED.setdefault(model, set())
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

    def assigned(self) -> list[OuterVariable]:
        """The variables that have other data than they had."""
        return [each for each, before in self._variables if _is_another(each.get(), before)]

    def put_back(self) -> None:
        """Put back what has changed, and empty each cache that has been given something."""
        for variable, before in self._variables:
            if _is_another(variable.get(), before):
                variable.set(before)
                self._noted.add(variable.key)
        for _, container, state in self._contents:
            if _has_changed(container, state):
                state.put_back()
        for cache, misses in self._caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()


def _has_changed(container: Any, state: State) -> bool:
    return state.differs(container) and _has_values(container)


def _is_another(value: Any, before: Any) -> bool:
    """Whether a variable has got another value, and one that is data."""
    if same(value, before):
        return False
    is_data = value is MISSING or isinstance(value, (*PLAIN, *_DATA))
    return is_data or (_is_users_object(value) and not callable(value))


def _has_values(container: Any, depth: int = 3) -> bool:
    """Whether there are tensors, or what stands for values in a trace, in a container."""
    if isinstance(container, _VALUES):
        return True
    if not depth or not isinstance(container, _BASES) or len(container) > _MANY:
        return False
    parts = [*container, *(container.values() if isinstance(container, dict) else ())]
    return any(_has_values(part, depth - 1) for part in parts)


def _kept(read: Iterable[_Named]) -> Iterator[_Named]:
    """The caches, and the containers, modules and parameters in global variables, classes, closures
    and defaults, among what the code of a model's forward reads."""
    kinds = nn.Module, nn.Parameter
    for name, value in read:
        if type(value) in (_Cache, *_CONTAINERS) or isinstance(value, kinds):
            yield name, value


def assigned_by(code: Any, *, but_installed: bool = False) -> list[OuterVariable]:
    """The variables that a model's forward, a function or a class assigns to, as far as they are
    found by names. ``but_installed``: as for :func:`read_by`."""
    return _assigned(code, read_by(code, but_installed=but_installed))


def _assigned(code: Any, read: Iterable[_Named]) -> list[OuterVariable]:
    """The variables that code assigns to. ``read``: what it reads by names."""
    values = [value for _, value in read]
    functions = [each for each in values if isinstance(each, FunctionType) and is_users(each)]
    found = [variable for each in functions for variable in _assigned_in(each)]
    names = {name for each in functions for name in _stores(each.__code__)["STORE_ATTR"]}
    kinds = [each for each in values if isinstance(each, type) and is_users_class(each)]
    if names and isinstance(code, nn.Module):
        kinds = [*_classes(code), *kinds]
    for kind in dict.fromkeys(kinds) if names else ():
        for name in sorted(names):
            value = inspect.getattr_static(kind, name, MISSING)
            if value is not MISSING and not hasattr(value, "__get__"):  # of a method or a property
                said = f"the class attribute {kind.__qualname__}.{name}"
                found.append(OuterVariable(kind, name, said))
    return list({variable.key: variable for variable in found}.values())


def _assigned_in(function: FunctionType) -> Iterator[OuterVariable]:
    """The global variables, and those of functions around, that a function assigns to."""
    code, scope = function.__code__, function.__globals__
    stores = _stores(code)
    for name in sorted(stores["STORE_GLOBAL"]):
        yield OuterVariable(scope, name, f"the global variable {name} of {function.__module__}")
    for name in sorted(stores["STORE_ATTR"]):
        for module in sorted(scope.keys() & globals_read(code)):
            if _is_users_module(scope[module], module):
                said = f"the global variable {name} of {module}"
                yield OuterVariable(vars(scope[module]), name, said)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if name in stores["STORE_DEREF"]:
            yield OuterVariable(cell, name, f"the variable {name} around {function.__qualname__}")


_STORES = "STORE_GLOBAL", "STORE_ATTR", "STORE_DEREF"
_NUMBERS = {dis.opmap[name] for name in _STORES}


@functools.lru_cache(maxsize=4096)
def _stores(code: CodeType) -> dict[str, frozenset[str]]:
    """The names to which code assigns, that of the functions within it included, by the kinds of
    instructions that do so."""
    inner = [_stores(each) for each in code.co_consts if isinstance(each, CodeType)]
    # Most code has no such instruction, which the first byte of each tells in little time.
    has_some = not _NUMBERS.isdisjoint(code.co_code[::2])
    own = [(i.opname, i.argval) for i in dis.get_instructions(code)] if has_some else []
    return {
        kind: frozenset(name for each, name in own if each == kind).union(*(s[kind] for s in inner))
        for kind in _STORES
    }


@functools.lru_cache(maxsize=4096)
def globals_read(code: CodeType) -> frozenset[str]:
    """The global variables that code reads, that of the functions within it included. (The names in
    code are those of attributes, too.)"""
    inner = (globals_read(each) for each in code.co_consts if isinstance(each, CodeType))
    own = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return frozenset(own.union(*inner))


def globals_assigned(code: CodeType) -> frozenset[str]:
    """The global variables that code assigns to, that of the functions within it included."""
    return _stores(code)["STORE_GLOBAL"]


THREAD_LOCAL = (
    "a threading.local, and stages run in threads of their own, where that has other values: use a "
    "contextvars.ContextVar, whose values stages have, or an attribute"
)
"""What to tell the user: it follows words for what code reads (:func:`thread_local_read_by`)."""


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


def _read(
    model: nn.Module, but: Sequence[Any] = (), *, but_installed: bool = False
) -> Iterator[list[_Named]]:
    """What the code of a model's forward reads by names, what the functions among this read, and so
    on: a list for each of these levels."""
    left_out = {id(each) for each in but}
    modules = [module for module in model.modules() if id(module) not in left_out]
    own = [pair for m in modules for pair in vars(m).items() if pair[0] not in OF_MODULES]
    classes = _classes(model, but)
    values = [pair for pair in own if callable(pair[1])]
    values += [part for _, value in own if isinstance(value, _BASES) for part in _read_by(value)]
    values += [pair for kind in classes for pair in _called_by_python(kind)]
    known = {id(value) for _, value in values} | left_out
    yield from _followed(values, classes, known, but_installed=but_installed)


def _followed(
    values: list[_Named], classes: Iterable[type], known: set[int], *, but_installed: bool = False
) -> Iterator[list[_Named]]:
    """These values, what the functions among them read by names, what the functions among that
    read, and so on. ``classes``: those whose objects may have what is read of any object;
    ``known``: the ids of the values that are not followed again; ``but_installed``: whether code
    of installed packages is not followed."""
    names = {"forward"}
    for _ in range(_DEPTH):
        for kind in classes:
            values += _new(_of_class(kind, sorted(names & vars(kind).keys())), known)
        yield values
        functions = [f for _, f in values if isinstance(f, FunctionType) and is_users(f)]
        names = {name for function in functions for name in _names(function.__code__)}
        followed = (value for _, value in values if not (but_installed and _is_installed(value)))
        values = [part for value in followed for part in _new(_read_by(value), known)]


def read_by(code: Any, *, but_installed: bool = False) -> Iterator[_Named]:
    """What a model's forward, a function or a class reads by names, what the functions among this
    read, and so on. ``but_installed``: not what code of installed packages reads, of which nobody
    changes anything but these themselves."""
    if isinstance(code, nn.Module):
        levels = _read(code, but_installed=but_installed)
    else:
        levels = _followed([("", code)], (), {id(code)}, but_installed=but_installed)
    return (pair for level in levels for pair in level)


def _is_installed(value: Any) -> bool:
    """Whether a value is a function or a class of an installed package."""
    if isinstance(value, FunctionType):
        return is_installed(value.__code__.co_filename)
    module = sys.modules.get(value.__module__) if isinstance(value, type) else None
    return is_installed(str(getattr(module, "__file__", None) or ""))


def runs_users_code(code: Any) -> bool:
    """Whether a function or a class is, or leads to, functions of the model's own code."""
    if not isinstance(code, FunctionType | MethodType | functools.partial | type):
        return False
    return any(isinstance(f, FunctionType) and is_users(f) for _, f in read_by(code))


def names_in(code: Any) -> frozenset[str]:
    """The names of variables and attributes in the code of the functions that a model's forward, a
    function or a class leads to."""
    codes = [f.__code__ for _, f in read_by(code) if isinstance(f, FunctionType) and is_users(f)]
    return frozenset(name for each in codes for name in (*_names(each), *each.co_freevars))


def thread_local_read_by(code: Any) -> str:
    """What is a ``threading.local`` among the values that a module, a function or a class reads, in
    words; "" if nothing is, as far as this is found by names."""
    modules = code.modules() if isinstance(code, nn.Module) else ()
    own = [
        (f"the attribute {name} of {type(module).__name__}", value)
        for module in modules
        for name, value in vars(module).items()
    ]
    every = (*own, *read_by(code))
    return next((name for name, value in every if isinstance(value, threading.local)), "")


def _classes(model: nn.Module, but: Sequence[Any] = ()) -> list[type]:
    """The classes of the model's own code that its modules are of, or what these hold."""
    left_out = {id(each) for each in but}
    own = [vars(module) for module in model.modules() if id(module) not in left_out]
    values = [v for each in own for name, v in each.items() if name not in OF_MODULES]
    return [*classes_of(model, but), *_classes_held(values)]


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
    return list(_attributes_in(value).values()) if is_looked_into else ()


def _attributes_in(value: Any) -> dict[str, Any]:
    return {**getattr(value, "__dict__", {}), **in_slots(value)}


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
    if kind.__module__ == "builtins":
        return False
    functions = (each for each in vars(kind).values() if isinstance(each, FunctionType))
    function = next(functions, None)
    return is_users_type(kind) if function is None else is_users(function)


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
    kind, own = type(value), _attributes_in(value)
    return [("", kind), *((f"{kind.__name__}.{name}", each) for name, each in own.items())]


def _read_by_function(function: FunctionType) -> Iterator[_Named]:
    code, scope = function.__code__, function.__globals__
    names = set(_names(code))
    for name in sorted(scope.keys() & globals_read(code)):
        value = scope[name]
        yield f"the global variable {name} of {function.__module__}", value
        if _is_users_module(value, name):
            inside = sorted(names & vars(value).keys())
            yield from ((f"the global variable {n} of {name}", vars(value)[n]) for n in inside)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        for each in content_of(cell):
            yield f"the variable {name} around {function.__qualname__}", each
    defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    yield from ((f"a default of {function.__qualname__}", each) for each in defaults)


def _is_users_module(value: Any, name: str) -> bool:
    """Whether a value is a Python module of the model's own code; ``name``: that of a variable."""
    if not isinstance(value, ModuleType) or value.__name__ in sys.builtin_module_names:
        return False
    return is_a_users(str(vars(value).get("__file__")), name)


def _names(code: CodeType) -> Iterator[str]:
    """The names that code reads, that of the functions within it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
