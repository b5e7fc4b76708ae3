"""What the check finds wrong with an output."""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.meaning.compare import Difference


@dataclass(frozen=True)
class Problem:
    """An output whose parts, put together, differ from the whole."""

    path: str
    text: str
    """What differs, and by how much."""
    is_scalar: bool = False
    """Whether the output is a single floating-point number, such as a loss. This is no reason to
    refuse a call, as gradient accumulation gives the same number."""
    difference: Difference | None = None
    is_slight: bool = False
    """Whether a gradient differs by so little that rounding errors may have tipped a decision
    between nearly equal values, as a ReLU takes one near zero."""
    remedy: str = ""
    """What a user may do about it, if that is something else than for most problems."""
    is_list_of_rows: bool = False
    """Whether the output is a list with one element for each row, although the inputs are no lists.
    The lists of micro-batches are then put together element by element, each of another row, so
    that the call is refused whatever the user accepts."""
