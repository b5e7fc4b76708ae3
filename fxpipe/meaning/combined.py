"""Losses that are neither a mean over the rows nor a sum: what they may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir.errors import is_the_models
from fxpipe.meaning.compare import difference, tolerance
from fxpipe.meaning.sample import picked
from fxpipe.meaning.trial import Trial
from fxpipe.runtime.random import RandomState

_ROWS = 4


def may_be_weighted(trial: Trial, path: str) -> bool:
    """Whether the loss of a whole sample is between those of its parts, as a mean with any weights
    of them is."""
    whole = trial.whole[path]
    parts = [output[path].item() for output in trial.parts]
    allowed = tolerance(whole) * max(map(abs, parts))
    return bool(min(parts) - allowed <= whole.item() <= max(parts) + allowed)


def is_another_each_time(
    loss: Callable[[list[Tensor]], Any], trial: Trial, dims: Sequence[int | None]
) -> bool:
    """Whether a loss is another number when it is computed of the same sample again, with other
    random numbers."""
    rows = range(sum(trial.sizes))
    first = loss(picked(trial.tensors, dims, rows))
    state = RandomState([first.device])
    for device in {first.device, torch.device("cpu")}:
        torch.rand((), device=device)  # after it a generator gives others
    try:
        again = loss(picked(trial.tensors, dims, rows))
    finally:
        state.put_back()
    return bool(difference(first, again))


def is_of_means(
    loss: Callable[[list[Tensor]], Any], trial: Trial, dims: Sequence[int | None]
) -> bool:
    """Whether a loss is the same number when each row of a sample is there twice. One that is made
    of means over rows, or over what rows have, is; one that compares rows with each other is
    not."""
    rows = list(range(sum(trial.sizes)))
    try:
        once, twice = (loss(picked(trial.tensors, dims, each)) for each in (rows, [*rows, *rows]))
    except Exception as error:
        if not is_the_models(error):
            raise
        return False
    return not difference(once, twice)


def is_mean_plus_sum(
    loss: Callable[[list[Tensor]], Any], trial: Trial, path: str, dims: Sequence[int | None]
) -> bool:
    """Whether a loss, at ``path`` among outputs, is a mean over the rows plus a sum over them.

    For rows a and b, of which each has a term of the mean and one of the sum, ``loss(a) + loss(b)``
    is more than ``loss(a and b)`` by half of the terms of the mean. So pairs of rows tell all terms
    of the mean, and these what the loss of other rows has to be: of other pairs, of three rows, and
    of the whole sample.
    """
    return _terms_of_the_mean(loss, trial, path, dims) is not None


def is_number_plus_sum(
    loss: Callable[[list[Tensor]], Any], trial: Trial, path: str, dims: Sequence[int | None]
) -> bool:
    """Whether a loss is a sum over the rows plus a number that is the same for all rows, such as a
    penalty on weights: that is a mean over them of equal terms, see :func:`is_mean_plus_sum`."""
    terms = _terms_of_the_mean(loss, trial, path, dims)
    if terms is None:
        return False
    allowed = tolerance(trial.whole[path]) * sum(trial.sizes) * abs(trial.whole[path].item())
    return bool(max(terms) - min(terms) <= allowed)


def _terms_of_the_mean(
    loss: Callable[[list[Tensor]], Any], trial: Trial, path: str, dims: Sequence[int | None]
) -> list[float] | None:
    """The terms of the mean over the rows of a sample in a loss that is such a mean plus a sum;
    None if it is not."""
    rows = sum(trial.sizes)
    if rows < _ROWS:
        return None

    def of(*chosen: int) -> float:
        return float(loss(picked(trial.tensors, dims, chosen)))

    def terms(one: int, other: int) -> float:
        return 2 * (single[one] + single[other] - of(one, other))

    try:
        single = [of(row) for row in range(rows)]
        first = (terms(0, 1) + terms(0, 2) - terms(1, 2)) / 2
        averaged = [first, *(terms(0, row) - first for row in range(1, rows))]
        others = [(i, j) for i in range(1, rows) for j in range(i + 1, rows)][1:]
        groups = [*others, *(tuple(range(i, i + 3)) for i in range(rows - 2)), tuple(range(rows))]
        found = [of(*group) for group in groups]
    except Exception as error:
        if not is_the_models(error):
            raise
        return None  # it takes no single row, say
    added = [one - mean for one, mean in zip(single, averaged, strict=True)]
    allowed = tolerance(trial.whole[path]) * sum(map(abs, single))
    has_both = min(abs(sum(added)), abs(sum(averaged))) > allowed
    is_made_of_them = has_both and all(
        abs(sum(averaged[i] / len(group) + added[i] for i in group) - value) <= allowed
        for group, value in zip(groups, found, strict=True)
    )
    return averaged if is_made_of_them else None
