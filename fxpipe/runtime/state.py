"""The state that modules keep in Python: attributes, and what is in their lists, dicts and sets.

The values of tensors are no part of it: autograd and graphs take care of buffers and parameters.
"""

from __future__ import annotations

import operator
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import MemberDescriptorType, ModuleType
from typing import Any

from torch import Tensor, nn

from fxpipe.ir.exact import exact
from fxpipe.ir.source import is_users_type

DEPTH = 4  # how deep lists in lists, and objects in objects, are followed
MANY = 256  # a longer container is data: its elements are recorded, but not what is in these

PLAIN = type(None), bool, int, float, complex, str, bytes
"""The types of values that have no parts, and cannot be changed."""
OF_MODULES = frozenset(vars(nn.Module()))
"""The attributes that every module has: ``training``, and tables of parameters, hooks and so on."""

STATEFUL: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules that compute with a state which their forward changes. A checkpoint that runs them a
second time gives them the state of the first run meanwhile."""


class State:
    """A record of modules' attributes, and of the contents of their containers, as they are now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._attributes = [(m, attributes_of(m)) for m in modules]
        self._counts = {id(m): len(vars(m)) for m, _ in self._attributes}
        self._contents: dict[int, tuple[Any, Any]] = {}  # by ids: containers, and copies
        self.met: list[nn.Module | nn.Parameter] = []
        """The modules and parameters in attributes and containers."""
        for _, own in self._attributes:
            for value in own.values():
                self._look_into(value, DEPTH)

    def look_into(self, value: Any) -> None:
        """Record the contents of this value as well, so that :meth:`put_back` restores them."""
        self._look_into(value, DEPTH)

    def _look_into(self, value: Any, depth: int) -> None:
        if isinstance(value, PLAIN) or not depth or id(value) in self._contents:
            return
        if isinstance(value, nn.Module | nn.Parameter):
            self.met.append(value)
        contents = contents_of(value)
        if contents is None:
            return
        self._contents[id(value)] = value, contents
        parts = contents.values() if isinstance(contents, dict) else contents
        if len(parts) <= MANY:
            for part in parts:
                self._look_into(part, depth - 1)

    def changed(self) -> list[tuple[nn.Module, str]]:
        """The attributes that have been assigned anew, or whose contents have changed, since this
        state was recorded: each with its module."""
        found = []
        for module, before in self._attributes:
            if self._is_as_it_was(module, before):
                continue
            now = attributes_of(module)
            found += [
                (module, name)
                for name in {**before, **now}
                if name not in now
                or name not in before
                or not same(now[name], before[name])
                or self.differs(before[name])
            ]
        return found

    def _is_as_it_was(self, module: nn.Module, before: dict[str, Any]) -> bool:
        """Whether a module is seen, in little time, to have the attributes that it had: the very
        same objects, none of which has contents that may change."""
        now = vars(module)
        if len(now) != self._counts[id(module)]:
            return False
        for name, value in before.items():
            if now.get(name, _MISSING) is not value or id(value) in self._contents:
                return False
        return True

    def _differs(self, value: Any, depth: int) -> bool:
        """Whether a container has other contents than it had."""
        if isinstance(value, PLAIN) or not depth or id(value) not in self._contents:
            return False
        _, before = self._contents[id(value)]
        now = contents_of(value)
        if isinstance(before, set | frozenset):
            return bool(now != before)
        parts = before.values() if isinstance(before, dict) else before
        if _are_same_objects(now, before):
            has_contents = not self._contents.keys().isdisjoint(map(id, parts))
            return has_contents and any(self._differs(part, depth - 1) for part in parts)
        if isinstance(before, dict):
            pairs = [(now[key], before[key]) for key in before if key in now]
            is_same = now.keys() == before.keys()
        else:
            pairs, is_same = list(zip(now, before, strict=False)), len(now) == len(before)
        return not is_same or any(
            not same(one, other) or self._differs(other, depth - 1) for one, other in pairs
        )

    def differs(self, value: Any) -> bool:
        """Whether a container that has been recorded has other contents than it had."""
        return self._differs(value, DEPTH)

    @property
    def recorded(self) -> list[Any]:
        """The containers and objects whose contents have been recorded."""
        return [value for value, _ in self._contents.values()]

    def has_tensors(self) -> bool:
        """Whether there are tensors among the attributes, or in them."""
        values = [value for _, own in self._attributes for value in own.values()]
        for _, contents in self._contents.values():
            values += contents.values() if isinstance(contents, dict) else contents
        return any(isinstance(value, Tensor) for value in values)

    def put_back(self) -> None:
        """Give the modules the attributes, with their contents, that have been recorded."""
        for module, before in self._attributes:
            own = vars(module)
            for name in own.keys() - before.keys() - OF_MODULES:
                del own[name]
            for name, value in before.items():
                if own.get(name) is not value or name not in own:
                    own[name] = value
        for value, contents in self._contents.values():
            refill(value, contents)

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Inside the ``with`` block the modules have the recorded state; after it, they have the
        state again that they had ahead of it."""
        now = State([module for module, _ in self._attributes])
        self.put_back()
        try:
            yield
        finally:
            now.put_back()


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that its class or its user has added to those that every
    ``nn.Module`` has."""
    return {name: value for name, value in vars(module).items() if name not in OF_MODULES}


