"""Micro-batches: a mini-batch in parts, and the parts' outputs as one again."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir._torch import pytree

ANY = "any"
"""In place of a dimension: what all micro-batches have alike, since nothing in it is of a batch."""

SUM = "sum"
"""In place of a dimension: a sum over rows, of which the mini-batch's is the sum of all."""

Dim = int | None | str
Dims = Dim | tuple[Dim, ...]


def first_rows(tensor: Tensor, dim: int, rows: int) -> Tensor:
    """So many rows along ``dim``: the first ones, or all of them over and over."""
    these = torch.arange(rows, device=tensor.device) % tensor.shape[dim]
    return tensor.index_select(dim, these)


def scatter(tensor: Tensor, dim: int | None, chunks: int) -> tuple[Tensor, ...]:
    """The tensor in ``chunks`` parts along ``dim``, of sizes at most one apart, large ones first.

    Without a dimension (None) all micro-batches share it. The parts are views: what a model writes
    to its input is seen by the caller, as without us.
    """
    if dim is None or chunks == 1:
        return (tensor,) * chunks
    # Not torch.tensor_split: autograd lets nobody write to a view that came with others.
    size, extra = divmod(tensor.shape[dim], chunks)
    ends = [i * size + min(i, extra) for i in range(chunks + 1)]
    return tuple(tensor.narrow(dim, a, b - a) for a, b in itertools.pairwise(ends))


def gather(
    values: Sequence[Any],
    dims: Dims,
    parts: Sequence[Tensor] = (),
    parts_dim: int = 0,
) -> Any:
    """The outputs of all micro-batches as the output of the mini-batch.

    Args:
        values: what each micro-batch gave, all built alike.
        dims: the batch dimension of the tensors in a value, one for all or one for each leaf.
            Those without one (None) are averaged, each weighted by its micro-batch's size, if they
            are floating point. Anything else without one must be the same in all micro-batches.
            What is known to be (ANY) is given as the first has it, and sums (SUM) are added up.
        parts: the micro-batches, whose sizes along ``parts_dim`` are the weights.
    """
    if len(values) == 1:
        return values[0]
    flat = [pytree.tree_flatten(value) for value in values]
    spec = flat[0][1]
    columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
    if not isinstance(dims, tuple):
        dims = (dims,) * len(columns)
    sizes = [part.shape[parts_dim] for part in parts] or [1] * len(values)
    return pytree.tree_unflatten(
        [_gathered(column, dim, sizes) for column, dim in zip(columns, dims, strict=True)], spec
    )


def _gathered(leaves: Sequence[Any], dim: Dim, sizes: Sequence[int]) -> Any:
    first = leaves[0]
    if dim == ANY:
        return first
    if dim == SUM:
        return functools.reduce(operator.add, leaves)
    if isinstance(first, Tensor):
        if isinstance(dim, int):
            return torch.cat(list(leaves), dim)
        if first.is_floating_point() or first.is_complex():
            total = sum(sizes)
            weighted = (leaf * (size / total) for leaf, size in zip(leaves, sizes, strict=True))
            return functools.reduce(torch.add, weighted)
        others = [leaf for leaf in leaves if not torch.equal(first, leaf)]
    else:
        others = [leaf for leaf in leaves if first != leaf]
    if others:
        raise ValueError(
            f"an output without batch dimension differs between micro-batches ({first} and "
            f"{others[0]}, say), and only floating point tensors are averaged; give its "
            'dimension in out_dims, "sum" for it to be added up, or chunks=1'
        )
    return first
