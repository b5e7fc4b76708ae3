"""Outputs that are single numbers, such as losses: what tells a mean over the rows from a sum, and
from what is neither.

The parts of one sample may give the number of the whole by chance, or nearly so: where all rows
that count are in one part, where a small term mixes rows, or where a loss goes by the number of
rows. Then the number is looked at once more: on rows that are repeated, beside what other last
bits make of it, or on another sample.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fxpipe.ir.errors import is_the_models
from fxpipe.ir.text import told_apart
from fxpipe.meaning.compare import (
    MEAN,
    Difference,
    difference,
    is_real,
    mean,
    put_together,
    tolerance,
    unit_of,
)
from fxpipe.meaning.listed import is_a_row
from fxpipe.meaning.problem import Problem
from fxpipe.meaning.sample import picked
from fxpipe.meaning.trial import Question, Trial, is_number
from fxpipe.runtime.microbatch import ANY, SUM, WEIGHTED, Dim

# A number that is nearly what its parts give has a small term that is not, if it is off by more
# units in the last place than this, and by more times what other last bits make of it than this.
CERTAIN = 64
BEYOND = 16


def with_small_terms(
    trial: Trial,
    path: str,
    found: tuple[Dim, ...] | Problem,
    rounded: Callable[[], list[tuple[dict[str, Any], float]]],
) -> tuple[Dim, ...] | Problem:
    """How a number is put together, or what differs, where it is nearly what its parts give: the
    loss of a mixture of experts, say, with a thousandth of a term that balances the experts. What
    differs is small beside the loss, but all that trains the router. So a number that is farther
    from its parts than a few rounding errors has to be no farther than other last bits make it."""
    whole = trial.whole.get(path)
    if isinstance(found, Problem) or ANY in found or not isinstance(whole, Tensor):
        return found
    if whole.numel() != 1 or whole.is_meta or not whole.is_floating_point() or is_a_row(path):
        return found
    parts = [output[path] for output in trial.parts]
    sums: list[Tensor] = [
        mean(parts, trial.sizes) if way is MEAN else functools.reduce(operator.add, parts)
        for way in found
        if way in (MEAN, SUM)
    ]
    if not sums:  # it is joined of parts, of which some may have no elements
        return found
    scale = max(abs(each.item()) for each in (whole, *parts))
    apart = min(abs(whole.item() - each.item()) for each in sums)
    if not apart > CERTAIN * unit_of(whole) * scale:
        return found
    others = [outputs.get(path) for outputs, _ in rounded()]
    effects = [abs(whole.item() - each.item()) for each in others if is_number(each)]
    if not effects or not apart > BEYOND * max(effects):
        return found
    return no_mean(path, whole, parts, trial, Difference(apart, scale, 1.0))


def told_from_a_mean(
    question: Question, trial: Trial, path: str, found: tuple[Dim, ...] | Problem
) -> tuple[Dim, ...] | Problem:
    """How a number is put together that is zero for all parts of a sample but one: what is compared
    (``found``) does not tell a sum from a mean over the rows that count, as by a mask, of which one
    part has all::

        rows  [0] [a, b, 0]      sum  0 + (a + b)     mean over those that count  (a + b) / 2
        row   [a, a, a] [a, a]   sum  3 a + 2 a       mean over those that count   a

    One row of that part is repeated, of which any mean is the same for each number of rows.
    """
    if isinstance(found, Problem) or SUM not in found or ANY in found:
        return found
    whole, parts = trial.whole[path], [output[path] for output in trial.parts]
    if not is_number(whole) or whole.is_meta or not whole.is_floating_point():
        return found
    if not bool(whole.isfinite()):  # it fits any way
        return found
    sizes = [abs(part.item()) for part in parts]
    last = max(range(len(sizes)), key=sizes.__getitem__)
    if any(
        size > 2 * tolerance(whole) * sizes[last] for size in (*sizes[:last], *sizes[last + 1 :])
    ):
        return found
    start = sum(trial.sizes[:last])
    for row in range(start, start + trial.sizes[last]):
        numbers = [_of_repeated(question, trial, path, row, rows) for rows in (3, 2, 5)]
        if not all(is_number(each) and each.item() for each in numbers):
            continue
        more, less, both = numbers
        if not difference(both, more + less, sizes[last]):
            return (SUM,)
        return no_mean(path, whole, parts, trial, difference(whole, mean(parts, trial.sizes)))
    return (SUM, WEIGHTED)


def _of_repeated(question: Question, trial: Trial, path: str, row: int, rows: int) -> Any:
    """What is at a path of the output for one row of a sample, ``rows`` times; None if the model
    does not take that."""
    try:
        outputs, _ = question.outputs(picked(trial.tensors, question.dims, [row] * rows), rows)
    except Exception as error:
        if not is_the_models(error):
            raise
        return None
    return outputs.get(path)


def confirmed(trial: Trial, path: str, dim: Dim) -> Problem | None:
    """What is wrong with putting a number together in this way, for one more sample; None if
    nothing is."""
    given = [output.get(path) for output in (trial.whole, *trial.parts)]
    numbers = [each for each in given if isinstance(each, Tensor) and each.numel() == 1]
    if len(numbers) < len(given) or not is_real(numbers[0]):
        return None
    whole, *parts = numbers
    scale = max(abs(each.item()) for each in parts)
    apart = difference(whole, put_together(dim, parts, trial.sizes).to(whole.dtype), scale)
    return no_mean(path, whole, parts, trial, apart) if apart else None


def no_mean(
    path: str, whole: Tensor, parts: list[Tensor], trial: Trial, apart: Difference | None
) -> Problem:
    """The problem of a number that is neither a mean over the rows nor a sum."""
    sizes, few = " and ".join(map(str, trial.sizes)), 4
    of = f"{sizes} of them" if len(trial.sizes) <= few else f"{len(trial.sizes)} micro-batches"
    so, other = told_apart(whole.item(), mean(parts, trial.sizes).item())
    return Problem(
        path,
        f"{path} is neither a mean over the rows nor a sum: it is {so} for {sum(trial.sizes)} rows "
        f"made from those of the example, and {other} as the mean of {of}",
        is_scalar=True,
        difference=apart,
    )
