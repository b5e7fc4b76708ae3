"""Arguments that are one number for all stages (or lanes), or a sequence of one for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Bound = float | Sequence[float]
"""One number for all stages (or lanes), or one for each."""

_T = TypeVar("_T")


def spread(value: _T | Sequence[_T], count: int, what: str) -> list[_T]:
    """A list of ``count`` values: a copy of the sequence, or the one value repeated.

    Raises ValueError, which begins with ``what``, for a sequence of another length.
    """
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{what}: {len(value)} numbers are given, {count} needed")
    return list(value)
