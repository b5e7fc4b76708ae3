"""A thread for what a rank exchanges with others while it goes on computing."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class WorkerJob(Generic[T]):
    """A function that another thread runs, and what it returns once it has.

    A ``concurrent.futures.Future`` takes several locks for each result. Each costs little, but the
    Python in it is out of the CPU's caches whenever a rank has computed in between, and another
    rank waits for this one meanwhile.
    """

    __slots__ = ("_function", "_is_done", "_running", "_value", "error")

    def __init__(self, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = function
        self._running = threading.Lock()  # held until the function has returned
        self._running.acquire()
        self._is_done = False
        self._value: T
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run the function, in the thread of this call."""
        assert self._function is not None
        try:
            self._value = self._function()
        except BaseException as error:
            self.error = error
        self._function = None
        self._is_done = True
        self._running.release()

    def done(self) -> bool:
        """Whether the function has been run: it has returned, or has raised an error."""
        return self._is_done

    def wait(self, timeout: float = -1) -> None:
        """Wait until the function has been run. Raises TimeoutError after so many seconds, if they
        are not negative."""
        if self._is_done:  # Ctrl-C may have come between the next two lines of an earlier call
            return
        if not self._running.acquire(timeout=timeout):
            raise TimeoutError
        self._running.release()

    def result(self, timeout: float = -1) -> T:
        """Wait as :meth:`wait` does, and hand over what the function has returned, which the job
        does not keep; or raise its error."""
        self.wait(timeout)
        if self.error is not None:
            raise self.error
        value = self._value
        del self._value
        return value


class Worker:
    """A thread that runs jobs one after the other.

    It ends with the process, even if a job waits for a rank that never answers. The threads of a
    ``ThreadPoolExecutor`` would keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[WorkerJob[Any] | None] = SimpleQueue()
        self._left: deque[WorkerJob[Any]] = deque()
        threading.Thread(target=_work, args=(self._queue,), name=name, daemon=True).start()

    def do(self, function: Callable[[], T]) -> WorkerJob[T]:
        """Let the thread run a function, after all earlier ones."""
        job = WorkerJob(function)
        left = self._left
        while left and left[0].done() and left[0].error is None:
            left.popleft()
        left.append(job)
        self._queue.put(job)
        return job

    def rest(self, is_quiet: bool = False) -> None:
        """Wait until all jobs are done. Raises the first error of one, unless ``is_quiet``."""
        left, self._left = self._left, deque()
        for job in left:
            job.wait()
        errors = [job.error for job in left if job.error is not None]
        if errors and not is_quiet:
            raise errors[0]

    def end(self) -> None:
        """End the thread, once all jobs are done."""
        self._queue.put(None)


def _work(queue: SimpleQueue[WorkerJob[Any] | None]) -> None:
    while (job := queue.get()) is not None:
        job.run()
        del job
