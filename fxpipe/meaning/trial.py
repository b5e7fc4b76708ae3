"""Samples on which a model is run: what is to be checked (:class:`Question`), and what the model
has given for the whole of a sample and for its parts (:class:`Trial`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeGuard

from torch import Tensor

from fxpipe.ir.errors import is_the_models
from fxpipe.ir.structure import leaves
from fxpipe.meaning.listed import is_column, rows_of
from fxpipe.meaning.sample import (
    GIVEN,
    LEVELS,
    OF_TWINS,
    batch_size,
    has_a_whole_number,
    has_fractions,
    part,
    spread,
)
from fxpipe.runtime.microbatch import Dim

# The sizes of the parts: as few rows as show what goes by halves, thirds and fourths of a batch;
# more for a model that gives something else for a single row, which it squeezes, say; and even
# numbers for a model that takes rows in pairs only. For others the second part begins with an odd
# row, since a model may take every second row.
SIZES = (1, 3), (3, 4), (2, 4)
FEWEST = (1, 2)  # where all rows are known to be treated alike, see fxpipe.meaning.alike
APART = (1, 1)  # where they are known to stay apart as well
TRIALS = 5  # of which the first and the last one are those OF_PARTS_APART
OWN = 16  # the most rows of a sample of the mini-batch's own values, which confirms a remedy


@dataclass(frozen=True)
class Question:
    """What is to be checked.

    Args:
        run: the model as a function from tensors to its output, without side effects, and to the
            autograd graph behind the output (:func:`fxpipe.trace.gradients.history_of`); None where
            none has been recorded.
        tensors, dims: the tensors of the example, and the batch dimension of each.
        run_parts: what is run on the parts of a sample, if that is not the model but its graph. It
            is given a part and the number of its first row.
        counts: what rows of samples have to differ by, see :func:`fxpipe.meaning.sample.sampled`.
            Their integers are not mixed then, and several samples are taken.
        sizes: the sizes of the parts of a sample, for each sample in the order in which they are
            tried.
        in_lists: whether rows are elements of lists in the inputs; outputs may have such lists,
            too.
        said: what ``out_dims`` says of outputs, by their paths; it may be filled by ``run``.
        is_void: whether the answer is not going to be used, as runs so far have shown: no further
            samples are taken then.
        twins: the seeds of the samples in which rows of two parts are nearly equal; none where rows
            cannot see each other.
    """

    run: Callable[[list[Tensor]], tuple[Any, Hashable]]
    tensors: Sequence[Tensor]
    dims: Sequence[int | None]
    sizes: Sequence[tuple[int, ...]] = SIZES
    in_lists: bool = False
    run_parts: Callable[[list[Tensor], int], tuple[Any, Hashable]] | None = None
    counts: Sequence[Tensor] = ()
    said: Mapping[str, Dim] = field(default_factory=dict)
    twins: Sequence[int] = OF_TWINS
    is_void: Callable[[], bool] = lambda: False

    @property
    def seeds(self) -> list[int]:
        """The seeds of the samples, in the order in which these are taken."""
        early = {*self.twins, *self.needed}
        return sorted(range(TRIALS), key=lambda seed: (seed != 0, seed not in early, seed))

    @functools.cached_property
    def needed(self) -> frozenset[int]:
        """The seeds of the samples that are not left out, however clear others are: where rows have
        real numbers, by which they may be near each other, and where they have one number each, by
        which one sample cannot tell all parts apart (:data:`fxpipe.meaning.sample.OF_TWINS`)."""
        if not self.twins:
            return frozenset()
        pairs = zip(self.tensors, self.dims, strict=True)
        cut = [(t, dim) for t, dim in pairs if dim is not None and not is_column(t)]
        real = [has_fractions(t) for t, _ in cut if not t.is_meta]
        single = [has_a_whole_number(t, dim) for t, dim in cut]
        return frozenset((*self.twins[: any(real)], *OF_TWINS[: any(single)]))

    @property
    def levels(self) -> Sequence[str]:
        """How much samples may differ from the example, in the order in which that is tried."""
        return (GIVEN,) if not self.has_values else LEVELS[1:] if self.counts else LEVELS

    @property
    def has_values(self) -> bool:
        """Whether any tensor of the example has values; on "meta" only shapes are compared."""
        return any(not tensor.is_meta for tensor in self.tensors)

    def outputs(
        self, tensors: list[Tensor], rows: int, start: int | None = None
    ) -> tuple[dict[str, Any], Hashable]:
        """The outputs for the ``rows`` rows of a part of a sample, of which the first is row
        ``start``, by the outputs' paths; and the autograd graph behind them. ``start`` is None for
        the whole sample."""
        if start is None or self.run_parts is None:
            output, history = self.run(tensors)
        else:
            output, history = self.run_parts(tensors, start)
        found = rows_of(output, rows, start or 0) if self.in_lists else leaves(output, "output")
        return dict(found), history


@dataclass(frozen=True)
class Trial:
    """One sample, with the model's outputs for the whole of it and for each of its parts."""

    sizes: tuple[int, ...]
    level: str
    tensors: list[Tensor]
    whole: dict[str, Any]
    parts: list[dict[str, Any]]
    histories: list[Hashable] = field(default_factory=list)
    """The autograd graphs behind the outputs of the whole and of each part."""

    @property
    def has_one_history(self) -> bool:
        """Whether the outputs of the whole and of its largest part have equal autograd graphs. That
        of a single row may lack nodes, since ``expand`` to one row, for one, does nothing. Of equal
        parts it is the last one."""
        if not self.histories:
            return False
        whole, *parts = self.histories
        largest = max(range(len(self.sizes)), key=lambda i: (self.sizes[i], i))
        return whole is not None and whole == parts[largest]

    def of_numbers(self) -> Trial:
        """The same sample with those outputs only that are single numbers, such as losses."""
        whole, *parts = (
            {path: each for path, each in output.items() if is_number(each)}
            for output in (self.whole, *self.parts)
        )
        return Trial(self.sizes, self.level, self.tensors, whole, parts)

    def each(self, dims: Sequence[int | None]) -> list[list[Tensor]]:
        """The tensors of each part of the sample."""
        starts = [0, *accumulate(self.sizes)]
        return [part(self.tensors, dims, a, n) for a, n in zip(starts, self.sizes, strict=False)]


