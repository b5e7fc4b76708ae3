"""Memory that has been freed, and that the C library keeps.

glibc keeps what lies between pieces that are still in use, and lets its heap grow by tens of
megabytes before it gives anything back. A run of a model frees as much as all activations take, of
which hardly two have one size, so that the heap may become several times as large as what is in use
at once.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable


def give_back() -> None:
    """Give memory that has been freed back to the system, where the C library is glibc. This takes
    some milliseconds."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, or Windows
        return None
    return found


_level = 0  # bytes


def keep_low(slack: int) -> None:
    """Give memory that has been freed back to the system, if the process has more by ``slack``
    bytes than has been in use at any one time since :func:`forget_level`.

    Memory up to there has been in use, and may be in use again. To give that back as well would
    take long: it has to be mapped again, page by page, for the next activations.
    """
    global _level
    if resident() > _level:
        give_back()
        _level = max(_level, resident() + slack)


def forget_level() -> None:
    """Begin anew with how much memory has been in use at one time."""
    global _level
    _level = 0


def resident() -> int:
    """The bytes of physical memory of this process, as Linux counts them; 0 on other systems."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
