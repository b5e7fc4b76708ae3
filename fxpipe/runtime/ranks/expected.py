"""Expected sizes: both ends of an edge know how large a message is before it is sent.

::

    expected (12,)    rank 0  part of 12 bytes, header ──> rank 1   the receives of both are posted
    unknown           rank 0  header, part of 8 bytes ───> rank 1   the header's first, then the
                                                                    part's, whose size it says
    alone             rank 0  a tensor's memory ─────────> rank 1   the tensor's, and no header's

Which sizes are expected follows from the fake values that the model was traced with and from the
rows of each micro-batch. What cannot be known so (whether a gradient is missing, say) is taken to
be as in the run before. A size that differs again follows from values: it travels ahead from then
on, in every run. A message that was one tensor is taken to be one of the same shape, strides and
dtype again, until it has been something else once.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.runtime.ranks.packing import Strided

Sizes = tuple[int, ...]
"""The bytes of each part of a message, as :mod:`fxpipe.runtime.ranks.packing` makes parts."""
_SMALL = 2**17  # bytes


def is_small(size: int) -> bool:
    """Whether a part of this size, if it is expected, travels in the header: to copy it there takes
    less than a message of its own, which both ranks post, and which a thread of each awaits."""
    return size <= _SMALL


class Expected:
    """The sizes of the messages on one edge, in all runs with inputs of the same shapes.

    Each end of the edge has one of these. Both note the same sizes in the same order, so that both
    always expect the same.

    Args:
        sizes: what is expected of each message in the first run, by its number; None if that is not
            known.
    """

    def __init__(self, sizes: Sequence[Sizes | None] = ()) -> None:
        self._sizes = dict(enumerate(sizes))
        self._seen: set[int] = set()
        self._varying: set[int] = set()
        self._alone: dict[int, Strided | None] = {}

    def of(self, number: int) -> Sizes | None:
        """The sizes of the next message of this number; None if they have to travel ahead of it."""
        return None if number in self._varying else self._sizes.get(number)

    def alone(self, number: int) -> Strided | None:
        """The tensor that the next message of this number is, without a header; None if it has a
        header."""
        return self._alone.get(number)

    def note(self, number: int, sizes: Sizes, alone: Strided | None = None) -> None:
        """Note the sizes of a message that has been sent or received, and the tensor that it was,
        if it was one which can travel alone."""
        if number in self._seen and sizes != self._sizes[number]:
            self._varying.add(number)
        self._seen.add(number)
        self._sizes[number] = sizes
        self._alone[number] = alone if self._alone.get(number, alone) == alone else None
