"""Premises: the state of the model that a trace depends on, beside the inputs. It consists of the
attributes of modules that the forward has read, or has looked up in vain, and of the shapes of
parameters.

::

    def forward(self, x):
        if self.merged:  ──────  read while the model runs: a premise
            return self.base(x)
        return self.base(x) + self.scale * self.adapter(x)
                              ──────────  so is this; the graph has its value as a constant

A tensor among these attributes is compared by identity: a graph reads it, and sees it change in
place. If the graph has a constant that was computed from the tensor (:mod:`fxpipe.trace.folded`),
the tensor must not have been written to since. An attribute that is looked up in vain, as
``getattr(self, "merged", False)`` does, has the value :data:`MISSING`.

A graph computes what the model computes only as long as its premises hold, so they are guards of
the compiled program.
"""

from __future__ import annotations

import copy
import operator
import reprlib
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.ir._torch import version_of
from fxpipe.ir.source import is_of_a_model
from fxpipe.ir.tensors import tensors_of
from fxpipe.trace import patches
from fxpipe.trace.patches import patched

Attribute = tuple[nn.Module, str]
Reads = dict[Attribute, Any]
"""The state of each attribute, as :func:`_state` gives it, at the time that it was first read."""


class _Missing(Enum):
    MISSING = "missing"

    def __repr__(self) -> str:
        return self.value


MISSING = _Missing.MISSING
"""The value of an attribute that a module does not have."""

_LOOK_UP = "__getattribute__"
_EVERY = frozenset(vars(nn.Module()))  # ``training``, ``_buffers``...: other guards check these
# Read at every look-up of a parameter, or call of a module; no attributes of a forward.
_PASSED = _EVERY | {"__dict__", "__class__"}
_INHERITED = frozenset(dir(nn.Module))
_GETATTR = nn.Module.__getattr__  # as it is while nobody traces
_TABLES = "_parameters", "_buffers", "_modules"  # in the order in which it looks into them
_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device),
    *(type, types.ModuleType),
)
_MANY = 256  # longer containers are taken for data that no forward branches by: not compared
_DEPTH = 6  # how deep values are compared that are nested in others
_WIDE = 2  # so many levels are compared whole; deeper ones only if they have few elements
_FEW = 32


@contextmanager
def attributes_read(model: nn.Module) -> Iterator[Reads]:
    """Yields the attributes of a model's modules that are looked up in this thread inside the
    ``with`` block, with their states: a dictionary that grows.

    Parameters, buffers and modules are left out, for a graph reads these from the model. So are
    look-ups in vain by PyTorch, which asks every module for what few modules have.
    """
    reads: Reads = {}
    modules = set(model.modules())
    thread, this_thread = threading.get_ident(), threading.get_ident

    def replace(original: Any) -> Callable[[nn.Module, str], Any]:
        def watched(self: nn.Module, name: str) -> Any:
            # Compiling looks up millions of attributes, nearly all of them tables of modules.
            if name in _PASSED or this_thread() != thread:
                return original(self, name)
            try:
                value = original(self, name)
            except AttributeError:  # it is a parameter, a buffer or a module, or it is missing
                if type(self).__getattr__ is _GETATTR:
                    own = original(self, "__dict__")
                    for kind in _TABLES:
                        if name in own.get(kind, ()):
                            return own[kind][name]
                attribute = self, name
                if self in modules and attribute not in reads and _is_missed(self, name):
                    reads[attribute] = _state(MISSING)
                raise
            if self in modules:
                is_own = name in original(self, "__dict__")
                is_state = not isinstance(value, nn.Module)
                is_inherited = _is_plain(value) and name not in _INHERITED
                if (is_state if is_own else is_inherited) and (self, name) not in reads:
                    reads[self, name] = _state(value)
            return value

        return watched

    with patched(nn.Module, _LOOK_UP, replace, tells_threads=True):
        yield reads