def contents_of(value: Any) -> Any:
    """A copy of what is in a container or an object; None if it is neither. Code of the container's
    own class does not run: that of a table may make what it is asked for."""
    if isinstance(value, Tensor | nn.Module | ModuleType) or callable(value):
        return None
    if isinstance(value, OrderedDict):  # it has an order of its own, which move_to_end changes
        return {key: dict.__getitem__(value, key) for key in OrderedDict.__iter__(value)}
    if isinstance(value, dict):
        return dict(dict.items(value))
    kinds: tuple[Any, ...] = list, set, deque, tuple
    for kind in kinds:
        if isinstance(value, kind):
            return kind(kind.__iter__(value))
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        return dict(own)
    # Those of Python's own classes, such as a path, fill their slots when they are asked.
    return (in_slots(value) or None) if is_users_type(type(value)) else None


def in_slots(value: Any) -> dict[str, Any]:
    """The attributes of an object that it has in slots, by their names."""
    found = {}
    for name in slots_of(value):
        with suppress(AttributeError):  # it has none, which the class's own code might make
            found[name] = object.__getattribute__(value, name)
    return found


def slots_of(value: Any) -> tuple[str, ...]:
    """The names of the attributes for which the classes of an object have slots, as those of
    ``dataclass(slots=True)`` have."""
    found = _SLOTS.get(type(value))
    if found is None:
        found = _SLOTS[type(value)] = tuple(
            name
            for kind in type(value).__mro__
            for name, member in vars(kind).items()
            if isinstance(member, MemberDescriptorType) and "__slots__" in vars(kind)
        )
    return found


_SLOTS: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()
"""What :func:`slots_of` has found for the objects of a class, which gets no slots later."""


def refill(value: Any, contents: Any) -> None:
    """Give a container, or an object, the contents that it had; it remains the same object."""
    if isinstance(value, tuple):
        return
    if isinstance(value, list):
        if len(value) != len(contents) or any(map(_is_not, value, contents)):
            value[:] = contents
    elif isinstance(value, deque):
        value.clear()
        value.extend(contents)
    elif isinstance(value, set):
        value.clear()
        value.update(contents)
    elif not isinstance(value, dict) and not hasattr(value, "__dict__"):
        for name in slots_of(value):
            _set_slot(value, name, contents.get(name, _MISSING))
    else:
        own = value if isinstance(value, dict) else vars(value)
        kind: Any = OrderedDict if isinstance(own, OrderedDict) else dict
        if not same_entries(own, contents):
            kind.clear(own)
            kind.update(own, contents)


def _set_slot(value: Any, name: str, content: Any) -> None:
    """Set an attribute, also of an object whose class lets nobody do so."""
    if content is not _MISSING:
        object.__setattr__(value, name, content)
    else:
        with suppress(AttributeError):
            object.__delattr__(value, name)


def same_entries(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Whether two dictionaries have the same keys, in the same order, with the very same values.

    Thousands of them are compared each time that a model is put back as it was, by functions in C.
    Code of a class of dictionaries does not run.
    """
    if not one or not other:
        return not one and not other
    one, other = (contents_of(d) if isinstance(d, OrderedDict) else d for d in (one, other))
    values = map(operator.is_, dict.values(one), dict.values(other))
    return len(one) == len(other) and all(values) and [*dict.keys(one)] == [*dict.keys(other)]


def _are_same_objects(now: Any, before: Any) -> bool:
    """Whether two containers have the very same objects, in the same order: in functions in C, as
    some containers that are compared at each run of a model have thousands."""
    if isinstance(before, dict):
        return same_entries(now, before)
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _is_not(one: Any, other: Any) -> bool:
    return one is not other


def same(one: Any, other: Any) -> bool:
    """Whether two values are one object, or equal numbers or strings of one type."""
    is_plain = isinstance(one, PLAIN) and type(one) is type(other)
    return one is other or (is_plain and bool(exact(one) == exact(other)))


class Attribute:
    """An attribute of a module with its contents, as it is now, to be set again later."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self._value = vars(module).get(name, _MISSING)
        self._state = State(())
        self._state.look_into(self._value)

    def set(self) -> None:
        """Give the attribute the value and the contents again that it had when it was recorded."""
        if self._value is _MISSING:
            vars(self.module).pop(self.name, None)
        else:
            vars(self.module)[self.name] = self._value
        self._state.put_back()

    def is_now(self) -> bool:
        """Whether the attribute has the value and the contents with which it was recorded."""
        value = vars(self.module).get(self.name, _MISSING)
        return same(value, self._value) and not self._state.differs(value)


_MISSING = object()
