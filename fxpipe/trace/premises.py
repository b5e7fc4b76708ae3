"""Premises: the state of the model that a trace depends on, beside the inputs. It consists of the
attributes of modules that the forward has read, or has looked up in vain, of the methods that it
has called, and of parameters and buffers: of their shapes and ties (:mod:`fxpipe.trace.ties`).

::

    def forward(self, x):
        if self.merged:  ──────  read while the model runs: a premise
            return self.base(x)
        return self.base(x) + self.scale * self.adapter(x)
                              ──────────  so is this; the graph has its value as a constant

A tensor among these attributes is compared by identity: a graph reads it, and sees it change in
place. If the graph has a constant that was computed from the tensor (:mod:`fxpipe.trace.folded`),
the tensor must not have been written to since. One that is a parameter or a buffer, too, must stay
the one of that name. An attribute that is looked up in vain, as ``getattr(self, "merged", False)``
does, has the value :data:`MISSING`. A method is an attribute of the class, which one of the module
may hide; the ``forward`` of every module counts, as PyTorch calls it.

A graph computes what the model computes only as long as its premises hold, so they are guards of
the compiled program.
"""

from __future__ import annotations

import copy
import functools
import operator
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.ir._torch import version_of
from fxpipe.ir.exact import exact
from fxpipe.ir.source import is_a_models
from fxpipe.ir.tensors import tensors_of
from fxpipe.runtime.state import OF_MODULES
from fxpipe.trace import patches
from fxpipe.trace.flags import OF_INPUTS, flag_of, flags_read, is_flag
from fxpipe.trace.global_values import GlobalValues
from fxpipe.trace.patches import patched
from fxpipe.trace.snapshots import (
    MISSING,
    PLAIN,
    difference_of,
    is_constant,
    said_of,
    snapshot,
    tensors_in,
)
from fxpipe.trace.ties import Ties
from fxpipe.trace.unregistered import Around, modules_around

Attribute = tuple[nn.Module, str]
Reads = dict[Attribute, Any]
"""The state of each attribute at the time that it was first read: a snapshot."""


_LOOK_UP = "__getattribute__"
# Read at every look-up of a parameter, or call of a module; no attributes of a forward.
_PASSED = OF_MODULES | {"__dict__", "__class__"}
_DICT = "__dict__"
_OF_MODULE = nn.Module.__getattr__.__globals__  # of the code that looks into it most often
_INHERITED = frozenset(dir(nn.Module))
_FORWARD = "forward"
_GETATTR = nn.Module.__getattr__  # as it is while nobody traces
_TABLES = "_parameters", "_buffers", "_modules"  # in the order in which it looks into them
_METHODS = (
    *(types.FunctionType, staticmethod, classmethod, functools.partialmethod),
    *(property, functools.cached_property),
)


@contextmanager
def attributes_read(model: nn.Module) -> Iterator[Reads]:
    """Yields the attributes of a model's modules that are looked up in this thread inside the
    ``with`` block, with their states: a dictionary that grows.

    Parameters, buffers and modules are left out, for a graph reads these from the model. So are
    look-ups in vain by PyTorch, which asks every module for what few modules have. Whether a
    parameter requires a gradient is an attribute, too (:mod:`fxpipe.trace.flags`).
    """
    reads: Reads = {}

    def note(module: nn.Module, name: str) -> None:
        reads.setdefault((module, name), state_of(module, name))

    def note_all(module: nn.Module, own: Mapping[str, Any]) -> None:
        for name, value in own.items():
            if name not in _PASSED and not isinstance(value, nn.Module):
                note(module, name)

    modules = {*model.modules(), *modules_around(model)}
    thread, this_thread = threading.get_ident(), threading.get_ident

    def replace(original: Any) -> Callable[[nn.Module, str], Any]:
        def watched(self: nn.Module, name: str) -> Any:
            # Compiling looks up millions of attributes, nearly all of them tables of modules.
            if name in _PASSED or this_thread() != thread:
                found = original(self, name)
                is_all = name == _DICT and self in modules and _is_for_a_model(sys._getframe(1))
                if is_all and this_thread() == thread:
                    note_all(self, found)
                return found
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
                    reads[attribute] = snapshot(MISSING)
                raise
            if self in modules and (self, name) not in reads and not isinstance(value, nn.Module):
                if name in original(self, "__dict__"):
                    reads[self, name] = snapshot(value)
                elif name not in _INHERITED:
                    of_class = _of_class(type(self), name)
                    if of_class is value or isinstance(of_class, _METHODS):
                        reads[self, name] = snapshot(of_class)
            return value

        return watched

    with patched(nn.Module, _LOOK_UP, replace, tells_threads=True), flags_read(model, note):
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


