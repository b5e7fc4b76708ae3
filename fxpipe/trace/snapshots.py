"""Snapshots of values, which are compared with later ones to see whether a value has changed, and
the words for it.

::

    snapshot(config)    the object config, with {"scale": 3, "layers": [1, 2]} in it
    later               the same one, with {"scale": 4, "layers": [1, 2]}    config.scale: 3 → 4
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import operator
import reprlib
import types
import weakref
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fxpipe.ir.exact import exact
from fxpipe.ir.source import is_of_a_model, is_users_type
from fxpipe.ir.text import Word
from fxpipe.runtime.state import in_slots


class _Missing(Enum):
    MISSING = "missing"

    def __repr__(self) -> str:
        return self.value


MISSING = _Missing.MISSING
"""The value of an attribute that a module does not have."""

PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device),
    *(type, types.ModuleType),
)
_SETTINGS = weakref.WeakKeyDictionary[type, tuple[str, ...]]()  # what settings_of has found
MEMORY: tuple[type[Any], ...] = bytearray, array, memoryview, *ctypes.c_int.__mro__[-2:-1]
"""Values that are compared by their bytes. The last kind is the one that all of ctypes is of."""
_OPAQUE = "torch", "builtins", "functools", "operator"  # callables from there have no parts
_MANY = 256  # longer containers are compared only if none of their elements can change in place
_LONG = 10_000  # longer ones, and arrays of NumPy, are taken for data by which no forward branches
_LONG_KINDS = list, tuple, deque, dict, OrderedDict, defaultdict
_ATOMS = frozenset(PLAIN) - {type}  # a class may have settings
_DEPTH = 6  # how deep values are compared that are nested in others
_WIDE = 2  # so many levels are compared whole; deeper ones only if they have few elements
_FEW = 32


def is_plain(value: Any) -> bool:
    """Whether a value is taken for immutable, and compared by ``==``."""
    return isinstance(value, PLAIN)


def is_constant(value: Any) -> bool:
    """Whether a value cannot change in place, so that ``is`` is enough to see that it is equal."""
    if type(value) is tuple:
        return all(map(is_constant, value))
    if isinstance(value, type):
        return not settings_of(value)
    return is_plain(value) or isinstance(value, Tensor) or (callable(value) and not parts_of(value))


class _Is:
    """Compares a value by identity: two are equal if they hold the very same object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Is) and self.value is other.value

    __hash__ = object.__hash__


