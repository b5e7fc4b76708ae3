"""The guards on a call: its arguments, the shapes of its tensors, its constants, and autocast."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxpipe.compiler.guards.calls import GuardedCall
from fxpipe.compiler.guards.guard import dtype_text, sizes_text, some_of
from fxpipe.ir.exact import exact
from fxpipe.meaning.sample import batch_size
from fxpipe.runtime.microbatch import LISTED, InDim
from fxpipe.trace.sizes import Condition, Sizes

ANY_SHAPES, ANY_SIZE, ONE_SIZE = KINDS = "any shapes", "any batch size", "one batch size"
"""The kinds of programs, by the sizes of inputs that they are right for. A symbolic graph has no
sizes as constants; an exported graph has those that the model makes constants, and conditions on
others; a graph that was traced with a single micro-batch is for batches of one size only."""

MANY = 1000  # the most shapes of inputs of which a guard remembers whether it holds


@dataclass(frozen=True)
class ArgumentsGuard:
    """The arguments that are given, how they are nested, and which of them are tensors."""

    kind: ClassVar[str] = "arguments"
    built: tuple[Hashable, ...]
    classes: tuple[Hashable, ...]
    names: tuple[str, ...]

    def holds(self, call: GuardedCall) -> bool:
        return self.built == call.built and self.classes == call.classes

    def failure(self, call: GuardedCall) -> str:
        now = tuple(call.arguments)
        if now != self.names:
            return f"arguments: {', '.join(self.names)} → {', '.join(now)}"
        if self.built == call.built:
            pairs = zip(call.paths, self.classes, call.classes, strict=True)
            path = next(path for path, then, now in pairs if then != now)
            return f"arguments: {path} is of another class, or has other attributes"
        if self.built[:-1] == call.built[:-1]:
            return f"arguments: other ones of {', '.join(now)} are one and the same tensor"
        return f"arguments: {', '.join(now)} are nested otherwise"

    def __str__(self) -> str:
        return ""


@dataclass(frozen=True)
class ShapeGuard:
    """The dtype, the sizes and the batch dimension of a tensor.

    ``sizes`` has None for a size that may vary. If the graph is right for all dtypes and sizes,
    ``dtype`` and ``sizes`` are None. Even then a size of 1, in another dimension than the batch's,
    remains 1: of one step nothing tells how a model treats several, so that the check of what it
    means says nothing of them. ``example`` and ``shape`` are for messages.
    """

    kind: ClassVar[str] = "shape"
    place: int  # among the tensors of the call
    path: str
    dim: InDim
    dtype: torch.dtype | None
    sizes: tuple[int | None, ...] | None
    example: str = field(compare=False)
    shape: tuple[int, ...] = field(compare=False)
    reasons: Mapping[int, str] = field(compare=False, default_factory=dict)
    """Why a size may not vary, where that is known: the line of the model that fixes it."""

    @staticmethod
    def of(
        place: int, path: str, tensor: Tensor, dim: InDim, kind: str, sizes: Sizes | None
    ) -> ShapeGuard:
        """The guard on a tensor of a call.

        Args:
            kind: the program's, one of :data:`KINDS`.
            sizes: the sizes for which the program is right, as far as its front end knows them.
        """
        shape = tuple(tensor.shape)
        varies = set() if kind == ONE_SIZE else {dim}
        reasons: dict[int, str] = {}
        if sizes is not None and kind != ONE_SIZE:
            varies |= {d for i, d in sizes.free if i == place}
            reasons = {d: why for (i, d), why in sizes.fixed.items() if i == place and why}
        expected = tuple(None if i in varies else n for i, n in enumerate(shape))
        example = f"{dtype_text(tensor.dtype)} {sizes_text(expected)}"
        if kind == ANY_SHAPES:
            return ShapeGuard(place, path, dim, None, None, example, shape)
        return ShapeGuard(place, path, dim, tensor.dtype, expected, example, shape, reasons)

    def holds(self, call: GuardedCall) -> bool:
        if call.dims is not None and call.dims[self.place] != self.dim:
            return False
        tensor = call.tensors[self.place]
        if self.sizes is None:
            return not self._has_grown_from_one(tensor)
        return (
            tensor.dtype == self.dtype
            and len(tensor.shape) == len(self.sizes)
            and all(n in (None, m) for n, m in zip(self.sizes, tensor.shape, strict=True))
        )

    def _has_grown_from_one(self, tensor: Tensor) -> bool:
        """Whether the tensor is longer where that of the compiled call had a size of 1. Among the
        tensors of a list of rows others tell what longer ones mean."""
        if tensor.ndim != len(self.shape) or self.dim == LISTED:
            return False
        pairs = enumerate(zip(self.shape, tensor.shape, strict=True))
        return any(then == 1 < now and dim != self.dim for dim, (then, now) in pairs)

    def failure(self, call: GuardedCall) -> str:
        tensor = call.tensors[self.place]
        if call.dims is not None and call.dims[self.place] != self.dim:
            return f"batch dimension of {self.path}: {self.dim} → {call.dims[self.place]}"
        if tensor.dtype != self.dtype and self.dtype is not None:
            return f"dtype of {self.path}: {dtype_text(self.dtype)} → {dtype_text(tensor.dtype)}"
        now = tuple(tensor.shape)
        said = f"shape of {self.path}: {self.shape} → {now}"
        if len(now) == len(self.shape):
            for i in self.changed(tensor):
                if i in self.reasons:
                    return f"{said} (dimension {i} {self._has_to_be(i)})"
        return said

    def _has_to_be(self, dim: int) -> str:
        """What fixes the size of a dimension, which is among ``reasons``."""
        return f"has to be {self.shape[dim]}: {self.reasons[dim]}"

    @property
    def constants(self) -> list[str]:
        """For each dimension whose size the model fixes, in words: which, its size, and the line
        of the model that does."""
        return [f"dimension {dim} of {self.path} {self._has_to_be(dim)}" for dim in self.reasons]

    @property
    def fixed(self) -> list[int]:
        """The dimensions that have to be of one size."""
        return [i for i, size in enumerate(self.sizes or ()) if size is not None]

    def has_other_sizes(self, call: GuardedCall) -> bool:
        """Whether the tensor at this path has as many dimensions as the one that the program was
        compiled for, and one other than the batch's is of another size."""
        tensor = dict(zip(call.paths, call.tensors, strict=True)).get(self.path)
        if tensor is None or tensor.ndim != len(self.shape):
            return False
        return any(
            then != now and dim != self.dim
            for dim, (then, now) in enumerate(zip(self.shape, tensor.shape, strict=True))
        )

    def changed(self, tensor: Tensor) -> list[int]:
        """The dimensions of a tensor, of as many dimensions, that have other sizes than these."""
        pairs = zip(self.sizes or (), tensor.shape, strict=False)
        return [i for i, (then, now) in enumerate(pairs) if then not in (None, now)]

    def __str__(self) -> str:
        such_as = "any dtype and shape, such as " if self.sizes is None else ""
        return f"{self.path}: {such_as}{self.example}"


