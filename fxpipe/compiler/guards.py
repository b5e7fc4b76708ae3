"""Guards: the conditions under which a compiled program may serve a call. Where one does not hold,
the call is compiled anew.

::

    compiled for x: float32 [*, 3, 64, 64], train, no autocast, attributes head.scale = 3

    guards on the call     arguments    which are given, and how they are nested
                           shape        dtype and sizes of a tensor; sizes that may vary are "*"
                           constant     an argument that is no tensor
                           rows         the largest batch for which the graph is right
                           sizes        the relations between sizes for which the graph is right
                           autocast     the dtype on each kind of device
    guards on the model    modules      the modules, their training flags, and which have hooks
                           state        the shapes of parameters, the attributes that were read

All guards of a program are one list. :meth:`Guards.failure` goes through it and says which guard
fails first, and how: ``shape of x: (8, 4) → (8, 6)``.

Whether the guards on the call hold follows from the call's :func:`signature`. So a program that has
served a call serves each call of equal signature, as long as its guards on the model hold.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from fxpipe.ir._torch import pytree
from fxpipe.ir.hooks import has_hooks
from fxpipe.ir.structure import Structure, is_opened, leaves
from fxpipe.meaning.sample import batch_size
from fxpipe.runtime.microbatch import InDim
from fxpipe.trace import bound_arguments
from fxpipe.trace.premises import Attribute, Premises
from fxpipe.trace.sizes import Condition, Sizes

ANY_SHAPES, ANY_SIZE, ONE_SIZE = KINDS = "any shapes", "any batch size", "one batch size"
"""The kinds of programs, by the sizes of inputs that they are right for. A symbolic graph has no
sizes as constants; an exported graph has those that the model makes constants, and conditions on
others; a graph that was traced with a single micro-batch is for batches of one size only."""

MANY = 1000  # the most shapes of inputs of which a guard remembers whether it holds
SHOWN = 8  # the most attributes, or names of modules, that are printed


class GuardedCall:
    """A call of a model, as the guards look at it. Its parts are computed when a guard asks.

    Args:
        dims: the batch dimension of each tensor of the call, None for one that is shared. If
            ``dims`` itself is None, guards do not compare batch dimensions.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dims: Sequence[InDim] | None = None,
    ) -> None:
        self.model, self.args, self.kwargs, self.dims = model, args, kwargs, dims

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name. Raises TypeError for those that the model does not take."""
        return dict(bound_arguments(self.model, self.args, self.kwargs).arguments)

    @cached_property
    def _taken_apart(self) -> tuple[list[Any], Structure]:
        return Structure.of(self.arguments)

    @property
    def tensors(self) -> list[Any]:
        """The tensors among the arguments, in order."""
        return self._taken_apart[0]

    @property
    def paths(self) -> list[str]:
        """The path of each tensor, such as ``past.layers[0].keys``."""
        return [path.removeprefix(".") for path in self._taken_apart[1].paths()]

    @cached_property
    def _flat(self) -> tuple[list[Any], Any]:
        return pytree.tree_flatten(self.arguments)

    @cached_property
    def _leaves(self) -> list[list[tuple[str, Any]]]:
        """The leaves of each part of the arguments: a part is an object that pytree does not know,
        or a leaf itself."""
        return [list(leaves(part)) for part in self._flat[0]]

    @cached_property
    def constants(self) -> list[Any]:
        """The arguments, and parts of arguments, that are no tensors."""
        return [
            value for part in self._leaves for _, value in part if not isinstance(value, Tensor)
        ]

    @property
    def paths_of_constants(self) -> list[str]:
        """The path of each constant, such as ``batch.names[1]``."""
        return [
            path.removeprefix(".")
            for path, value in leaves(self.arguments)
            if not isinstance(value, Tensor)
        ]

    @cached_property
    def built(self) -> Hashable:
        """How the arguments are nested, and where tensors are among them."""
        parts, spec = self._flat
        kinds = tuple(type(part) if is_opened(part) else None for part in parts)
        places = tuple(
            (path, isinstance(value, Tensor)) for part in self._leaves for path, value in part
        )
        return spec, kinds, places

    @property
    def autocast(self) -> tuple[torch.dtype | None, ...]:
        """The autocast dtype, or None, of each kind of device that tensors are on."""
        return autocast_of(self.tensors)


def autocast_of(tensors: Sequence[Tensor]) -> tuple[torch.dtype | None, ...]:
    """The autocast dtype, or None, of each kind of device that the tensors are on."""
    return tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in sorted({tensor.device.type for tensor in tensors} - {"meta"})
    )


class Guard(Protocol):
    """One condition. ``str`` of it says what is expected, in words; "" where that says nothing."""

    kind: ClassVar[str]

    def holds(self, call: GuardedCall) -> bool:
        """Whether the condition holds for a call, if all guards ahead of this one do."""

    def failure(self, call: GuardedCall) -> str:
        """What was expected, and what the call has instead; for a condition that does not hold."""


# ------------------------------------------------------------------------------ guards on the call


@dataclass(frozen=True)
class ArgumentsGuard:
    """The arguments that are given, how they are nested, and which of them are tensors."""

    kind: ClassVar[str] = "arguments"
    built: Hashable
    names: tuple[str, ...]

    def holds(self, call: GuardedCall) -> bool:
        return self.built == call.built

    def failure(self, call: GuardedCall) -> str:
        now = tuple(call.arguments)
        if now != self.names:
            return f"arguments: {', '.join(self.names)} → {', '.join(now)}"
        return f"arguments: {', '.join(now)} are nested otherwise"

    def __str__(self) -> str:
        return ""


@dataclass(frozen=True)
class ShapeGuard:
    """The dtype, the sizes and the batch dimension of a tensor.

    ``sizes`` has None for a size that may vary. If the graph is right for all dtypes and sizes,
    ``dtype`` and ``sizes`` are None. ``example`` and ``shape`` are for messages.
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
        example = f"{_dtype(tensor.dtype)} {_sizes(expected)}"
        if kind == ANY_SHAPES:
            return ShapeGuard(place, path, dim, None, None, example, shape)
        return ShapeGuard(place, path, dim, tensor.dtype, expected, example, shape, reasons)

    def holds(self, call: GuardedCall) -> bool:
        if call.dims is not None and call.dims[self.place] != self.dim:
            return False
        if self.sizes is None:
            return True
        tensor = call.tensors[self.place]
        return (
            tensor.dtype == self.dtype
            and len(tensor.shape) == len(self.sizes)
            and all(n in (None, m) for n, m in zip(self.sizes, tensor.shape, strict=True))
        )

    def failure(self, call: GuardedCall) -> str:
        tensor = call.tensors[self.place]
        if call.dims is not None and call.dims[self.place] != self.dim:
            return f"batch dimension of {self.path}: {self.dim} → {call.dims[self.place]}"
        if tensor.dtype != self.dtype and self.dtype is not None:
            return f"dtype of {self.path}: {_dtype(self.dtype)} → {_dtype(tensor.dtype)}"
        now = tuple(tensor.shape)
        said = f"shape of {self.path}: {self.shape} → {now}"
        if len(now) == len(self.shape):
            for i in self.changed(tensor):
                if i in self.reasons:
                    return f"{said} (dimension {i} has to be {self.shape[i]}: {self.reasons[i]})"
        return said

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
    value: Hashable  # (type, value), since 1 == 1.0 == True
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
    return type(value), value


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
        return _listed(said) if said else ""


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
        casts = [_dtype(cast) for cast in self.dtypes if cast]
        return f"autocast to {', '.join(casts)}" if casts else "no autocast"


