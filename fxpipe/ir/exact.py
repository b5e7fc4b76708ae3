"""Constants as a program depends on them: ``==`` does not tell 0.0 from -0.0, and NaN is unequal to
itself.

::

    math.copysign(1.0, c)       1.0 for 0.0 and -1.0 for -0.0, which are equal
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fxpipe.ir.text import Word


def exact(value: Any) -> Any:
    """What stands for a constant where two of one type are compared: the constant itself, or its
    text, if it is a number that ``==`` does not compare by what it is."""
    if isinstance(value, float):
        return value if value and value == value else Word(repr(value))
    return Word(repr(value)) if isinstance(value, complex | np.inexact) else value
