"""Compares an output of which ``out_dims`` says how it is put together, and which is read that way
only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir.tensors import largest_of
from fxpipe.ir.text import told_apart
from fxpipe.meaning.compare import MEAN, difference, growing, is_real, put_together, reading
from fxpipe.meaning.problem import Problem
from fxpipe.meaning.said import from_the_front
from fxpipe.runtime.microbatch import ANY, SUM, Dim

_OUTSIDE = "compute it outside of the model, from what it is made of, or give chunks=1"
_HARMLESS = 'a difference that does no harm is accepted with check="warn"'


def is_plain(value: Any) -> bool:
    """Whether a value is a tensor whose elements can be compared."""
    return isinstance(value, Tensor) and value.layout == torch.strided


def as_said(
    path: str, said: Any, whole: Tensor, parts: Sequence[Tensor], sizes: Sequence[int]
) -> tuple[Dim, ...] | Problem:
    """How an output is put together as ``out_dims`` says, or what differs from the whole then.

    Args:
        said: a dimension, None for a mean over the rows, or "sum".
        parts: the output for each part of a sample; ``sizes`` are their numbers of rows.

    Raises:
        BatchError: for a dimension that does not exist.
    """
    if said == SUM:
        return _reduced(path, SUM, "is added up", whole, parts, sizes)
    dim = from_the_front("out_dims", said, path, whole.shape)
    if dim is None:
        how = "is averaged" if is_real(whole) else "is the same for all micro-batches"
        return _reduced(path, MEAN, f"has no batch dimension and {how}", whole, parts, sizes)
    return _joined(path, dim, whole, parts, sizes)


def _joined(
    path: str, dim: int, whole: Tensor, parts: Sequence[Tensor], sizes: Sequence[int]
) -> tuple[Dim, ...] | Problem:
    """The same for an output that is joined along a dimension."""
    rows, shape = sum(sizes), tuple(whole.shape)
    if all(part.shape == shape for part in parts) or _grows_elsewhere(dim, whole, parts):
        return _does_not_grow(path, dim, whole, parts)
    said = f"out_dims says that {path} is joined along dimension {dim}"
    divided = " and ".join(map(str, sizes))
    expected = [*shape[:dim], sum(part.shape[dim] for part in parts), *shape[dim + 1 :]]
    if any(_but(dim, part.shape) != _but(dim, shape) for part in parts) or expected != [*shape]:
        others = ", ".join(str(tuple(part.shape)) for part in parts)
        return Problem(
            path,
            f"{said}, but its shape is {shape} for {rows} rows, and {others} for {divided} of "
            "them, which are not joined to the former",
            remedy=f"{_OUTSIDE}; {_HARMLESS}",
        )
    if whole.is_meta:
        return (dim,)
    found = difference(whole, put_together(dim, parts, sizes))
    if not found:
        return (dim,)
    return Problem(
        path,
        f"{said}, but it depends on which other rows there are: joined of {divided} rows it "
        f"differs by {found} from that of {rows} rows",
        difference=found,
        remedy=f"{_OUTSIDE}; {_HARMLESS}",
    )


def _but(dim: int, shape: Sequence[int]) -> list[int]:
    """A shape without one of its dimensions."""
    return [size for d, size in enumerate(shape) if d != dim]


def _grows_elsewhere(dim: int, whole: Tensor, parts: Sequence[Tensor]) -> bool:
    """Whether parts are joined to the shape of the whole along another dimension."""
    try:
        return growing(whole, parts) not in (None, dim)
    except ValueError:
        return False


def _does_not_grow(path: str, dim: int, whole: Tensor, parts: Sequence[Tensor]) -> Problem:
    along = growing(whole, parts)
    which = "none does" if along is None else f"dimension {along} does"
    return Problem(
        path,
        f"out_dims says that dimension {dim} of {path} is the batch, but its size, "
        f"{whole.shape[dim]}, does not depend on the number of rows ({which})",
        remedy="give that dimension, or None for an output without a batch",
    )


def _reduced(
    path: str, said: Dim, how: str, whole: Tensor, parts: Sequence[Tensor], sizes: Sequence[int]
) -> tuple[Dim, ...] | Problem:
    """The same for an output that is averaged, or added up."""
    text = f"out_dims says that {path} {how}"
    rows, divided = sum(sizes), " and ".join(map(str, sizes))
    if any(part.shape != whole.shape for part in parts):
        others = ", ".join(str(tuple(part.shape)) for part in parts)
        return Problem(
            path,
            f"{text}, but its shape depends on the number of rows: it is {tuple(whole.shape)} for "
            f"{rows} of them, and {others} for {divided}",
            remedy="give out_dims with the dimension that grows for it, or chunks=1",
        )
    if whole.is_meta:
        return (said,)
    ways = reading(whole, parts, sizes).dims
    if said in ways or (said is MEAN and ANY in ways):
        return (said,)
    is_mean, is_loss = said is MEAN and is_real(whole), not whole.ndim and is_real(whole)
    made = put_together(said, parts, sizes)
    apart = difference(whole, made, max(map(largest_of, parts)))
    differs = f"that of {divided} rows, put together so, differs by {apart} from that of {rows}"
    if is_loss:
        so, other = told_apart(whole.item(), made.item())
        by = "mean" if is_mean else "sum"
        differs = (
            f"it is {so} for {rows} rows made from those of the example, and {other} as the {by} "
            f"of {divided} of them"
        )
    return Problem(
        path,
        f"{text}, but it is {_instead(ways)}: {differs}",
        is_scalar=is_loss and is_mean and not ways,
        difference=apart,
        remedy="leave it out of out_dims" if ways else f"{_OUTSIDE}; {_HARMLESS}",
    )


def _instead(ways: Sequence[Dim]) -> str:
    """What an output is that is not what has been said."""
    if SUM in ways:
        return "a sum over the rows"
    if MEAN in ways:
        return "a mean over the rows"
    return "the same for all rows" if ANY in ways else "something else"