@contextmanager
def unwatched() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Inside the ``with`` block no look-ups are noted, and they take the time that they always
    take: it is for code of PyTorch, which goes through all modules many times. Yields what makes
    contexts in which look-ups are noted as ahead of the block: for the code of the model that is
    called from there."""
    watched = vars(nn.Module).get(_LOOK_UP)
    if watched is None:
        yield nullcontext
        return
    with patched(nn.Module, _LOOK_UP, lambda _: object.__getattribute__, tells_threads=True):
        yield lambda: patched(nn.Module, _LOOK_UP, lambda _: watched, tells_threads=True)


def _is_missed(module: nn.Module, name: str) -> bool:
    """Whether the code that is looking up an attribute is a model's, and the module has none of
    that name. (A name with double underscores is asked for by Python itself.)"""
    if name.startswith("__") or value_of(module, name) is not MISSING:
        return False
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in (__file__, patches.__file__):
        frame = frame.f_back
    return frame is not None and is_of_a_model(frame.f_code.co_filename)


class Premises:
    """The state of a model that a graph depends on.

    Args:
        reads: the attributes that were read during the trace, with the states they had then.
        folded: the tensors of the model of which the graph has something as a constant: they must
            not be written to.

    An attribute that the forward assigns before it reads it is no premise: the graph computes it.
    Such an attribute is recognised after the trace, when all attributes have been put back: its
    state then differs from the one that was read.
    """

    def __init__(self, model: nn.Module, reads: Reads, folded: Iterable[Tensor] = ()) -> None:
        self._parameters = [m._parameters for m in model.modules() if m._parameters]
        self._shapes = self._shapes_now()
        self._folded = [(t, version_of(t)) for t in folded if not t.is_inference()]
        states: dict[nn.Module, dict[str, Any]] = {}
        for (module, name), state in reads.items():
            if state_of(module, name) == state:
                states.setdefault(module, {})[name] = state
        self._watch([_Owner(module, own) for module, own in states.items()])

    def hold(self) -> bool:
        """Whether a graph that depends on these premises still computes what the model does."""
        return (
            self._shapes_now() == self._shapes
            and not self._written
            and all(owner.has_the_same() for owner in self._owners)
            and all(_state(value) == state for value, state in self._contents)
        )

    @property
    def _written(self) -> list[Tensor]:
        """The tensors that have been written to since the graph took constants from them."""
        return [tensor for tensor, version in self._folded if version_of(tensor) != version]

    def written(self, paths: Mapping[nn.Module, str]) -> list[str]:
        """The paths of these tensors. ``paths`` are those of the model's modules."""
        return [_path_of(paths, tensor) for tensor in self._written]

    @property
    def are_past(self) -> bool:
        """Whether these premises will never hold again."""
        return bool(self._written)

    def attributes(self) -> list[Attribute]:
        """The attributes that the graph depends on."""
        return [(owner.module, name) for owner in self._owners for name in owner.states]

    def broken(self) -> list[Attribute]:
        """The attributes that have changed since the graph was made."""
        return [(owner.module, name) for owner in self._owners for name in owner.changed()]

    def said(self, paths: Mapping[nn.Module, str]) -> Iterator[tuple[str, str]]:
        """The attributes that the graph depends on, and the states that they had, in words:
        ``("head.scale", "3")``. ``paths`` are those of the model's modules."""
        for owner in self._owners:
            for name, state in owner.states.items():
                yield _path(paths, owner.module, name), _said(state)

    def difference(self, paths: Mapping[nn.Module, str]) -> str:
        """The first thing that has changed since the graph was made, in words:
        ``head.scale: 3 → 4``. "" if nothing has."""
        for module, name in self.broken():
            then = next(o.states[name] for o in self._owners if o.module is module)
            return _difference(_path(paths, module, name), then, _state(value_of(module, name)))
        if written := self.written(paths):
            return (
                f"{written[0]} has been written to, and the graph has a constant computed from it"
            )
        return "" if self._shapes_now() == self._shapes else "shapes of parameters have changed"

    def without(self, attributes: Collection[Attribute]) -> Premises:
        """The same premises, less these attributes, which have turned out not to matter."""
        found = copy.copy(self)
        found._watch([owner.without(attributes) for owner in self._owners])
        return found

    def _watch(self, owners: list[_Owner]) -> None:
        self._owners = owners
        contents: dict[int, tuple[Any, Any]] = {}  # a shared configuration is compared once
        for owner in owners:
            contents |= owner.contents()
        self._contents = list(contents.values())

    def _shapes_now(self) -> list[Any]:
        return [
            t if t is None else (t.shape, t.dtype) for d in self._parameters for t in d.values()
        ]


