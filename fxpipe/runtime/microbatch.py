"""Micro-batches: a mini-batch is cut into them, and their outputs are put together again."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir._torch import pytree
from fxpipe.ir.structure import leaves, map_tensors

ANY = "any"
"""Given in place of a batch dimension: the value does not depend on the batch, so that all
micro-batches have the same and the first one's is taken."""

SUM = "sum"
"""Given in place of a batch dimension: the value is a sum over rows, so that the mini-batch's value
is the sum of the micro-batches' values."""

WEIGHTED = "weighted"
"""Given in place of a batch dimension: the value is a loss, so that the mini-batch's value is the
sum of the micro-batches' values, each times the weight that the user's ``loss_weight`` gives it."""

LISTED = "list"
"""Given in place of a batch dimension: the value belongs to a list with one element for each row,
which is cut between its elements."""

InDim = int | None | str
"""The batch dimension of an input: None if all micro-batches share it, or LISTED."""

Dim = int | None | str
Dims = Dim | tuple[Dim, ...]


@dataclass(frozen=True)
class Parts:
    """The values of one leaf in all micro-batches, where they stay apart: if the leaf is in a list
    with one element for each row, which is cut between its elements; or if it is a state that the
    stages keep from call to call."""

    values: tuple[Any, ...]
    dim: int | None = None
    """The batch dimension of a state, along which the values could be joined."""

    def detach(self) -> Parts:
        """The tensors without their history."""
        return Parts(tuple(value.detach() for value in self.values), self.dim)

    def clone(self) -> Parts:
        """A copy of every tensor."""
        return Parts(tuple(value.clone() for value in self.values), self.dim)

    def joined(self) -> Tensor:
        """The parts of a state, joined along its batch dimension to one tensor."""
        assert self.dim is not None
        return torch.cat(self.values, self.dim)


@dataclass(frozen=True)
class ListOfRows:
    """A list with one element for each row, such as the boxes and labels of each image: it is cut
    between its elements, which may be of any kind."""

    elements: list[Any] | tuple[Any, ...]

    def detach(self) -> ListOfRows:
        """The list with tensors without history."""
        return ListOfRows(map_tensors(_detached, self.elements))

    def cut(self, chunks: int) -> tuple[Sequence[Any], ...]:
        """A list for each of ``chunks`` micro-batches."""
        return tuple(self.elements[a:b] for a, b in _ranges(len(self.elements), chunks))


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def joined(values: Sequence[Any]) -> Any:
    """The output of the mini-batch, from outputs of micro-batches that differ only in lists with
    one element for each row: these lists are joined."""
    first, second, *_ = values
    if type(first) is list:
        pairs = zip(leaves(first), leaves(second), strict=True)
        if any(isinstance(one, Tensor) and one is not other for (_, one), (_, other) in pairs):
            return [row for value in values for row in value]
    if isinstance(first, dict):
        copied = copy.copy(first)
        for key in first:
            copied[key] = joined([value[key] for value in values])
        return copied
    if type(first) in (tuple, list):
        return type(first)(joined(each) for each in zip(*values, strict=True))
    parts = zip(leaves(first), leaves(second), strict=True)
    if any(isinstance(one, Tensor) and one is not other for (_, one), (_, other) in parts):
        raise TypeError(
            f"the output has a {type(first).__name__} with a list in it that has one element for "
            "each row: such lists are joined in dicts, lists and tuples only"
        )
    return first


def first_rows(tensor: Tensor, dim: int, rows: int) -> Tensor:
    """The first ``rows`` rows of a tensor along ``dim``; if it has fewer, they are repeated."""
    return rows_at(tensor, dim, torch.arange(rows) % tensor.shape[dim])


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def rows_at(tensor: Tensor, dim: int, places: Tensor) -> Tensor:
    """The rows of a tensor with these numbers along ``dim``, as a copy. PyTorch selects no integers
    without a sign of several bytes: they are moved as the integers with a sign that have the same
    bytes."""
    places = places.to(tensor.device)
    signed = _SIGNED.get(tensor.dtype)
    if signed is None:
        return tensor.index_select(dim, places)
    return tensor.view(signed).index_select(dim, places).view(tensor.dtype)


def scatter(tensor: Any, dim: InDim, chunks: int) -> tuple[Any, ...]:
    """Cut a tensor into ``chunks`` parts along ``dim``, of sizes at most one apart, large ones
    first.

    Without a dimension (None) all micro-batches share the tensor. The parts are views, so no memory
    is copied. For ``LISTED`` the value is a :class:`Parts`, or a tensor for a single micro-batch.
    :class:`ListOfRows` are cut into lists.
    """
    if isinstance(tensor, Parts):
        return tensor.values
    if isinstance(tensor, ListOfRows):
        return tensor.cut(chunks)
    if not isinstance(dim, int) or chunks == 1:
        return (tensor,) * chunks
    # torch.tensor_split gives several views at once, and autograd lets nobody write to such views.
    return tuple(tensor.narrow(dim, a, b - a) for a, b in _ranges(tensor.shape[dim], chunks))


def write_back(tensor: Tensor | Parts, dim: int | None, parts: Sequence[Tensor]) -> None:
    """Write the micro-batches' parts of a tensor to it; of a state that is in parts, each to its
    own."""
    if isinstance(tensor, Parts):
        for own, part in zip(tensor.values, parts, strict=True):
            own.copy_(part)
    else:
        tensor.copy_(gather(parts, dim))