def _is_for_a_model(frame: types.FrameType) -> bool:
    """Whether the code of a frame, in which all attributes of a module are looked up, or by
    ``vars``, is a model's."""
    return frame.f_globals is not _OF_MODULE and is_a_models(frame)


def _is_missed(module: nn.Module, name: str) -> bool:
    """Whether the code that is looking up an attribute is a model's, and the module has none of
    that name. (A name with double underscores is asked for by Python itself.)"""
    if name.startswith("__") or value_of(module, name) is not MISSING:
        return False
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in (__file__, patches.__file__):
        frame = frame.f_back
    return frame is not None and is_a_models(frame)


class Premises:
    """The state of a model that a graph depends on.

    Args:
        reads: the attributes that were read during the trace, with the states they had then.
        folded: the tensors of the model of which the graph has something as a constant: they must
            not be written to.
        has_sizes: whether the sizes of buffers are constants of the graph, as export makes them. In
            a symbolic graph they are not; but there, too, a forward may have asked which there are.
        stateful: the modules whose forward runs in each call, so that their buffers may change.
        global_values: the global variables that the model's code reads.

    An attribute that the forward assigns before it reads it is no premise: the graph computes it.
    Such an attribute is recognised after the trace, when all attributes have been put back: its
    state then differs from the one that was read.
    """

    def __init__(
        self,
        model: nn.Module,
        reads: Reads,
        folded: Iterable[Tensor] = (),
        *,
        has_sizes: bool = True,
        stateful: Collection[nn.Module] = (),
        global_values: GlobalValues | None = None,
    ) -> None:
        self.global_values = global_values or GlobalValues()
        tables = [(m, m._parameters, m._buffers) for m in model.modules() if _has_tables(m)]
        self._parameters = [own for _, own, _ in tables if own]
        self._shapes = self._shapes_now()
        self._without_parameters = [own for _, own, _ in tables if not own]
        self._buffers = [(m, own) for m, _, own in tables if own and m not in stateful]
        self._without_buffers = [own for m, _, own in tables if not own and m not in stateful]
        self._state_of_buffer = _shape if has_sizes else _is_there
        self._states_of_buffers = self._buffers_now()
        self._ties, self._around = Ties(model), Around(model)
        self._folded = [(t, version_of(t)) for t in folded if not t.is_inference()]
        self._are_trained = [t.requires_grad for t, _ in self._folded]
        states: dict[nn.Module, dict[str, Any]] = {}
        for (module, name), state in reads.items():
            if state_of(module, name) == state:
                states.setdefault(module, {})[name] = state
        for module in model.modules():
            states.setdefault(module, {})[_FORWARD] = state_of(module, _FORWARD)
        self._watch([_Owner(module, own) for module, own in states.items()])

    def hold(self) -> bool:
        """Whether a graph that depends on these premises still computes what the model does."""
        return (
            self._shapes_now() == self._shapes
            and self._buffers_now() == self._states_of_buffers
            and not any(self._without_parameters)
            and not any(self._without_buffers)
            and self._ties.hold()
            and self._around.hold()
            and self.global_values.hold()
            and not self._written
            and [t.requires_grad for t, _ in self._folded] == self._are_trained
            and not any(place.tensor is not tensor for place, tensor in self._held)
            and (self._are_the_same() or not self.broken())
            and all(snapshot(value) == state for value, state in self._contents)
        )

    @property
    def _written(self) -> list[Tensor]:
        """The tensors that have been written to since the graph took constants from them."""
        return [tensor for tensor, version in self._folded if version_of(tensor) != version]

    def written(self, paths: Mapping[nn.Module, str]) -> list[str]:
        """The paths of these tensors. ``paths`` are those of the model's modules."""
        return [self._path_of(paths, tensor) for tensor in self._written]

    def _path_of(self, paths: Mapping[nn.Module, str], tensor: Tensor) -> str:
        return self.global_values.place_of(tensor) or _path_of(paths, tensor)

    @property
    def are_past(self) -> bool:
        """Whether these premises will never hold again."""
        return bool(self._written)

    def attributes(self) -> list[Attribute]:
        """The attributes that the graph depends on, beside the forwards of all modules."""
        return [(o.module, name) for o in self._owners for name in o.states if name != _FORWARD]

    def broken(self) -> list[Attribute]:
        """The attributes that have changed since the graph was made."""
        return [(owner.module, name) for owner in self._owners for name in owner.changed()]

    def said(self, paths: Mapping[nn.Module, str]) -> Iterator[tuple[str, str]]:
        """The attributes that the graph depends on, but for methods, and the states that they had,
        in words: ``("head.scale", "3")``. ``paths`` are those of the model's modules."""
        for owner in self._owners:
            for name, state in owner.states.items():
                if not owner.is_method(name) and name != OF_INPUTS:
                    yield _path(paths, owner.module, name), said_of(state)
        yield from self.global_values.said()

    def difference(self, paths: Mapping[nn.Module, str]) -> str:
        """The first thing that has changed since the graph was made, in words:
        ``head.scale: 3 → 4``. "" if nothing has."""
        for module, name in self.broken():
            path = _path(paths, module, name)
            owner = next(each for each in self._owners if each.module is module)
            if owner.is_method(name):  # also where only what is in its closure has changed
                return self.global_values.difference() or f"the method {path} has been replaced"
            return difference_of(path, owner.states[name], state_of(module, name))
        if written := self.written(paths):
            return (
                f"{written[0]} has been written to, and the graph has a constant computed from it"
            )
        for (tensor, _), is_trained in zip(self._folded, self._are_trained, strict=True):
            if tensor.requires_grad is not is_trained:
                now = f"{is_trained} → {tensor.requires_grad}"
                return f"{self._path_of(paths, tensor)}.requires_grad: {now}"
        if self._shapes_now() != self._shapes or any(self._without_parameters):
            return "shapes of parameters have changed"
        if of_buffers := self._changed_buffers(paths):
            return of_buffers
        if changed := self._ties.changed():
            *places, are_one = changed
            one, other = (_path(paths, place.module, place.name) for place in places)
            return f"{one} and {other}: " + ("two tensors → one" if are_one else "one tensor → two")
        for place, tensor in self._held:
            if place.tensor is not tensor:
                path = _path(paths, place.module, place.name)
                return f"{path} is another tensor than the one with which the graph was made"
        return self._around.difference() or self.global_values.difference()

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
        constants = (tensor for tensor, _ in self._folded)
        self._held = self._ties.held([*constants, *(t for o in owners for t in o.tensors())])
        # The rest is the same once more, in lists that take little time to compare.
        self._modules = [owner.module for owner in owners]
        self._kinds = [owner.kind for owner in owners]
        self._looked = [(vars(o.module).get, name) for o in owners for name in o.own]
        self._values = [value for owner in owners for value in owner.own.values()]
        self._inherited = {(o.kind, n): value for o in owners for n, value in o.inherited.items()}
        self._missing = [(o.module, name) for o in owners for name in o.missing()]
        self._flags = [
            (o.module, name, flag_of(o.module, name))
            for o in owners
            for name in filter(is_flag, o.states)
        ]

    def _are_the_same(self) -> bool:
        """Whether every attribute is seen, in little time, to be the object that it was."""
        return (
            [*map(type, self._modules)] == self._kinds
            and all(map(operator.is_, [get(n, MISSING) for get, n in self._looked], self._values))
            and all(_of_class(*place) is value for place, value in self._inherited.items())
            and all(value_of(module, name) is MISSING for module, name in self._missing)
            and all(flag_of(module, name) is flag for module, name, flag in self._flags)
        )

    def _shapes_now(self) -> list[Any]:
        return [_shape(t) for own in self._parameters for t in own.values()]

    def _buffers_now(self) -> list[dict[str, Any]]:
        state = self._state_of_buffer
        return [{name: state(t) for name, t in own.items()} for _, own in self._buffers]

    def _changed_buffers(self, paths: Mapping[nn.Module, str]) -> str:
        """The first buffer that has come, gone or got another size, in words; "" if none has."""
        if any(self._without_buffers):
            return "buffers have been added"
        states = zip(self._buffers, self._states_of_buffers, self._buffers_now(), strict=True)
        for (module, _), then, now in states:
            for name in {**then, **now}:
                if then.get(name) != now.get(name):
                    before, after = (_buffer_said(each.get(name)) for each in (then, now))
                    return f"the buffer {_path(paths, module, name)}: {before} → {after}"
        return ""


