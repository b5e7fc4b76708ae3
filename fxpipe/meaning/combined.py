"""Losses that are neither a mean over the rows nor a sum: what they may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fxpipe.ir.errors import is_the_models
from fxpipe.meaning.check import Trial
from fxpipe.meaning.compare import tolerance
from fxpipe.meaning.sample import part

_ROWS = 4


def may_be_weighted(trial: Trial, path: str) -> bool:
    """Whether the loss of a whole sample is between those of its parts, as a mean with any weights
    of them is."""
    whole = trial.whole[path]
    parts = [output[path].item() for output in trial.parts]
    allowed = tolerance(whole) * max(map(abs, parts))
    return bool(min(parts) - allowed <= whole.item() <= max(parts) + allowed)


def is_mean_plus_sum(
    loss: Callable[[list[Tensor]], Any], trial: Trial, path: str, dims: Sequence[int | None]
) -> bool:
    """Whether a loss, at ``path`` among outputs, is a mean over the rows plus a sum over them.

    For rows a and b, of which each has a term of the mean and one of the sum, ``loss(a) + loss(b)``
    is more than ``loss(a and b)`` by half of the terms of the mean. So it is known from two pairs
    of rows what the loss of all four has to be.
    """
    if sum(trial.sizes) < _ROWS:
        return False

    def of(first: int, last: int) -> float:
        rows = last + 1 - first
        return float(loss(part(trial.tensors, dims, first, rows)))

    try:
        single = [of(row, row) for row in range(_ROWS)]
        halves = sum(single) - of(0, 1) - of(2, 3)
        whole = of(0, 3)
    except Exception as error:
        if not is_the_models(error):
            raise
        return False  # it takes no single row, say
    apart = abs(sum(single) - 1.5 * halves - whole)
    return apart <= tolerance(trial.whole[path]) * sum(map(abs, single))