# ----------------------------------------------------------------------------- guards on the model


class ModulesGuard:
    """The modules of a model, their training flags, and which of them have hooks."""

    kind: ClassVar[str] = "modules"

    def __init__(self, model: nn.Module) -> None:
        self.names = [name for name, _ in model.named_modules()]
        self.modules = [(m, m.training, has_hooks(m)) for m in model.modules()]
        self.children = [
            (module._modules, list(module._modules.values()))
            for module, _, _ in self.modules
            if module._modules
        ]

    def holds(self, call: GuardedCall | None = None) -> bool:
        return all(m.training is t and has_hooks(m) is h for m, t, h in self.modules) and all(
            [*now.values()] == then for now, then in self.children
        )

    def failure(self, call: GuardedCall) -> str:
        for name, (module, training, hooked) in zip(self.names, self.modules, strict=True):
            said = name or "the model"
            if module.training is not training:
                return f"mode of {said}: {_mode(training)} → {_mode(module.training)}"
            if has_hooks(module) is not hooked:
                now = "some → none" if hooked else "none → some"
                return f"hooks on {said}: {now}"
        return "modules: some have been added, removed or replaced"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModulesGuard) and self.modules == other.modules

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        _, training, _ = self.modules[0]
        pairs = list(zip(self.names, self.modules, strict=True))
        others = [name for name, (_, t, _) in pairs if t is not training]
        hooked = [name or "the model" for name, (_, _, h) in pairs if h]
        said = _mode(training) + (f" but for {_listed(others)}" if others else "")
        return said + (f", hooks on {_listed(hooked)}" if hooked else "")


