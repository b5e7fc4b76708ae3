"""The structure of a value: the tensors in it, and the containers and objects that hold them.

Lists, dicts and whatever else pytree has been told of are containers. An object that pytree does
not know is opened by its attributes: a cache of keys and values, say, or a dataclass that nobody
has registered.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.ir._torch import pytree
from fxpipe.ir.tensors import is_shape

VARYING = (Tensor, fx.Proxy, torch.SymInt, torch.SymFloat, torch.SymBool)
"""What may differ from call to call, also while a model is traced; all else is constant."""


def children(value: Any) -> dict[Any, Any] | None:
    """The parts of a value by key, index or attribute; None for what has no parts."""
    if isinstance(value, VARYING):
        return None
    parts, spec = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
    if not spec.is_leaf():
        return dict(value) if isinstance(value, Mapping) else dict(enumerate(parts))
    return attributes(value) if is_opened(value) else None


def is_opened(value: Any) -> bool:
    """Whether it is an object with attributes; tensors, classes, functions and modules are not."""
    if isinstance(value, VARYING):
        return False
    return bool(attributes(value)) and not callable(value) and not isinstance(value, Enum)


def attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, in its dictionary and in slots."""
    slots = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
    named = [name for names in slots for name in ([names] if isinstance(names, str) else names)]
    found = {name: getattr(value, name) for name in named if hasattr(value, name)}
    return found | getattr(value, "__dict__", {})


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a value, which have no parts, each with its path: ``.past.layers[0].keys``."""
    return ((below, part) for below, part, is_leaf in all_parts(value, path) if is_leaf)


def all_parts(
    value: Any, path: str = "", within: tuple[int, ...] = ()
) -> Iterator[tuple[str, Any, bool]]:
    """The value, its parts, and theirs: the path of each, the part, and whether it is a leaf."""
    parts = children(value)
    yield path, value, parts is None
    if parts and id(value) not in within:  # an object may point back to one that it is part of
        for key, part in parts.items():
            below = f"{path}.{key}" if isinstance(key, str) else f"{path}[{key}]"
            yield from all_parts(part, below, (*within, id(value)))


class _Hole:
    """Where a tensor was."""


@dataclass(frozen=True)
class _HollowSize:
    """Stands for a ``torch.Size`` with holes in it, since a ``torch.Size`` can hold numbers only.
    A shape that depends on the batch is one: that of a distribution, say."""

    sizes: tuple[Any, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The ``torch.Size``, if the holes are filled with numbers; with other values, a tuple."""
        sizes = tuple(copy.deepcopy(size, memo) for size in self.sizes)
        if all(isinstance(size, int | torch.SymInt) for size in sizes):
            return torch.Size(sizes)
        return _HollowSize(sizes) if any(isinstance(size, _Hole) for size in sizes) else sizes


@dataclass(frozen=True)
class _Part:
    """A leaf of a pytree: an object with holes in it, a hole, or anything without tensors."""

    value: Any
    holes: list[_Hole]
    paths: list[str]  # to the holes
    kept: dict[int, Any]  # by id: modules and functions, which are not copied
    is_shared: bool = False  # whether it is an object without holes that nobody can copy

    @staticmethod
    def of(value: Any) -> tuple[list[Any], _Part]:
        if isinstance(value, VARYING):
            return [value], _Part(hole := _Hole(), [hole], [""], {})
        if not is_opened(value) and not is_shape(value):
            return [], _Part(value, [], [], {})
        within = list(all_parts(value))
        paths: dict[int, str] = {}
        for path, part, _ in within:
            if isinstance(part, VARYING):
                paths.setdefault(id(part), path)
        holes = {key: _Hole() for key in paths}
        kept = {id(part): part for _, part, is_leaf in within if is_leaf and callable(part)}
        shapes = {
            id(part): _HollowSize(tuple(holes.get(id(size), size) for size in part))
            for _, part, _ in within
            if is_shape(part) and not holes.keys().isdisjoint(map(id, part))
        }
        try:
            emptied = _copied(value, kept | holes | shapes)
        except Exception:
            if holes:
                raise
            return [], _Part(value, [], [], {}, is_shared=True)
        tensors = {id(part): part for _, part, _ in within}
        return (
            [tensors[key] for key in paths],
            _Part(emptied, list(holes.values()), list(paths.values()), kept),
        )

    def fill(self, tensors: Iterator[Any]) -> Any:
        if isinstance(self.value, _Hole):
            return next(tensors)
        if self.is_shared or (not self.holes and not is_opened(self.value)):
            return self.value
        return _copied(self.value, self.kept | {id(hole): next(tensors) for hole in self.holes})


