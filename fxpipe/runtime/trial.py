"""Which of two ways to do the same takes less time, found out while it is done again and again.

::

    runs     1 2 3   4 5 6   7 ...
    way      usual   other   the faster one; now and then the slower one, once

How long a way takes is forgotten little by little, so that it is tried again: the sooner, the less
that costs.
"""

from __future__ import annotations

import math

FIRST = 3  # runs of either way, with which the trial begins
FORGOTTEN = 0.002  # of the time of the way that is not taken, at each run
SLOW = 0.25  # what a slower run than before counts: others take the processor now and then


class Trial:
    """Chooses between a usual way and another one for each run.

    Args:
        brief: the other way is not tried where the usual one takes no less than these seconds,
            since it might take many times as long.
    """

    def __init__(self, brief: float) -> None:
        self._brief = brief
        self._runs = 0
        self._seconds = [math.inf, math.inf]  # of the usual and of the other way

    def takes_other(self) -> bool:
        """Whether the next run takes the other way."""
        usual, other = self._seconds
        if self._runs < FIRST or usual >= self._brief:
            return False
        return self._runs < 2 * FIRST or other < usual

    def note(self, other: bool, seconds: float) -> None:
        """Note how long a run has taken, and whether it has taken the other way."""
        self._runs += 1
        known = self._seconds[other]
        weight = SLOW if seconds > known else 1
        self._seconds[other] = seconds if known == math.inf else known + weight * (seconds - known)
        self._seconds[not other] *= 1 - FORGOTTEN
