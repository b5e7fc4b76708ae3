"""What the user says of batch dimensions: ``in_dims`` and ``out_dims`` are prefixes of the trees of
the arguments and of the output, as for ``torch.func.vmap``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fxpipe.ir._torch import pytree
from fxpipe.ir.errors import Unsupported
from fxpipe.ir.structure import Structure, children
from fxpipe.meaning.errors import BatchError
from fxpipe.runtime.microbatch import LISTED, SUM
from fxpipe.trace import bound_arguments

INFER = object()
"""Stands in place of a dimension that the user has not given."""


@dataclass(frozen=True)
class Input:
    """A tensor among the inputs, and what has been said of its batch dimension."""

    name: str
    tensor: Tensor
    said: Any

    def __str__(self) -> str:
        return f"{self.name} {tuple(self.tensor.shape)}"

    @property
    def dim(self) -> int | None:
        """The dimension that has been said, counted from the front."""
        return from_the_front("in_dims", self.said, self.name, self.tensor.shape)


class Slot:
    """Stands for a tensor in the structure of the inputs or outputs. :func:`say` sets its path, and
    what the user says of it."""

    path: str = "an output"
    said: Any = INFER
    said_of_loss: Any = INFER
    """If the tensor is the model's loss: how ``loss_weight`` says that it is put together."""


def named_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], in_dims: Any
) -> list[Input]:
    """The tensors among the inputs, in the order of pytree leaves, and what ``in_dims`` says.

    Raises:
        BatchError: if ``in_dims`` does not fit the arguments.
        Unsupported: for sequences that are packed, which have no dimension of their rows.
    """
    arguments = bound_arguments(model, args, kwargs).arguments
    inputs = []
    for name, value in arguments.items():
        said = _of_argument(in_dims, list(arguments), name)
        _refuse_packed(name, value)
        tensors, structure = Structure.of(value)
        if not tensors and isinstance(in_dims, Mapping | tuple | list):
            _refuse_without_tensors(said, name, value)
        slots = [Slot() for _ in tensors]
        say(said, structure.fill_each(slots), name)
        inputs += [Input(s.path, t, s.said) for t, s in zip(tensors, slots, strict=True)]
    return inputs


def of_no_tensors(value: Any) -> str:
    """What a value with one element for each row may be that is no tensor, in words: a list of
    numbers or strings, or an array. "" if it is nothing of the kind."""
    kind = type(value).__name__
    if isinstance(value, list | tuple) and len(value) > 1:
        kinds = {type(each) for each in value}
        parts = "numbers" if kinds <= {bool, int, float} else "strings" if kinds == {str} else ""
        return f"a {kind} of {len(value)} {parts}" if parts else ""
    return f"an {kind}" if isinstance(value, np.ndarray) and value.ndim else ""


def _refuse_without_tensors(said: Any, name: str, value: Any) -> None:
    """Raise BatchError if ``in_dims`` says how to cut an argument that has no tensors."""
    if said is not None and said is not INFER and (found := of_no_tensors(value)):
        raise BatchError(
            f"in_dims says {said!r} for {name}, which is {found}, and only tensors are cut: each "
            "micro-batch would get all of it; give what the model computes with as a tensor, and "
            "None in in_dims for what all micro-batches share"
        )


def _refuse_packed(name: str, value: Any) -> None:
    parts, _ = pytree.tree_flatten(value, is_leaf=lambda part: isinstance(part, PackedSequence))
    if any(isinstance(part, PackedSequence) for part in parts):
        raise Unsupported(
            f"the input {name} is a PackedSequence, or has one, which cannot be cut into "
            "micro-batches: give the padded batch and the lengths as two tensors, and pack them in "
            "a module of its own within the model, by pack_padded_sequence(x, lengths, "
            "batch_first=True, enforce_sorted=False), which pads what comes of them again, by "
            "pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])"
        )


def from_the_front(what: str, dim: Any, name: str, shape: Sequence[int]) -> int | None:
    """What ``in_dims`` or ``out_dims`` says of a tensor, counted from the front."""
    if dim is None:
        return None
    if not isinstance(dim, int):
        raise BatchError(
            f"{what} says {dim!r} for {name}, which is a tensor: give the dimension that is the "
            "batch, or None"
        )
    if not -len(shape) <= dim < len(shape):
        raise BatchError(
            f"{what} says that dimension {dim} of {name} is the batch, but its shape is "
            f"{tuple(shape)}"
        )
    return dim % len(shape)


def _of_argument(in_dims: Any, names: Sequence[str], name: str) -> Any:
    """The part of ``in_dims`` that is for one argument; INFER if it says nothing of it."""
    if in_dims is None:
        return INFER
    if isinstance(in_dims, int) or in_dims == LISTED:
        return in_dims
    if isinstance(in_dims, Mapping):
        unknown = set(in_dims) - set(names)
        if unknown:
            raise BatchError(
                f"in_dims names {sorted(unknown)[0]!r}, but the arguments are {', '.join(names)}"
            )
        return in_dims.get(name, INFER)
    if not isinstance(in_dims, tuple | list):
        raise BatchError(
            f"in_dims is {in_dims!r}: give a dimension for all arguments, a tuple with one for "
            "each, or a dict from their names"
        )
    if len(in_dims) != len(names):
        raise BatchError(
            f"in_dims has {len(in_dims)} entries for {len(names)} arguments ({', '.join(names)})"
        )
    return in_dims[names.index(name)]


def broadcast(dims: Any, value: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every leaf of a value with its path, and the dimension that a prefix of its tree says."""
    parts = None if isinstance(value, Slot) else children(value)
    if parts is None:
        yield path, value, dims
        return
    for key, part in parts.items():
        below = f"{path}.{key}" if isinstance(key, str) else f"{path}[{key}]"
        if dims is None or dims is INFER or dims in (SUM, LISTED) or isinstance(dims, int):
            yield from broadcast(dims, part, below)
        elif isinstance(dims, Mapping) and dims.keys() <= parts.keys():
            yield from broadcast(dims.get(key, INFER), part, below)
        elif isinstance(dims, tuple | list) and isinstance(key, int) and len(dims) == len(parts):
            yield from broadcast(dims[key], part, below)
        else:
            raise BatchError(
                f"{dims!r} does not fit {path or 'the value'}, a {type(value).__name__} of "
                f"{', '.join(map(str, parts))}"
            )


def say(dims: Any, value: Any, path: str) -> None:
    """Tell each slot within a value where it is, and what a prefix of the value's tree says."""
    for where, slot, dim in broadcast(dims, value, path):
        if isinstance(slot, Slot):
            slot.path, slot.said = where, dim