def _has_tables(module: nn.Module) -> bool:
    """Whether a module has its parameters and buffers in dicts, as one of TorchScript has not."""
    return isinstance(vars(module).get("_parameters"), dict)


def _shape(tensor: Tensor | None) -> Any:
    return None if tensor is None else (tensor.shape, tensor.dtype)


def _is_there(tensor: Tensor | None) -> Any:
    return None if tensor is None else True


def _buffer_said(state: Any) -> str:
    if isinstance(state, tuple):
        shape, dtype = state
        return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
    return "none" if state is None else "a tensor"


class _Owner:
    """A module, and the state that some of its attributes had when the graph was made.

    Attributes:
        states: the states of the attributes.
        own: the values that the module had itself; MISSING for the other attributes.
        inherited: what the module's class had, for these others.
        kind: the class.
    """

    def __init__(self, module: nn.Module, states: dict[str, Any]) -> None:
        self.module, self.states, self.kind = module, states, type(module)
        own = vars(module)
        self.own = {name: own.get(name, MISSING) for name in states}
        others = (name for name, value in self.own.items() if value is MISSING)
        self.inherited = {name: _of_class(self.kind, name) for name in others}

    def is_method(self, name: str) -> bool:
        """Whether an attribute is a method of the module's class."""
        return isinstance(self.inherited.get(name), _METHODS)

    def missing(self) -> Iterator[str]:
        """The attributes that neither the module nor its class had."""
        missing = snapshot(MISSING)
        return (name for name, state in self.states.items() if state == missing)

    def contents(self) -> dict[int, tuple[Any, Any]]:
        """The values that may change while they stay the same objects (a list, a configuration):
        from their ids to the pair of the value and the state that it had."""
        values = {**self.own, **self.inherited}
        return {
            id(value): (value, self.states[name])
            for name, value in values.items()
            if not is_constant(value) and not self.is_method(name)
        }

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that the attributes had, or that were in these."""
        return (tensor for state in self.states.values() for tensor in tensors_in(state))

    def changed(self) -> Iterator[str]:
        """The names of the attributes whose state has changed since the graph was made."""
        pairs = self.states.items()
        return (name for name, state in pairs if state_of(self.module, name) != state)

    def without(self, attributes: Collection[Attribute]) -> _Owner:
        """The same module, with fewer of its attributes watched."""
        found = copy.copy(self)
        for kind in "states", "own", "inherited":
            kept = {n: v for n, v in vars(self)[kind].items() if (self.module, n) not in attributes}
            setattr(found, kind, kept)
        return found


def value_of(module: nn.Module, name: str) -> Any:
    """An attribute of a module or of its class; :data:`MISSING` if there is none. A property is not
    computed: the result is the property object."""
    if is_flag(name):
        return flag_of(module, name)
    own = vars(module)
    if name in own:
        return own[name]
    value = _of_class(type(module), name)
    if value is MISSING:
        for kind in _TABLES:
            table = own.get(kind, ())  # a module of TorchScript has none of its own
            if name in table:
                return table[name]
    return value


def _of_class(kind: type, name: str) -> Any:
    """An attribute of a class as the class, or one that it inherits from, has it: a method is not
    bound."""
    for each in kind.__mro__:
        if name in vars(each):
            return vars(each)[name]
    return MISSING


def state_of(module: nn.Module, name: str) -> Any:
    """A snapshot of an attribute, as it is now, to be compared with others."""
    return snapshot(value_of(module, name))


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
    return isinstance(one, (*PLAIN, set)) and bool(exact(one) == exact(other))


def _functions(gm: fx.GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]
