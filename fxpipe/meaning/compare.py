"""Compares an output for some rows with its outputs for parts of these rows, put together in each
way that there is."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir.tensors import largest_of, pieces, tensors_of
from fxpipe.runtime.microbatch import ANY, SUM, Dim

MEAN = None


@dataclass(frozen=True)
class Difference:
    """How far two tensors are apart. It is false if they differ by rounding errors only."""

    largest: float
    """The largest difference of two elements."""
    scale: float
    """The largest absolute value, to which ``largest`` has to be compared."""
    share: float
    """The share of elements that differ by more than rounding errors."""

    def __bool__(self) -> bool:
        return self.share > 0

    def __str__(self) -> str:
        return (
            f"{self.largest:.2g} (of values up to {self.scale:.2g}, "
            f"in {self.share:.0%} of its elements)"
        )


def tolerance(tensor: Tensor) -> float:
    """The largest difference that rounding errors explain, relative to the largest value. There are
    such errors because kernels may sum in another order for another number of rows."""
    eps = unit_of(tensor)
    return max(16 * eps, 0.3 * float(eps**0.5))


_MET: ContextVar[float] = ContextVar("met", default=0.0)
"""The unit in the last place of the lowest precision that is known to take part."""


@contextmanager
def computed_with(dtypes: Iterable[torch.dtype]) -> Iterator[None]:
    """A context in which outputs are compared that are computed with values of these dtypes. What
    a float32 model returns in float64 has the rounding errors of float32.

    Precisions lower than float32 are left out: what is not given in them has been computed in
    float32 where it matters (:mod:`fxpipe.meaning.widened`).
    """
    real = {dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex}
    single = float(torch.finfo(torch.float32).eps)
    units = (min(single, float(torch.finfo(dtype).eps)) for dtype in real)
    token = _MET.set(max(_MET.get(), *units, 0.0))
    try:
        yield
    finally:
        _MET.reset(token)


def dtypes_of(model: Any, *inputs: Any) -> set[torch.dtype]:
    """The dtypes of a model's parameters and buffers, and of the tensors in its inputs."""
    own = (*model.parameters(), *model.buffers())
    return {tensor.dtype for tensor in (*own, *tensors_of(inputs))}


def unit_of(tensor: Tensor) -> float:
    """The unit in the last place of what a tensor has been computed in, relative to its value."""
    dtype = tensor.dtype
    if torch.is_autocast_enabled(tensor.device.type):
        dtype = torch.get_autocast_dtype(tensor.device.type)
    return max(float(torch.finfo(dtype).eps), _MET.get())


def difference(whole: Tensor, other: Tensor, scale: float = 0.0) -> Difference:
    """How far a tensor is from the whole.

    ``scale`` is the size of the numbers that have been added up to it: if these cancel, rounding
    errors are relative to them, not to the result.
    """
    return _apart([(whole, other)], scale)


def joined_difference(
    whole: Tensor, parts: Sequence[Tensor], dim: int, errors: float | None = None
) -> Difference:
    """How far parts of a tensor, joined along a dimension, are from the whole. They are compared
    one by one, so that no memory is needed for the joined tensor.

    ``errors``: as large a difference, relative to the largest value, is none; by default what
    rounding errors explain.
    """
    sizes = [part.shape[dim] for part in parts]
    if sum(sizes) != whole.shape[dim]:
        return Difference(float("inf"), 0.0, 1.0)
    return _apart(list(zip(torch.split(whole, sizes, dim), parts, strict=True)), errors=errors)