class _Owner:
    """A module, and the state that some of its attributes had when the graph was made."""

    def __init__(self, module: nn.Module, states: dict[str, Any]) -> None:
        self.module, self.states = module, states
        own = vars(module)
        self._get = own.get
        self._own = [name for name in states if name in own]
        self._values = [own[name] for name in self._own]
        others = [name for name in states if name not in own]
        self._missing = [name for name in others if value_of(module, name) is MISSING]
        self._inherited = [name for name in others if name not in self._missing]

    def contents(self) -> dict[int, tuple[Any, Any]]:
        """The values that may change while they stay the same objects (a list, a configuration):
        from their ids to the pair of the value and the state that it had."""
        pairs = zip(self._own, self._values, strict=True)
        return {id(v): (v, self.states[name]) for name, v in pairs if not _is_constant(v)}

    def has_the_same(self) -> bool:
        """Whether every attribute is the object that it was, which takes little time to see, or is
        another object of an equal state."""
        is_same = all(map(operator.is_, map(self._get, self._own), self._values))
        unsure = self._inherited if is_same else self.states
        for name in self._missing if is_same else ():
            if value_of(self.module, name) is not MISSING:
                return False
        return not unsure or not any(self._changed(unsure))

    def changed(self) -> Iterator[str]:
        """The names of the attributes whose state has changed since the graph was made."""
        return self._changed(self.states)

    def without(self, attributes: Collection[Attribute]) -> _Owner:
        """The same module, with fewer of its attributes watched."""
        kept = {n: s for n, s in self.states.items() if (self.module, n) not in attributes}
        return _Owner(self.module, kept)

    def _changed(self, names: Iterable[str]) -> Iterator[str]:
        return (name for name in names if state_of(self.module, name) != self.states[name])


def value_of(module: nn.Module, name: str) -> Any:
    """An attribute of a module or of its class; :data:`MISSING` if there is none. A property is not
    computed: the result is the property object."""
    own = vars(module)
    if name in own:
        return own[name]
    value = getattr(type(module), name, MISSING)
    if value is MISSING:
        for kind in "_parameters", "_buffers", "_modules":
            table = own.get(kind, ())  # a module of TorchScript has none of its own
            if name in table:
                return table[name]
    return value


def state_of(module: nn.Module, name: str) -> Any:
    """A snapshot of an attribute, as it is now, to be compared with others."""
    return _state(value_of(module, name))


def _is_plain(value: Any) -> bool:
    """Whether a value is taken for immutable, and compared by ``==``."""
    return isinstance(value, _PLAIN)


def _is_constant(value: Any) -> bool:
    """Whether a value cannot change in place, so that ``is`` is enough to see that it is equal."""
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return _is_plain(value) or isinstance(value, Tensor) or callable(value)