@dataclass(frozen=True)
class ConstantGuard:
    """An argument that is no tensor, and so is a constant of the graph."""

    kind: ClassVar[str] = "constant"
    place: int  # among the constants of the call
    path: str
    value: Hashable  # (type, exact value), since 1 == 1.0 == True and 0.0 == -0.0
    shown: str = field(compare=False)

    @staticmethod
    def of(place: int, path: str, value: Any) -> ConstantGuard:
        """The guard on an argument of a call."""
        return ConstantGuard(place, path, _constant(value), reprlib.repr(value))

    def holds(self, call: GuardedCall) -> bool:
        return _constant(call.constants[self.place]) == self.value

    def failure(self, call: GuardedCall) -> str:
        return f"{self.path}: {self.shown} → {reprlib.repr(call.constants[self.place])}"

    def __str__(self) -> str:
        return f"{self.path} = {self.shown}"


def _constant(value: Any) -> Hashable:
    """A constant with its type; in place of a value that cannot be hashed, its text."""
    try:
        hash(value)
    except TypeError:
        return type(value), repr(value)
    return type(value), exact(value)


@dataclass(frozen=True)
class RowsGuard:
    """The largest batch for which the graph is right: on a larger one the model takes another
    branch, which is not in the graph."""

    kind: ClassVar[str] = "rows"
    most: int
    dims: tuple[InDim, ...]

    def _rows(self, call: GuardedCall) -> int:
        return batch_size(call.tensors, self.dims) or 0

    def holds(self, call: GuardedCall) -> bool:
        return self._rows(call) <= self.most

    def failure(self, call: GuardedCall) -> str:
        return f"rows: at most {self.most} → {self._rows(call)}"

    def __str__(self) -> str:
        return f"at most {self.most} rows"