def rows_of_each(rows: int, chunks: int) -> list[int]:
    """How many rows each of ``chunks`` micro-batches has, as :func:`scatter` cuts them."""
    return [end - begin for begin, end in _ranges(rows, chunks)]


def _ranges(rows: int, chunks: int) -> Iterator[tuple[int, int]]:
    """The first row of each micro-batch, and the first one after it."""
    size, extra = divmod(rows, chunks)
    return itertools.pairwise(i * size + min(i, extra) for i in range(chunks + 1))


def gather(
    values: Sequence[Any],
    dims: Dims,
    parts: Sequence[Tensor] = (),
    parts_dim: int = 0,
    weights: Sequence[float] = (),
) -> Any:
    """Put the outputs of all micro-batches together as the output of the mini-batch.

    Args:
        values: the output of each micro-batch; all have the same structure.
        dims: the batch dimension of the tensors in an output, one for all or one for each leaf.
            Without one (None), tensors of floating point or complex numbers are averaged, each
            weighted by its micro-batch's size; any other leaf must be the same in all
            micro-batches. ANY: the first micro-batch's leaf is taken. SUM: leaves are added up.
            WEIGHTED: leaves are added up, each times its weight.
        parts: the micro-batches' parts of an input, whose sizes along ``parts_dim`` are the
            weights; without any, all weights are equal.
        weights: the weights of the micro-batches in leaves that are WEIGHTED.

    Raises ValueError if a leaf has to be the same in all micro-batches and is not.
    """
    if len(values) == 1:
        return values[0]
    flat = [pytree.tree_flatten(value) for value in values]
    spec = flat[0][1]
    columns = list(zip(*(own for own, _ in flat), strict=True))
    if not isinstance(dims, tuple):
        dims = (dims,) * len(columns)
    sizes = [part.shape[parts_dim] for part in parts] or [1] * len(values)
    return pytree.tree_unflatten(
        [
            weighted_sum(column, weights) if dim == WEIGHTED else _gathered(column, dim, sizes)
            for column, dim in zip(columns, dims, strict=True)
        ],
        spec,
    )


def weighted_sum(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """The sum of values, each times its weight. Values of weight 0 are left out: a mean over
    nothing is NaN, and so is 0 times NaN."""
    terms = [value * weight for value, weight in zip(values, weights, strict=True) if weight]
    return functools.reduce(operator.add, terms)


def shares(
    weights: Sequence[Any], total: Callable[[float], float] | None = None
) -> tuple[float, ...]:
    """The weight of each micro-batch's loss, as a share of all weights.

    ``total``: makes of this replica's sum of weights that of all replicas, if there are any.

    Raises:
        ValueError: for a weight that is no number, or less than zero, or if all are zero.
    """
    found = numbers(weights)
    whole = sum(found) if total is None else total(sum(found))
    if not whole:
        raise ValueError(
            "loss_weight gives 0 for every micro-batch: the loss is a mean over nothing, which is "
            "no number for most losses and would make none of every parameter; leave such a "
            "mini-batch out, by a condition ahead of it in the training loop, such as "
            "if loss_weight(target) > 0 (loss_weight(**inputs) of a model that returns its loss)"
        )
    return tuple(weight / whole for weight in found)


def numbers(weights: Sequence[Any]) -> list[float]:
    """The weights of micro-batches, as a user's function has given them, as numbers.

    Raises:
        ValueError: for one that is no number, or less than zero.
    """
    return [_number(weight, i) for i, weight in enumerate(weights)]


def _number(weight: Any, microbatch: int) -> float:
    is_number = isinstance(weight, int | float) or (
        isinstance(weight, Tensor) and weight.numel() == 1 and not weight.is_complex()
    )
    value = float(weight) if is_number else math.nan
    if not 0 <= value < math.inf:
        shown = tuple(weight.shape) if isinstance(weight, Tensor) and not is_number else weight
        raise ValueError(
            f"loss_weight gives {shown} for micro-batch {microbatch}: give a number that is not "
            "negative, such as how many tokens its loss is a mean of"
        )
    return value


def _gathered(values: Sequence[Any], dim: Dim, sizes: Sequence[int]) -> Any:
    first = values[0]
    if dim == LISTED:
        return Parts(tuple(values))
    if dim == ANY:
        return first
    if dim == SUM:
        return functools.reduce(operator.add, values)
    if isinstance(first, Tensor):
        if isinstance(dim, int):
            return torch.cat(list(values), dim)
        if first.is_floating_point() or first.is_complex():
            total = sum(sizes)
            weighted = (leaf * (size / total) for leaf, size in zip(values, sizes, strict=True))
            return functools.reduce(torch.add, weighted)
        others = [leaf for leaf in values if not torch.equal(first, leaf)]
    else:
        others = [leaf for leaf in values if first != leaf]
    if others:
        raise ValueError(
            f"an output without batch dimension differs between micro-batches ({first} and "
            f"{others[0]}, say), and only floating point tensors are averaged; give its "
            'dimension in out_dims, "sum" for it to be added up, or chunks=1'
        )
    return first
