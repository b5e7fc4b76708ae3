"""Which mini-batches the meaning of a loss is checked with: the first one, and others at growing
distances.

::

    1 2 3 4 5 6 7 8 9 ... 32 ... 128 ... 512      a check with the 1st, the 2nd, the 8th, ...

A first mini-batch may be special: its rows have no padding, say, and the loss is a mean over the
rows as long as that is so. What a few more mini-batches have in common with most others shows, and
with these distances all checks together take hardly any time.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

GROWTH = 4
"""By how much the number of a mini-batch that is checked is larger than that of the one before."""


class Finding(Protocol):
    """What a check of a model, or of a loss function, has found out."""

    @property
    def is_told(self) -> bool:
        """Whether the user has been warned that a loss is no mean over the rows."""


F = TypeVar("F", bound=Finding)


class Batches:
    """Counts mini-batches, and says which of them are to be checked.

    Attributes:
        is_over: whether the user has been warned, so that none is to be checked any more.
        is_unsettled: whether the last check has raised an error, so that the next mini-batch is to
            be checked, whatever its number is.
    """

    def __init__(self) -> None:
        self._count, self._next = 0, 2
        self.is_over = self.is_unsettled = False

    def are_due(self) -> bool:
        """Count one more mini-batch. Returns whether it is to be checked."""
        self._count += 1
        if self.is_over:
            return False
        is_next = self._count == self._next
        if is_next:
            self._next *= GROWTH
        return is_next or self.is_unsettled

    def note(self, found: F) -> F:
        """Take note of what a check has found, and return it."""
        self.is_over |= found.is_told
        return found