def _apart(
    pairs: Sequence[tuple[Tensor, Tensor]], scale: float = 0.0, errors: float | None = None
) -> Difference:
    """How far the first tensors of pairs, taken together, are from the second ones."""
    if any(one.shape != two.shape or one.dtype != two.dtype for one, two in pairs):
        return Difference(float("inf"), scale, 1.0)
    count = sum(one.numel() for one, _ in pairs)
    if not count:
        return Difference(0.0, 0.0, 0.0)
    whole = pairs[0][0]
    every = (piece for pair in pairs if pair[0].numel() for piece in pieces(*pair))
    if not (whole.is_floating_point() or whole.is_complex()):
        moved, largest = 0, 0.0
        for one, two in every:
            moved += int((one != two).sum())
            largest = max(largest, (one.double() - two.double()).abs().max().item())
        return Difference(largest, max(largest_of(one) for one, _ in pairs), moved / count)
    scale = max(scale, *(largest_of(each) for pair in pairs for each in pair))
    allowed = (tolerance(whole) if errors is None else errors) * scale
    moved, farthest = 0, []
    for one, two in every:
        same = (one == two) | (one.isnan() & two.isnan())
        apart = torch.where(same, torch.zeros_like(one), one - two).abs()
        moved += int((~same & ~(apart <= allowed)).sum())
        farthest.append(apart.max())
    return Difference(torch.stack(farthest).max().item(), scale, moved / count)


@dataclass(frozen=True)
class Reading:
    """The ways in which the parts of one output, put together, are the whole."""

    dims: tuple[Dim, ...]
    """The ways that fit. There are several only if they give the same for these values."""
    difference: Difference | None = None
    """If no way fits: how far the likeliest one (joined, else averaged) is from the whole."""


def reading(
    whole: Tensor,
    parts: Sequence[Tensor],
    sizes: Sequence[float],
) -> Reading:
    """The ways in which the parts of an output, put together, are the whole. ``sizes`` has the
    number of rows of each part.

    Raises ValueError, with the dimensions that differ, if no way has the right shape.
    """
    rows = growing(whole, parts)
    if whole.is_meta:
        return Reading((MEAN if rows is None else rows,))
    if rows is not None:
        apart = joined_difference(whole, parts, rows)
        return Reading((), apart) if apart else Reading((rows,))
    ways: dict[Dim, Difference] = {}
    first = parts[0]
    ways[ANY] = max((difference(whole, p) for p in parts), key=lambda d: d.share)
    is_exact = not (first.is_floating_point() or first.is_complex())
    scale = 0.0 if is_exact else max(map(largest_of, parts))
    if first.dtype != torch.bool:
        ways[SUM] = difference(whole, functools.reduce(operator.add, parts), scale)
    if not is_exact:
        ways[MEAN] = difference(whole, mean(parts, sizes), scale)
    fitting = tuple(way for way, apart in ways.items() if not apart)
    return Reading(fitting, None if fitting else ways.get(MEAN, ways[ANY]))


def mean(parts: Sequence[Any], weights: Sequence[float]) -> Any:
    """The weighted mean of the parts."""
    total = sum(weights)
    return functools.reduce(
        operator.add, (p * (w / total) for p, w in zip(parts, weights, strict=True))
    )


def put_together(dim: Dim, parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The parts of an output, put together: joined, added up, or averaged by their numbers of rows.
    Of what cannot be averaged, and of what is the same for all of them, it is the first one."""
    if isinstance(dim, int):
        return torch.cat(list(parts), dim)
    if dim == SUM:
        return functools.reduce(operator.add, parts)
    made: Tensor = mean(parts, sizes) if dim == MEAN and is_real(parts[0]) else parts[0]
    return made


def is_real(value: Tensor) -> bool:
    """Whether values like this one can be averaged."""
    return value.is_floating_point() or value.is_complex()


def growing(whole: Tensor, parts: Sequence[Tensor]) -> int | None:
    """The dimension along which the parts, joined, have the shape of the whole; None if each of
    them has that shape.

    Raises ValueError, with the dimensions that differ, if there is no such dimension.
    """
    if any(p.ndim != whole.ndim for p in parts):
        raise ValueError([])
    differing = [d for d in range(whole.ndim) if any(p.shape[d] != whole.shape[d] for p in parts)]
    if not differing:
        return None
    (dim, *others) = differing
    if others or sum(p.shape[dim] for p in parts) != whole.shape[dim]:
        raise ValueError(differing)
    return dim