class StateGuard:
    """The shapes of the model's parameters, and the attributes that its forward has read.

    Args:
        premises: the states for which the program is right; the model has to be in one of them.
    """

    kind: ClassVar[str] = "state"

    def __init__(self, model: nn.Module, premises: list[Premises]) -> None:
        self.model, self.premises = model, premises

    def holds(self, call: GuardedCall | None = None) -> bool:
        return any(premises.hold() for premises in self.premises)

    def failure(self, call: GuardedCall) -> str:
        return self.premises[-1].difference(_paths(self.model))

    def broken(self) -> list[Attribute]:
        """The attributes that have changed since the latest state was noted."""
        return self.premises[-1].broken()

    def widen(self, other: StateGuard, free: Iterable[nn.Module]) -> None:
        """Let this guard also hold in the states in which ``other`` holds, the guard of a program
        that computes the same.

        ``free``: the modules that the graphs call as a whole. They run their own Python, which
        reads their attributes at every call; so those of their attributes that have changed are
        dropped from the guard. An attribute of any other module stays guarded: although this
        change has made no difference, the next one may.
        """
        modules = set(free)
        changed = {each for p in self.premises for each in p.broken() if each[0] in modules}
        self.premises = [premises.without(changed) for premises in self.premises]
        if not any(premises.hold() for premises in self.premises):
            self.premises += [premises.without(changed) for premises in other.premises]

    def __str__(self) -> str:
        latest, paths = self.premises[-1], _paths(self.model)
        said = [f"{name} = {value}" for name, value in latest.said(paths)]
        more = len(said) - SHOWN
        if not said:
            return ""
        return f"attributes {', '.join(said[:SHOWN])}" + f" and {more} more" * (more > 0)


def _paths(model: nn.Module) -> dict[nn.Module, str]:
    return {module: name for name, module in model.named_modules()}


def _mode(training: bool) -> str:
    return "train" if training else "eval"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sizes(sizes: Iterable[int | None]) -> str:
    return f"[{', '.join('*' if n is None else str(n) for n in sizes)}]"


