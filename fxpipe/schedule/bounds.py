"""Numbers that are given once for all, or one for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Bound = float | Sequence[float]
"""One number for all, or one for each."""

_T = TypeVar("_T")


def spread(value: _T | Sequence[_T], count: int, what: str) -> list[_T]:
    """One for each of ``count``, from a sequence of them or one for all."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{what}: {len(value)} numbers are given, {count} needed")
    return list(value)
