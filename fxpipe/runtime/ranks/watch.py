"""Watch: ranks note for whom they wait, so that a rank that hangs is told from those that wait for
it.

::

    rank 3  waits for ─> rank 2  waits for ─> rank 1  waits for nobody: it hangs

A rank that has waited for a second notes for which transfer of which rank, in the store of the
process group. Once it has waited for as long as the group allows, it follows the notes to the rank
that has none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from fxpipe.ir._torch import store_of_ranks

_PERIOD = 1.0  # seconds between two looks at what this rank does


class Watch:
    """The notes of the ranks of one pipeline.

    Args:
        name: a text that is the same on all its ranks, and another one for each pipeline.
        rank: the number of this rank.
        names: what messages call the ranks.
    """

    def __init__(self, name: str, rank: int, names: Sequence[str]) -> None:
        self._names = names
        self._name, self._rank, self._run = name, rank, 0
        self._store: Any = store_of_ranks()
        # The other rank, the transfer, since when.
        self._wait: tuple[int, Callable[[], str], float] | None = None
        self._ended = threading.Event()
        thread = threading.Thread(target=self._note, name="fxpipe-watch", daemon=True)
        thread.start()

    def begin(self, run: int) -> None:
        """Begin a run; all ranks count their runs alike."""
        self._run, self._wait = run, None

    @contextmanager
    def waiting(self, other: int, transfer: Callable[[], str]) -> Iterator[None]:
        """A context in which this rank waits for a transfer of another rank; ``transfer`` says
        which, if it waits for long."""
        self._wait = other, transfer, time.monotonic()
        try:
            yield
        finally:
            self._wait = None

    def _note(self) -> None:
        noted = None
        while not self._ended.wait(_PERIOD):
            wait = self._wait
            if wait is not None and wait is not noted and time.monotonic() - wait[2] > _PERIOD:
                with suppress(RuntimeError):  # the store may have ended with its process
                    self._store.set(self._key(self._rank), f"{self._run} {wait[0]} {wait[1]()}")
                noted = wait

    def said(self, rank: int) -> str:
        """What to add to an error, when this rank has waited too long for another one: which rank
        hangs, and who waits for whom."""
        waits = []
        seen = {self._rank}
        while rank not in seen and (wait := self._noted(rank)) is not None:
            waits.append(f"{self._names[rank]} waits for {wait[1]}")
            seen.add(rank)
            rank = wait[0]
        if rank in seen:
            return ""
        hanging = f"{self._names[rank]} hangs or has ended, as it waits for no other rank"
        return "; ".join([hanging, *waits])

    def _noted(self, rank: int) -> tuple[int, str] | None:
        """For whom a rank has noted in this run that it waits, and for which transfer."""
        with suppress(RuntimeError):  # the store may have ended with its process
            if self._store.check([self._key(rank)]):
                run, other, transfer = self._store.get(self._key(rank)).decode().split(" ", 2)
                return (int(other), transfer) if int(run) == self._run else None
        return None

    def _key(self, rank: int) -> str:
        return f"fxpipe/{self._name}/waits/{rank}"

    def close(self) -> None:
        """End the thread that notes for whom this rank waits."""
        self._ended.set()