def _copied(value: Any, instead: dict[int, Any]) -> Any:
    """A deep copy. ``instead`` has what to use in place of an object, by that object's id."""
    return copy.deepcopy(value, dict(instead))


@dataclass(frozen=True)
class Structure:
    """A value without its tensors."""

    parts: list[_Part]
    spec: pytree.TreeSpec
    same: tuple[int, ...] = ()
    """For the place of each tensor, the first place of the same object; () if all are different. A
    model may ask whether two arguments are one (``key is query``)."""

    @staticmethod
    def of(value: Any) -> tuple[list[Any], Structure]:
        """The tensors of a value, in order, and its structure.

        A tensor that occurs several times within an object counts once.
        """
        flat, spec = pytree.tree_flatten(value, is_leaf=is_shape)
        found = [_Part.of(part) for part in flat]
        tensors = [tensor for within, _ in found for tensor in within]
        return tensors, Structure([part for _, part in found], spec, same_objects(tensors))

    @property
    def opens_objects(self) -> bool:
        """Whether tensors are in attributes of objects that pytree has not been told of."""
        return any(part.holes and not isinstance(part.value, _Hole) for part in self.parts)

    def paths(self) -> list[str]:
        """The path of each tensor within the value, such as ``.past.layers[0].keys``."""
        marks = self._marks()
        found: dict[int, str] = {}
        for path, leaf in leaves(self._fill(marks)):
            found.setdefault(id(leaf), path)
        return [found[id(mark)] for mark in marks]

    def constants(self) -> list[Any]:
        """The leaves that are not tensors: numbers, strings, None."""
        marks = self._marks()
        own = set(map(id, marks))
        return [leaf for _, leaf in leaves(self._fill(marks)) if id(leaf) not in own]

    def without_tensors(self) -> list[Any]:
        """The leaves in which there are no tensors; an object is one leaf."""
        return [part.value for part in self.parts if not part.holes]

    def _marks(self) -> list[Tensor]:
        """A tensor for each place of a tensor. It has to be one, as constructors may check that."""
        return [torch.empty(0) for part in self.parts for _ in part.holes]

    def hollow(self) -> Any:
        """A value of this structure, with an empty tensor in the place of each tensor."""
        return self._fill(self._marks())

    def fits(self, other: Structure) -> bool:
        """Whether another structure has its tensors in the same places; constants may differ."""
        return self.spec == other.spec and all(
            ours.paths == theirs.paths for ours, theirs in zip(self.parts, other.parts, strict=True)
        )

    def fill(self, tensors: Iterable[Any]) -> Any:
        """A value of this structure with these tensors in their places; its objects are copies,
        also those without tensors, as a model may put some into them.
        Where one tensor was at several places, the tensor of the first of them is."""
        if self.same:
            given = list(tensors)
            tensors = [given[place] for place in self.same]
        return self._fill(tensors)

    def fill_each(self, values: Iterable[Any]) -> Any:
        """A value of this structure with these values in the places of its tensors: each in its
        own, also where one tensor was at several places."""
        return self._fill(values)

    def _fill(self, tensors: Iterable[Any]) -> Any:
        remaining = iter(tensors)
        return pytree.tree_unflatten([part.fill(remaining) for part in self.parts], self.spec)


def same_objects(tensors: Sequence[Any]) -> tuple[int, ...]:
    """For the place of each tensor, the first place of the same object; () if no tensor is at
    several places."""
    first: dict[int, int] = {}
    for place, tensor in enumerate(tensors):
        first.setdefault(id(tensor), place)
    return () if len(first) == len(tensors) else tuple(first[id(tensor)] for tensor in tensors)


def map_tensors(function: Callable[[Any], Any], value: Any) -> Any:
    """The value with each of its tensors replaced by what the function returns for it."""
    tensors, structure = Structure.of(value)
    return structure.fill(map(function, tensors))
