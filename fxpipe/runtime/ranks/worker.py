"""A thread for what a rank exchanges with others while it goes on computing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class Worker:
    """A thread that runs jobs one after the other.

    It ends with the process, even if a job waits for a rank that never answers. The threads of a
    ``ThreadPoolExecutor`` would keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._left: list[Future[Any]] = []
        threading.Thread(target=_work, args=(self._queue,), name=name, daemon=True).start()

    def do(self, job: Callable[[], Any]) -> Future[Any]:
        """Let the thread run a job, after all earlier jobs. Returns the future of its result."""
        future: Future[Any] = Future()
        self._left = [each for each in self._left if not each.done() or each.exception()]
        self._left.append(future)
        self._queue.put((future, job))
        return future

    def rest(self, is_quiet: bool = False) -> None:
        """Wait until all jobs are done. Raises the first error of one, unless ``is_quiet``."""
        left, self._left = self._left, []
        errors = [error for each in left if (error := each.exception()) is not None]
        if errors and not is_quiet:
            raise errors[0]

    def end(self) -> None:
        """End the thread, once all jobs are done."""
        self._queue.put(None)


def _work(queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (given := queue.get()) is not None:
        future, job = given
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)
        del given, future, job