def _listed(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


# ----------------------------------------------------------------------- all guards of a program


class Guards:
    """The guards of one compiled program. ``str`` of them says what it has been compiled for;
    iterating gives them one by one, in the order in which they are checked.

    Args:
        call: the call that the program has been compiled for.
        kind: one of :data:`KINDS`.
        premises: the state of the model that the trace depends on.
        largest_batch: the largest number of rows for which the graph is right.
        sizes: the sizes of inputs for which the graph is right, as far as its front end knows them.
        parts: from the rows of a mini-batch to the sizes of its micro-batches.
    """

    def __init__(
        self,
        call: GuardedCall,
        kind: str,
        premises: Premises,
        largest_batch: int,
        sizes: Sizes | None = None,
        parts: Callable[[int], Iterable[int]] = lambda rows: (),
    ) -> None:
        self.model = call.model
        dims = tuple(call.dims or ())
        tensors = zip(call.paths, call.tensors, dims, strict=True)
        constants = zip(call.paths_of_constants, call.constants, strict=True)
        relations = []
        if sizes is not None and sizes.conditions and kind == ANY_SIZE:
            relations = [SizesGuard(sizes, tuple(call.paths), dims, parts)]
        self.modules = ModulesGuard(call.model)
        self.state = StateGuard(call.model, [premises])
        self._all: tuple[Guard, ...] = (
            ArgumentsGuard(call.built, tuple(call.arguments)),
            *(ShapeGuard.of(i, *each, kind, sizes) for i, each in enumerate(tensors)),
            *(ConstantGuard.of(i, *each) for i, each in enumerate(constants)),
            *([RowsGuard(largest_batch, dims)] if largest_batch < sys.maxsize else []),
            *relations,
            self.modules,
            AutocastGuard(call.autocast),
            self.state,
        )

    def __iter__(self) -> Iterator[Guard]:
        return iter(self._all)

    def serve(self, call: GuardedCall) -> bool:
        """Whether the program may serve a call: whether all guards hold."""
        return all(guard.holds(call) for guard in self._all)

    def hold(self) -> bool:
        """Whether the guards on the model hold: its modules, their modes and hooks, the shapes of
        its parameters and the attributes that its forward reads."""
        return self.modules.holds() and self.state.holds()

    def other_sizes(self, call: GuardedCall) -> bool:
        """Whether a call differs from the one that the program was compiled for in the size of an
        input's dimension, other than the batch's. (Guards may hold all the same.)"""
        return any(guard.has_other_sizes(call) for guard in self.shapes)

    def failure(self, *args: Any, **kwargs: Any) -> str:
        """Which guard a call of the model fails first, and how; "" if the program may serve it.

        >>> pipe.guards.failure(torch.zeros(8, 6))
        shape of x: (8, 4) → (8, 6)
        """
        return self.first_failure(GuardedCall(self.model, args, kwargs))

    def first_failure(self, call: GuardedCall) -> str:
        """Which guard fails first for a call whose arguments have been bound, and how; see
        :meth:`failure`."""
        return next((guard.failure(call) for guard in self._all if not guard.holds(call)), "")

    def like(self, other: Guards, *but: str) -> bool:
        """Whether these guards equal those of another program, leaving out the kinds ``but``."""
        ours, theirs = (
            [guard for guard in guards if guard.kind not in but] for guards in (self, other)
        )
        return ours == theirs

    @property
    def shapes(self) -> list[ShapeGuard]:
        """The guards on the shapes of tensors."""
        return [guard for guard in self._all if isinstance(guard, ShapeGuard)]

    @property
    def constants(self) -> list[ConstantGuard]:
        """The guards on arguments that are no tensors."""
        return [guard for guard in self._all if isinstance(guard, ConstantGuard)]

    def __str__(self) -> str:
        return f"compiled for {', '.join(filter(None, map(str, self._all)))}"

    def __repr__(self) -> str:
        return f"<Guards: {self}>"


# ------------------------------------------------------------------------------- the fast look-up


def signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    """The signature of a call, and the tensors in it. Two calls of equal signature pass the same
    guards on the call.

    Only a call of plain tensors, numbers and strings has a signature, so that the look-up takes
    less time than the smallest model. For any other call the signature is None, and every guard is
    checked.
    """
    parts = [*args, *kwargs.values()]
    tensors = [part for part in parts if type(part) is Tensor]
    if not all(isinstance(part, _CONSTANTS) or type(part) is Tensor for part in parts):
        return None, tensors
    kinds = [
        (part.shape, part.dtype) if isinstance(part, Tensor) else (type(part), part)
        for part in parts
    ]
    return (autocast_of(tensors), len(args), *kwargs, *kinds), tensors


_CONSTANTS = (type(None), bool, int, float, str)
