"""Alarm: how a rank learns why a run has failed elsewhere.

::

    rank 1    is killed
    rank 2    its connection to rank 1 closes ── reports it ──┐
    rank 0    its connection to rank 1 closes ── reports it ──┤   which of them came first in the
    rank 3    its connection to rank 2 closes ┄┄ reads that ◁─┘   order of the step

Ranks of one replica send each other their failures in place of values (see
:mod:`fxpipe.runtime.ranks.transport`). A rank that has ended, a sum over replicas, and the question
whether all ranks have done a step, have no such place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from fxpipe.ir._torch import store_of_ranks
from fxpipe.runtime.ranks.errors import RankError
from fxpipe.runtime.ranks.worker import Worker, WorkerJob

T = TypeVar("T")
_POLL = 0.2  # seconds between two looks
_TOGETHER = 0.5  # seconds in which ranks that lose the same rank report it
_PATIENCE = 5.0  # seconds that the store, which is in some process, may take


class Alarm:
    """The alarm of one pipeline, in the store of the process group.

    The process that has the store may be the one that has ended or hangs. Then nothing is heard.

    Args:
        rank: the number of this rank.
        size: the number of all ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.name = ""
        """A text that is the same on all ranks of the pipeline, and another one for each pipeline;
        it is set once the ranks have agreed on it."""
        self._rank, self._size, self._run = rank, size, 0
        self._store: Any = store_of_ranks()
        self._worker = Worker("fxpipe-alarm")

    def begin(self) -> None:
        """Begin the next run. All ranks count their runs alike."""
        self._run += 1

    def ring(self, text: str, is_final: bool) -> None:
        """Tell all ranks that this run has failed. Only the first text is kept.

        ``is_final``: whether ranks that wait for this one shall end, as it does not come.
        """
        self._asked(lambda: self._store.compare_set(self._key("cause"), "", text))
        if is_final:
            self._asked(lambda: self._store.set(self._key("over"), "1"))

    def heard(self) -> str:
        """The first failure that a rank has told in this run, or an empty text."""
        return self._asked(lambda: self._read(self._key("cause")), "") or ""

    def report(self, place: int, text: str, is_hanging: bool) -> str:
        """Report that this rank has lost another one, and return the reports of all ranks that have
        lost one, in the order of their places in the step.

        ``is_hanging``: whether the other rank has not answered, rather than ended. Then all ranks
        that wait for it lose it at about the same time, and this one waits for their reports.
        """
        own = [(place, text)]
        self._asked(partial(self._note, place, text))
        if is_hanging:
            time.sleep(_TOGETHER)
        reports: list[tuple[int, str]] = self._asked(self._reports, own)
        return "; ".join(dict.fromkeys(text for _, text in sorted({*own, *reports})))

    def missing(self) -> list[int]:
        """The ranks that do not say within half a second that they too miss a rank."""
        self._asked(self._be_here)
        time.sleep(_TOGETHER)
        keys = [self._key(f"{rank}/here") for rank in range(self._size)]
        is_here: list[str] = self._asked(lambda: [self._read(key) for key in keys], ["1"])
        return [rank for rank, here in enumerate(is_here) if not here]

    def _be_here(self) -> None:
        self._store.set(self._key(f"{self._rank}/here"), "1")

    def _note(self, place: int, text: str) -> None:
        self._be_here()
        key = self._key(str(self._rank))
        earlier = self._read(key)
        if not earlier or place < int(earlier.split(" ", 1)[0]):
            self._store.set(key, f"{place} {text}")

    def _reports(self) -> list[tuple[int, str]]:
        found = (self._read(self._key(str(rank))) for rank in range(self._size))
        split = (report.split(" ", 1) for report in found if report)
        return [(int(place), text) for place, text in split]

    def wait(self, job: WorkerJob[T]) -> T:
        """What a job returns. Raises :class:`RankError` if a rank rings the alarm for good
        before."""
        return self._waited(partial(job.result, _POLL), job.done)

    def wait_for(self, work: dist.Work) -> None:
        """Wait until a collective that has begun on the host is done. Raises :class:`RankError` if
        a rank rings the alarm for good before."""
        self._waited(partial(work.wait, timedelta(seconds=_POLL)), work.is_completed)

    def _waited(self, wait: Callable[[], T], is_done: Callable[[], bool]) -> T:
        """What ``wait()`` returns, which raises an error when it has waited for a while."""
        while True:
            try:
                return wait()
            except (TimeoutError, RuntimeError):
                if is_done():  # it has failed, or it has come since
                    return wait()
            if self._asked(lambda: self._read(self._key("over"))):
                raise RankError(self.heard())

    def _read(self, key: str) -> str:
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    def _asked(self, question: Callable[[], T], silent: T | None = None) -> Any:
        """What the store answers; ``silent`` if it does not."""
        with suppress(RuntimeError, TimeoutError):
            return self._worker.do(question).result(timeout=_PATIENCE)
        return silent

    def _key(self, what: str) -> str:
        return f"fxpipe/{self.name}/{self._run}/{what}"

    def close(self) -> None:
        """End the thread that talks to the store."""
        self._worker.end()