def is_number(value: Any) -> TypeGuard[Tensor]:
    """Whether an output is a single number, such as a loss."""
    return isinstance(value, Tensor) and value.numel() == 1


def ran(run: Callable[[list[Tensor]], Any], trial: Trial, dims: Sequence[int | None]) -> Trial:
    """The same sample, with the outputs that ``run`` gives for the whole of it and for its
    parts."""
    whole = dict(leaves(run(part(trial.tensors, [None] * len(dims), 0, 0)), "output"))
    parts = [dict(leaves(run(tensors), "output")) for tensors in trial.each(dims)]
    return Trial(trial.sizes, trial.level, trial.tensors, whole, parts)


def of_own_values(
    run: Callable[[list[Tensor]], Any], tensors: Sequence[Any], dims: Sequence[int | None]
) -> list[Trial]:
    """A sample of the mini-batch's own rows, up to OWN of them; none where there are too few, or
    where the model does not take them."""
    rows = min(OWN, batch_size(tensors, dims) or 0)
    if rows < 2 or any(map(is_column, tensors)):
        return []
    sizes = rows // 3 or 1, rows - (rows // 3 or 1)
    return taken(run, Trial(sizes, GIVEN, spread(tensors, dims, rows), {}, []), dims)


def taken(
    run: Callable[[list[Tensor]], Any], trial: Trial, dims: Sequence[int | None]
) -> list[Trial]:
    """The same sample, as by :func:`ran`; none where the model does not take it."""
    try:
        return [ran(run, trial, dims)]
    except Exception as error:
        if not is_the_models(error):
            raise
        return []
