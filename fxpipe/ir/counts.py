"""Checks of numbers that users give, such as how many micro-batches to make."""

from __future__ import annotations

import operator
from typing import SupportsIndex


def count(name: str, value: SupportsIndex, what: str) -> int:
    """A number of something, 1 or more; any integer will do, NumPy's too.

    Raises ValueError, which says that ``name`` was given as ``value``, and should be ``what``.
    """
    number = integer(value)
    if number is None or number < 1:
        raise ValueError(f"{name} is {value!r}: give {what}, 1 or more")
    return number


def integer(value: object) -> int | None:
    """The int that a value is; None if it is no integer."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
