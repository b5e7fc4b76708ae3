"""Guards: the conditions under which a compiled program may serve a call. Where they do not hold,
the call is compiled anew.

::

    compiled for x: float32 [*, 3, 64, 64], train, no autocast, attributes head.scale = 3

    guards on the call     the structure of the arguments; the values of those that are no tensors;
                           the sizes and dtypes that the graph has as constants; autocast
    guards on the model    its modules, their training flags, and whether they have hooks; the
                           shapes of its parameters; the attributes that its forward has read

The program of a call is looked up in two ways. The signature of the call, which takes microseconds,
finds the program that has served an equal call. If there is none, the full key finds a program
that was compiled for a call of another signature, where the difference does not matter. In both
cases the attributes of the model are then compared with what they were at compile time.
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
"""The kinds of programs, by the sizes of inputs that they are right for. A symbolic graph has no
sizes as constants; an exported graph has all but the batch's; a graph that was traced with a single
micro-batch is for batches of one size only."""

SHOWN = 8  # the most attributes, or names of modules, that are printed


class CallKey(NamedTuple):
    """The key of a call in the cache: calls that one program serves have equal keys."""

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
        """The key of a call for programs of a kind.

        ``dims``: for each tensor of the call its batch dimension, or None.
        """
        varying = [None] * len(dims) if kind == ONE_SIZE else dims
        shapes = kind != ANY_SHAPES
        inputs = input_key(model, args, kwargs, batch_dims=varying, shapes=shapes)
        return CallKey(kind, inputs, tuple(dims))

    @property
    def but_for_constants(self) -> CallKey:
        """The key without the arguments that are no tensors: calls that differ in these alone have
        an equal one."""
        return self._replace(inputs=self.inputs._replace(constants=()))


@dataclass
class Guards:
    """The guards of one compiled program. ``str`` of them says what it has been compiled for.

    Args:
        model: the model that has been compiled.
        kind: one of :data:`KINDS`.
        premises: the states of the model's attributes and parameters for which the program is
            right; the model has to be in one of them.
        largest_batch: the largest number of rows for which the graph is right.
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
        """Add the guards on the call that the program has been compiled for; returns its key."""
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
        """Whether the model's attributes and the shapes of its parameters are as they were at
        compile time, or in another state for which the program is right."""
        return any(premises.hold() for premises in self.premises)

    def serve(self, batch: int) -> bool:
        """Whether the program can serve a call with an equal key and a batch of so many rows."""
        return batch <= self.largest_batch and self.hold()

    def widen(self, other: Guards, free: Iterable[nn.Module]) -> None:
        """Let these guards hold, too, where the guards of a program hold that computes the same.

        ``free``: the modules that the graphs call as a whole. They run their own Python, which
        reads their attributes at every call; so those of their attributes that have changed are
        dropped from the guards. An attribute of any other module stays a guard: although this
        change has made no difference, the next one may.
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
        """The attributes that the program depends on, as pairs of a module and a name."""
        return self.premises[-1].attributes() if self.premises else []


def _mode(model: nn.Module, modules: Sequence[tuple[Any, bool, bool]]) -> str:
    """The mode of a model and the modules with hooks, in words: ``train but for a.b, hooks on
    c``."""
    (_, training, _), *_ = modules
    names = [name for name, _ in model.named_modules()]
    if len(names) != len(modules):  # modules have been added or removed since
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
    """An attribute of a module and its value, in words: ``a.b = 3``."""
    module, name = attribute
    path = next((path for path, each in model.named_modules() if each is module), "?")
    value = reprlib.repr(getattr(module, name, None))
    return f"{f'{path}.{name}'.removeprefix('.')} = {value}"


# ------------------------------------------------------------------------------- the fast look-up


def signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    """The signature of a call, and the tensors in it. As long as the model has not changed, calls
    with equal signatures run the same program.

    Only a call of plain tensors, numbers and strings has a signature, so that the look-up takes
    less time than the smallest model. For any other call the signature is None, and the full key
    has to decide.
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
    """A snapshot of the modules of a model, of their training flags, and of whether they have
    hooks. Signatures are valid as long as it holds."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = [(m, m.training, has_hooks(m)) for m in model.modules()]
        self.children = [
            (module._modules, list(module._modules.values()))
            for module, _, _ in self.modules
            if module._modules
        ]

    def holds(self) -> bool:
        """Whether the model still has these modules, with these training flags, and with hooks on
        the same ones."""
        return all(m.training is t and has_hooks(m) is h for m, t, h in self.modules) and all(
            [*now.values()] == then for now, then in self.children
        )