class _Elements:
    """The elements that an array has now: compared by their bytes, so that NaN equals NaN."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array.copy()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Elements):
            return False
        one, another = self.array, other.array
        is_alike = one.dtype == another.dtype and one.shape == another.shape
        return is_alike and one.tobytes() == another.tobytes()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return " ".join(np.array2string(self.array, threshold=8).split())


class _Atoms:
    """The elements of a long container, all of which are of types without parts. Two such snapshots
    are compared in little time: mostly the elements are the very same objects."""

    def __init__(self, names: Any, values: Iterable[Any]) -> None:
        self.names, self.values = names, tuple(values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Atoms) or self.names != other.names:
            return False
        return all(map(operator.is_, self.values, other.values)) or self.difference(other) is None

    __hash__ = None  # type: ignore[assignment]

    def difference(self, other: _Atoms) -> int | None:
        """The place of the first value that another snapshot, with the same names, has not."""
        pairs = enumerate(zip(self.values, other.values, strict=True))
        return next((i for i, (a, b) in pairs if snapshot(a) != snapshot(b)), None)

    def __repr__(self) -> str:
        return f"{len(self.values)} values"


def snapshot(value: Any, depth: int = _DEPTH) -> Any:
    """A snapshot of a value, which is compared with a later one to see whether the value changed.

    A container is compared by its elements, as is a small array of NumPy, a configuration object by
    its attributes, both at most ``depth`` levels deep, the innermost ones only where there are few
    of them; anything else by its identity.
    """
    if isinstance(value, np.ndarray) and value.size <= _LONG:
        return type(value), _Elements(value)
    if isinstance(value, MEMORY) and memoryview(value).nbytes <= 8 * _LONG:
        return type(value), memoryview(value).tobytes()  # in which NaN equals NaN
    if depth and isinstance(value, type) and (settings := settings_of(value)):
        return _Is(value), [(name, snapshot(each, depth - 1)) for name, each in settings]
    if isinstance(value, PLAIN):
        return type(value), exact(value)
    if depth and not isinstance(value, Tensor):
        is_wide = depth > _DEPTH - _WIDE
        most = _MANY if is_wide else _FEW
        if isinstance(value, set | frozenset):
            return type(value), frozenset(map(exact, value))
        if isinstance(value, list | tuple | deque) and len(value) <= most:
            return type(value), [snapshot(each, depth - 1) for each in value]
        if isinstance(value, Mapping) and len(value) <= most:
            return type(value), [(key, snapshot(each, depth - 1)) for key, each in value.items()]
        if is_wide and _are_atoms(value):
            return type(value), _Atoms(*_named(value))
        if (parts := parts_of(value)) and len(parts) <= most:
            return _Is(value), [(name, snapshot(part, depth - 1)) for name, part in parts]
    return _Is(value)


def _are_atoms(value: Any) -> bool:
    """Whether a value is a container, and not too long, whose elements are all without parts."""
    if type(value) not in _LONG_KINDS or len(value) > _LONG:
        return False
    return _ATOMS.issuperset(map(type, value.values() if isinstance(value, dict) else value))


def _named(value: Any) -> tuple[Any, Iterable[Any]]:
    """The keys, or the places, and the elements of a container."""
    if isinstance(value, dict):
        return tuple(value), value.values()
    return range(len(value)), value


def parts_of(value: Any) -> list[tuple[str, Any]]:
    """The values that an object computes with: its class and its attributes; of a function, what is
    in its closure; of a method, the object. Modules have premises of their own, and code of PyTorch
    has none."""
    if isinstance(value, nn.Module):
        return []
    if isinstance(value, types.FunctionType):
        if value.__closure__ is None or not is_of_a_model(value.__code__.co_filename):
            return []
        pairs = zip(value.__code__.co_freevars, value.__closure__, strict=True)
        cells = [(name, cell) for name, cell in pairs if name != "__class__"]  # of super()
        return [(name, each) for name, cell in cells for each in content_of(cell)]
    if isinstance(value, types.MethodType):
        return [("__self__", value.__self__)]
    if isinstance(value, weakref.ref):
        return [("()", value())]
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if callable(value) and type(value).__module__.partition(".")[0] in _OPAQUE:
        return []
    own = getattr(value, "__dict__", {})
    return [("__class__", type(value)), *own.items(), *in_slots(value).items()]


def settings_of(kind: type) -> list[tuple[str, Any]]:
    """The attributes of a class of the model's own code, other than a module's, that are no
    methods: it may be there for nothing else than to hold them."""
    if kind not in _SETTINGS:
        _SETTINGS[kind] = tuple(_names_of_settings(kind))
    return [(name, getattr(kind, name)) for name in _SETTINGS[kind] if hasattr(kind, name)]


def _names_of_settings(kind: type) -> Iterator[str]:
    if issubclass(kind, nn.Module | Enum) or not is_users_type(kind):
        return
    for name in dict.fromkeys(name for each in kind.__mro__ for name in vars(each)):
        value = inspect.getattr_static(kind, name)
        if not (name.startswith("__") or callable(value) or hasattr(value, "__get__")):
            yield name


def content_of(cell: types.CellType) -> list[Any]:
    """What is in a cell of a closure: nothing, if the variable has not been assigned."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def tensors_in(state: Any) -> Iterator[Tensor]:
    """The tensors in a snapshot of a value."""
    if isinstance(state, _Is):
        if isinstance(state.value, Tensor):
            yield state.value
    elif isinstance(state, list | tuple | frozenset):
        for part in state:
            yield from tensors_in(part)


def said_of(state: Any) -> str:
    """Text that shows, on one line of a message, the value that a recorded state was taken of."""
    if isinstance(state, _Is):
        return _on_one_line(state.value)
    kind, value = state
    if isinstance(kind, _Is):
        return _on_one_line(kind.value)
    if isinstance(value, _Atoms):
        return repr(value)
    if issubclass(kind, Mapping):
        return reprlib.repr({key: Word(said_of(each)) for key, each in value})
    if issubclass(kind, list | tuple | deque):
        return reprlib.repr([Word(said_of(each)) for each in value])
    return reprlib.repr(value)


def _on_one_line(value: Any) -> str:
    return " ".join(reprlib.repr(value).split())


def difference_of(path: str, then: Any, now: Any) -> str:
    """The first difference between two states, at the part of the value where it is."""
    if isinstance(then, tuple) and isinstance(now, tuple) and then[0] == now[0]:
        parts, others = then[1], now[1]
        if isinstance(parts, _Atoms) and isinstance(others, _Atoms) and parts.names == others.names:
            i = parts.difference(others) or 0
            where = f"{path}[{parts.names[i]!r}]"
            return difference_of(where, snapshot(parts.values[i]), snapshot(others.values[i]))
        if isinstance(parts, list) and len(parts) == len(others):
            for i, (part, other) in enumerate(zip(parts, others, strict=True)):
                if part == other:
                    continue
                if isinstance(then[0], _Is) and part[0] == other[0]:
                    return difference_of(f"{path}.{part[0]}", part[1], other[1])
                if not isinstance(then[0], _Is) and not issubclass(then[0], Mapping):
                    return difference_of(f"{path}[{i}]", part, other)
                if part[0] == other[0]:
                    return difference_of(f"{path}[{part[0]!r}]", part[1], other[1])
                break
    return f"{path}: {said_of(then)} → {said_of(now)}"
