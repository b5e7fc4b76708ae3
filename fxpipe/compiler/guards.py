"""Guards: all that a compiled program depends on. It serves a call as long as they hold.

::

    compiled for x: float32 [*, 3, 64, 64], train, no autocast, attributes head.scale = 3

    of the call     the structure of the arguments, those that are no tensors, sizes and dtypes
                    that the graph has as constants, autocast
    of the model    its modules, their training flags, whether they have hooks; the shapes of its
                    parameters; the attributes that its forward has read

A call is checked twice. Its signature, which is made in microseconds, finds the program of an equal
call before; the full key finds one that was compiled for a call that differs where that makes no
difference. Either way the model's attributes are compared with what they were.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from fxpipe.ir.hooks import has_hooks
from fxpipe.ir.structure import Structure, leaves
from fxpipe.trace import InputKey, autocast_of, bound_arguments, input_key
from fxpipe.trace.premises import Attribute, Premises

ANY_SHAPES, ANY_SIZE, ONE_SIZE = KINDS = "any shapes", "any batch size", "one batch size"
"""For which calls one program serves: a symbolic graph has no sizes; an exported one has all but
the batch's; one that was traced with a single micro-batch is for batches of that one size."""

SHOWN = 8  # attributes that are printed


class CallKey(NamedTuple):
    """What calls have in common that one program serves."""

    kind: str
    inputs: InputKey
    dims: tuple[int | None, ...]

    @staticmethod
    def of(
        model: nn.Module,
        kind: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dims: Sequence[int | None],
    ) -> CallKey:
        """The key of a call. ``dims``: the batch dimension of each tensor in it."""
        varying = [None] * len(dims) if kind == ONE_SIZE else dims
        shapes = kind != ANY_SHAPES
        inputs = input_key(model, args, kwargs, batch_dims=varying, shapes=shapes)
        return CallKey(kind, inputs, tuple(dims))

    @property
    def but_for_constants(self) -> CallKey:
        """The same for all calls that differ in arguments that are no tensors, and in no other."""
        return self._replace(inputs=self.inputs._replace(constants=()))


@dataclass
class Guards:
    """The guards of one compiled program. ``print`` says what it has been compiled for.

    Args:
        model: the model that has been compiled.
        kind: one of :data:`KINDS`.
        premises: states of the model's attributes and parameters; one of them has to hold.
        largest_batch: the most rows for which the graph is right.
    """

    model: nn.Module
    kind: str
    premises: list[Premises]
    largest_batch: int
    key: CallKey | None = None
    inputs: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()

    def learn(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: Sequence[int | None]
    ) -> CallKey:
        """Take the guards of the call that it has been compiled for; gives their key."""
        arguments = dict(bound_arguments(self.model, args, kwargs).arguments)
        tensors, structure = Structure.of(arguments)
        self.key = CallKey.of(self.model, self.kind, args, kwargs, dims)
        self.inputs = tuple(
            f"{path.removeprefix('.')}: {self._sizes(tensor, dim)}"
            for path, tensor, dim in zip(structure.paths(), tensors, dims, strict=True)
        )
        self.constants = tuple(
            f"{path.removeprefix('.')} = {reprlib.repr(value)}"
            for path, value in leaves(arguments)
            if not isinstance(value, Tensor)
        )
        return self.key

    def hold(self) -> bool:
        """Whether the model's attributes and parameters are such that the graphs are right."""
        return any(premises.hold() for premises in self.premises)

    def serve(self, batch: int) -> bool:
        """Whether the program serves a batch of so many rows, for a call of its key."""
        return batch <= self.largest_batch and self.hold()

    def widen(self, other: Guards, free: Iterable[nn.Module]) -> None:
        """Hold also where the guards of an equal program hold.

        ``free``: the modules that the graphs call as they are. These do what their attributes say,
        so attributes of theirs that have changed are no guards from now on. What attributes of
        other modules are may make a difference next time.
        """
        modules = set(free)
        changed = {each for p in self.premises for each in p.broken() if each[0] in modules}
        self.premises = [premises.without(changed) for premises in self.premises]
        if not self.hold():
            self.premises += [premises.without(changed) for premises in other.premises]

    def _sizes(self, tensor: Tensor, dim: int | None) -> str:
        dtype = str(tensor.dtype).removeprefix("torch.")
        varies = None if self.kind == ONE_SIZE else dim
        sizes = ", ".join("*" if i == varies else str(n) for i, n in enumerate(tensor.shape))
        shown = f"{dtype} [{sizes}]"
        return f"any dtype and shape, such as {shown}" if self.kind == ANY_SHAPES else shown

    def __str__(self) -> str:
        mode = "train" if self.model.training else "eval"
        parts = [*self.inputs, *self.constants]
        if self.key is not None:
            mode = _mode(self.model, self.key.inputs.modules)
            casts = [str(cast).removeprefix("torch.") for cast in self.key.inputs.autocast if cast]
            parts += [mode, f"autocast to {', '.join(casts)}" if casts else "no autocast"]
        if self.attributes:
            first = [_said(self.model, each) for each in self.attributes[:SHOWN]]
            more = len(self.attributes) - SHOWN
            parts.append(f"attributes {', '.join(first)}" + f" and {more} more" * (more > 0))
        return f"compiled for {', '.join(parts)}"

    @property
    def attributes(self) -> list[Attribute]:
        """The attributes that the program depends on: modules, and names."""
        return self.premises[-1].attributes() if self.premises else []


def _mode(model: nn.Module, modules: Sequence[tuple[Any, bool, bool]]) -> str:
    """``train``, ``eval``, or ``train but for a.b``; and which modules have hooks."""
    (_, training, _), *_ = modules
    names = [name for name, _ in model.named_modules()]
    if len(names) != len(modules):  # the model has other modules by now
        return "train" if training else "eval"
    others = [name for name, (_, t, _) in zip(names, modules, strict=True) if t is not training]
    hooked = [name or "the model" for name, (*_, h) in zip(names, modules, strict=True) if h]
    said = "train" if training else "eval"
    if others:
        said += f" but for {_listed(others)}"
    return said + (f", hooks on {_listed(hooked)}" if hooked else "")


def _listed(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _said(model: nn.Module, attribute: Attribute) -> str:
    """``a.b = 3``."""
    module, name = attribute
    path = next((path for path, each in model.named_modules() if each is module), "?")
    value = reprlib.repr(getattr(module, name, None))
    return f"{f'{path}.{name}'.removeprefix('.')} = {value}"


# ------------------------------------------------------------------------- what is checked at once


def signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    """What decides, the model being as it was, which program a call runs, and the tensors in it;
    None if it takes the full key to decide.

    It is made for the usual call, of tensors, numbers and names, so that looking it up takes less
    time than the smallest model.
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


class ModelState:
    """The modules of a model, their training flags and whether they have hooks, as they were."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = [(m, m.training, has_hooks(m)) for m in model.modules()]
        self.children = [
            (module._modules, list(module._modules.values()))
            for module, _, _ in self.modules
            if module._modules
        ]

    def holds(self) -> bool:
        """Whether they still are."""
        return all(m.training is t and has_hooks(m) is h for m, t, h in self.modules) and all(
            [*now.values()] == then for now, then in self.children
        )
