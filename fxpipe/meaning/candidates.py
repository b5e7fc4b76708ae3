"""Candidates: which dimension of each input may be the batch's, the likeliest first.

Nothing is decided here. The check (:mod:`fxpipe.meaning.check`) takes the first candidate with
which the outputs of micro-batches, put together, are the outputs of the mini-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations, islice

from fxpipe.meaning.errors import BatchError
from fxpipe.meaning.said import INFER, Input
from fxpipe.runtime.microbatch import LISTED, InDim

InDims = list[int | None]
"""The batch dimension of each tensor; None if all micro-batches share the tensor."""

MOST = 16  # the most candidates: each may cost a few runs of the model on a few rows


def candidates(inputs: Sequence[Input]) -> list[InDims]:
    """The candidates for the batch dimensions of all inputs, in this order:

    - all first dimensions that have the same size;
    - these but for one tensor, which is shared although its first dimension happens to be as large:
      the last one at first, as tables and masks follow what they are for;
    - for a size of a second dimension (time-major data): the second dimension of each tensor if it
      has that size, else the first if that has; then the first ahead of the second;
    - all first dimensions but those of two tensors, of three, and so on.

    Of many inputs, of which any may be the shared one, the first few are listed, so that second
    dimensions have their turn.

    The list is empty if ``in_dims`` says that lists have an element for each row.

    Raises:
        BatchError: if what has been said of two inputs gives two batch sizes.
    """
    if any(each.said == LISTED for each in inputs):
        return []  # see fxpipe.meaning.listed
    # Of many inputs any may be the shared one, and any two: only so many are looked at.
    found = dict.fromkeys(islice(map(tuple, _all(inputs, _sizes_said(inputs))), 4 * MOST))
    return [list(each) for each in islice(found, MOST)]


def agree(inputs: Sequence[Input], dims: Sequence[InDim]) -> bool:
    """Whether all batch dimensions exist and are of one size."""
    pairs = [(i.tensor, d) for i, d in zip(inputs, dims, strict=True) if isinstance(d, int)]
    if any(dim >= tensor.ndim for tensor, dim in pairs):
        return False
    return len({tensor.shape[dim] for tensor, dim in pairs}) <= 1


def _sizes_said(inputs: Sequence[Input]) -> list[int]:
    """The batch size that follows from what has been said of the inputs, as a list of one; an empty
    list if no dimension has been said."""
    rows: dict[int, Input] = {}
    for each in inputs:
        dim = None if each.said is INFER else each.dim
        if dim is not None:
            rows.setdefault(each.tensor.shape[dim], each)
    if len(rows) > 1:
        raise BatchError(different_sizes(rows) + packed(rows))
    return list(rows)


def _all(inputs: Sequence[Input], said: list[int]) -> Iterator[InDims]:
    """All candidates in their order, some of them more than once. ``said``: see _sizes_said."""
    free = [i for i, each in enumerate(inputs) if each.said is INFER]
    first = said or _sizes(inputs, free, 0)
    for size in first:
        yield _along(inputs, size, (0,))
    second = [
        dims
        for size in said or _sizes(inputs, free, 1)
        for order in ((1, 0), (0, 1))
        if any((dims := _along(inputs, size, order))[i] == 1 for i in free)
    ]
    room = max(1, MOST - len(first) - len(second))
    yield from islice(chain(*(_with_shared(inputs, size, said, 1) for size in first)), room)
    yield from second
    for shared in range(1, len(free) + 1):
        for size in first:
            yield from _with_shared(inputs, size, said, shared)
    if not first:
        yield _along(inputs, 0, ())


def _with_shared(
    inputs: Sequence[Input], size: int, said: Sequence[int], shared: int
) -> Iterator[InDims]:
    """The candidates of the first dimensions of this size, but for ``shared`` tensors. At least one
    tensor is cut."""
    plain = _along(inputs, size, (0,))
    split = [i for i, d in enumerate(plain) if d is not None and inputs[i].said is INFER]
    if len(split) + len(said) > shared:
        for cut in combinations(split, max(0, len(split) - shared)):
            left_out = set(split) - set(cut)
            yield [None if i in left_out else d for i, d in enumerate(plain)]


def rivals(ways: Sequence[InDims], dims: InDims) -> list[InDims]:
    """The other candidates that are cut along the same dimensions as this one, and differ from it
    in which inputs all micro-batches share. Each of two may give the model's outputs: so it is
    with ``x @ table.T``, where a table has as many rows as the batch."""
    own = _cut(dims)
    return [way for way in ways if way != dims and _cut(way) and _cut(way) <= own]


def _cut(dims: InDims) -> set[int]:
    return {dim for dim in dims if dim is not None}


def _sizes(inputs: Sequence[Input], free: Sequence[int], dim: int) -> list[int]:
    """The sizes of dimension ``dim`` of the ``free`` inputs. One comes last: a tensor with a single
    row is likely to be shared."""
    shapes = [inputs[i].tensor.shape for i in free]
    sizes = list(dict.fromkeys(shape[dim] for shape in shapes if len(shape) > dim))
    return sorted(sizes, key=lambda size: size == 1)


def _along(inputs: Sequence[Input], size: int, order: Sequence[int]) -> InDims:
    """For each input the dimension that has been said; if none has, the first dimension in
    ``order`` that has this size."""
    return [
        next((d for d in order if d < each.tensor.ndim and each.tensor.shape[d] == size), None)
        if each.said is INFER
        else each.dim
        for each in inputs
    ]


def different_sizes(rows: dict[int, Input], besides: str = "") -> str:
    """The message for inputs that have different batch sizes: ``rows`` has an input of each."""
    (one, first), (two, second), *_ = rows.items()
    return (
        f"the batch size differs between inputs: {one} in {first}, {two} in {second}{besides}; "
        "give in_dims, with the batch dimension of each input, or None for one that all "
        "micro-batches share"
    )


def packed(rows: dict[int, Input]) -> str:
    """Advice for two inputs of which one has several rows for each row of the other; "" if the
    larger batch size is no multiple of the smaller one."""
    (few, _), (many, packed) = sorted(list(rows.items())[:2], key=lambda item: item[0])
    if not few or many % few:
        return ""
    shape = ", ".join(map(str, (few, many // few, *packed.tensor.shape[1:])))
    return (
        f"; or, if {many // few} rows of {packed.name} belong together, give it as ({shape}) to a "
        f"module that calls the model with {packed.name}.flatten(0, 1)"
    )


def rows_in(inputs: Sequence[Input], dims: Sequence[int | None]) -> int | None:
    """The number of rows of the inputs with these batch dimensions; None if no input has one."""
    pairs = zip(inputs, dims, strict=True)
    return next((each.tensor.shape[dim] for each, dim in pairs if dim is not None), None)
