"""Alarm: how a rank learns that a run has failed elsewhere while it waits for something else.

::

    replica 0    rank 0 waits for the sum of gradients ┄┄┄┄ looks for an alarm, and raises its text
    replica 1    rank 0 raises an error ── rings the alarm ──┘

Ranks of one replica send each other their failures in place of values (see
:mod:`fxpipe.runtime.ranks.transport`). A sum over replicas has no such place.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, TypeVar

from fxpipe.ir._torch import store_of_ranks
from fxpipe.runtime.ranks.transport import RankError

T = TypeVar("T")
_POLL = 0.2  # seconds between two looks


class Alarm:
    """The alarm of one pipeline, in the store of the process group.

    Args:
        name: a text that is the same on all its ranks, and another one for each pipeline.
    """

    def __init__(self, name: str) -> None:
        self._name, self._run = name, 0
        self._store: Any = store_of_ranks()

    def begin(self) -> None:
        """Begin the next run. All ranks count their runs alike."""
        self._run += 1

    def ring(self, text: str) -> None:
        """Tell all ranks that this run has failed. Only the first failure is kept."""
        self._store.compare_set(self._key, "", text)

    def wait(self, future: Future[T]) -> T:
        """The result of a future. Raises :class:`RankError` if the alarm is rung before."""
        while True:
            try:
                return future.result(timeout=_POLL)
            except TimeoutError:
                if future.done():
                    raise
            if self._store.check([self._key]):
                raise RankError(self._store.get(self._key).decode())

    @property
    def _key(self) -> str:
        return f"fxpipe/{self._name}/{self._run}"