@dataclass(frozen=True)
class SizesGuard:
    """The relations between sizes for which an exported graph is right, such as
    ``ids.size(1) <= 1024``."""

    kind: ClassVar[str] = "sizes"
    sizes: Sizes
    paths: tuple[str, ...]  # of the tensors of the call
    dims: tuple[InDim, ...]
    parts: Callable[[int], Iterable[int]] = field(compare=False)
    """The sizes of the micro-batches that a mini-batch of so many rows is cut into."""
    _known: dict[Hashable, Condition | None] = field(compare=False, default_factory=dict)

    def broken(self, call: GuardedCall) -> Condition | None:
        """The first relation that does not hold for a call; None if all hold."""
        shapes = tuple(tuple(tensor.shape) for tensor in call.tensors)
        if shapes not in self._known:
            if len(self._known) > MANY:
                self._known.clear()
            rows = batch_size(call.tensors, self.dims)
            parts = [] if rows is None else self.parts(rows)
            self._known[shapes] = self.sizes.broken(shapes, parts)
        return self._known[shapes]

    def holds(self, call: GuardedCall) -> bool:
        return self.broken(call) is None

    def failure(self, call: GuardedCall) -> str:
        condition = self.broken(call)
        assert condition is not None, "it is asked for where the guard does not hold"
        places = [self.sizes.symbols[symbol] for symbol in condition.relation.free_symbols]
        now = ", ".join(
            f"{self.paths[i]} {tuple(call.tensors[i].shape)}"
            for i in sorted({i for i, _ in places})
        )
        where = f" (needed by {condition.where})" if condition.where else ""
        return f"sizes: {self._said(condition)} does not hold for {now}{where}"

    def _said(self, condition: Condition) -> str:
        places = self.sizes.symbols.items()
        return condition.text({s: f"{self.paths[i]}.size({d})" for s, (i, d) in places})

    def __str__(self) -> str:
        said = [self._said(each) for each in self.sizes.conditions if each.where]
        return some_of(said) if said else ""


@dataclass(frozen=True)
class AutocastGuard:
    """The autocast dtype, or None, of each kind of device that tensors of the call are on."""

    kind: ClassVar[str] = "autocast"
    dtypes: tuple[torch.dtype | None, ...]

    def holds(self, call: GuardedCall) -> bool:
        return call.autocast == self.dtypes

    def failure(self, call: GuardedCall) -> str:
        return f"{self} → {AutocastGuard(call.autocast)}"

    def __str__(self) -> str:
        casts = [dtype_text(cast) for cast in self.dtypes if cast]
        return f"autocast to {', '.join(casts)}" if casts else "no autocast"


@dataclass(frozen=True)
class GradientsGuard:
    """Which tensors of the call require gradients, and whether it records gradients, for a model
    whose forward asks for that."""

    kind: ClassVar[str] = "gradients"
    flags: tuple[bool, ...]
    recorded: bool

    def holds(self, call: GuardedCall) -> bool:
        return self.flags == call.require_gradients and self.recorded is call.records_gradients

    def failure(self, call: GuardedCall) -> str:
        if self.recorded is not call.records_gradients:
            return f"torch.is_grad_enabled(): {self.recorded} → {call.records_gradients}"
        pairs = zip(call.paths, self.flags, call.require_gradients, strict=True)
        path, then, now = next(each for each in pairs if each[1] is not each[2])
        return f"{path}.requires_grad: {then} → {now}"

    def __str__(self) -> str:
        return ""