class _Is:
    """Compares a value by identity: two are equal if they hold the very same object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Is) and self.value is other.value

    __hash__ = object.__hash__


def _state(value: Any, depth: int = _DEPTH) -> Any:
    """A snapshot of a value, which is compared with a later one to see whether the value changed.

    A container is compared by its elements, a configuration object by its attributes, both at most
    ``depth`` levels deep, the innermost ones only where there are few of them; anything else by its
    identity.
    """
    if isinstance(value, _PLAIN):
        return type(value), value
    if depth and not isinstance(value, Tensor):
        most = _MANY if depth > _DEPTH - _WIDE else _FEW
        if isinstance(value, set | frozenset):
            return type(value), frozenset(value)
        if isinstance(value, list | tuple) and len(value) <= most:
            return type(value), [_state(each, depth - 1) for each in value]
        if isinstance(value, Mapping) and len(value) <= most:
            return type(value), [(key, _state(each, depth - 1)) for key, each in value.items()]
        if not callable(value) and len(own := getattr(value, "__dict__", ())) <= most:
            parts = [(name, own[name]) for name in own]
            parts += [(name, getattr(value, name)) for name in slots_of(value)]
            return _Is(value), [(name, _state(part, depth - 1)) for name, part in parts]
    return _Is(value)


def slots_of(value: Any) -> list[str]:
    """The names of an object's attributes that its classes keep in ``__slots__``."""
    slots = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
    names = (name for each in slots for name in ([each] if isinstance(each, str) else each))
    return [name for name in names if name not in _NO_SLOTS and hasattr(value, name)]


_NO_SLOTS = "__dict__", "__weakref__"


def _path(paths: Mapping[nn.Module, str], module: nn.Module, name: str) -> str:
    return f"{paths.get(module, '?')}.{name}".removeprefix(".")


def _path_of(paths: Mapping[nn.Module, str], tensor: Tensor) -> str:
    """The path of the attribute that holds a tensor."""
    for module in paths:
        tables = module._parameters, module._buffers, vars(module)
        for name, value in (pair for table in tables for pair in table.items()):
            if any(each is tensor for each in tensors_of(value)):
                return _path(paths, module, name)
    return "a tensor"


def _said(state: Any) -> str:
    """Text that shows, on one line of a message, the value that a recorded state was taken of."""
    if isinstance(state, _Is):
        return _on_one_line(state.value)
    kind, value = state
    if isinstance(kind, _Is):
        return _on_one_line(kind.value)
    if issubclass(kind, Mapping):
        return reprlib.repr({key: _Word(_said(each)) for key, each in value})
    if issubclass(kind, list | tuple):
        return reprlib.repr([_Word(_said(each)) for each in value])
    return reprlib.repr(value)


def _on_one_line(value: Any) -> str:
    return " ".join(reprlib.repr(value).split())


class _Word(str):
    """Text that is shown without quotation marks."""

    def __repr__(self) -> str:
        return str(self)


def _difference(path: str, then: Any, now: Any) -> str:
    """The first difference between two states, at the part of the value where it is."""
    if isinstance(then, tuple) and isinstance(now, tuple) and then[0] == now[0]:
        parts, others = then[1], now[1]
        if isinstance(parts, list) and len(parts) == len(others):
            for i, (part, other) in enumerate(zip(parts, others, strict=True)):
                if part == other:
                    continue
                if isinstance(then[0], _Is) and part[0] == other[0]:
                    return _difference(f"{path}.{part[0]}", part[1], other[1])
                if not isinstance(then[0], _Is) and not issubclass(then[0], Mapping):
                    return _difference(f"{path}[{i}]", part, other)
                if part[0] == other[0]:
                    return _difference(f"{path}[{part[0]!r}]", part[1], other[1])
                break
    return f"{path}: {_said(then)} → {_said(now)}"


# ----------------------------------------------------------------- whether graphs compute the same


def are_alike(one: Any, other: Any) -> bool:
    """Whether two graph modules, or parts of them, have the same code, functions and values, and
    the very same parameters, so that they compute the same."""
    if one is other:
        return True
    if isinstance(one, fx.GraphModule) and isinstance(other, fx.GraphModule):
        kinds = ("_parameters", "_buffers", "_modules")
        return (
            one.code == other.code
            and _functions(one) == _functions(other)
            and all(are_alike(vars(one)[kind], vars(other)[kind]) for kind in kinds)
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        if one.requires_grad or other.requires_grad or isinstance(one, nn.Parameter):
            return False
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, nn.Module):
        return are_alike(vars(one), vars(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(are_alike, one, other))
    return isinstance(one, (*_PLAIN, set)) and bool(one == other)


def _functions(gm: fx.GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]
