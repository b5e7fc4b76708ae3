"""The end of the interpreter, which waits for the calls of pipelines in daemon threads.

When Python ends it leaves a daemon thread where it is, for ever. If that is in the middle of an
operator of PyTorch, the process aborts: "terminate called without an active exception". So Python's
exit handlers first wait until no call of a pipeline is under way, and a daemon thread stays inside
of the call that it makes or ends from then on::

    main thread     ...  ends ──── waits for the calls ────> ends the lanes ──> the process ends
    daemon thread   ── call ── call ─────────────────── stays in its call

What a daemon thread computes outside of a call is left to Python, as without a pipeline.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class CallsUnderWay:
    """The calls of pipelines in daemon threads of this process, and whether it is ending."""

    def __init__(self) -> None:
        self._is_within = threading.local()
        self.reset()

    def reset(self) -> None:
        """Forget all calls. A forked process has no threads of its parent, and so no calls."""
        self._changed = threading.Condition()
        self._under_way = 0
        self._is_ending = False

    def belong(self) -> None:
        """Let this thread belong to the calls of other threads, as a lane does: a call that is made
        in it is a part of theirs, and never waits."""
        self._is_within.value = True

    @contextmanager
    def one(self) -> Iterator[None]:
        """A context that a call runs in; a call inside of it belongs to it.

        Only calls of daemon threads count: Python joins other threads ahead of its exit handlers.
        """
        if getattr(self._is_within, "value", False) or not threading.current_thread().daemon:
            yield
            return
        self._count(1)
        self._is_within.value = True
        try:
            yield
        finally:
            self._is_within.value = False
            self._count(-1)

    def _count(self, more: int) -> None:
        """Count a call that begins or ends. The thread stays here once the process is ending."""
        with self._changed:
            if more < 0 or not self._is_ending:
                self._under_way += more
                self._changed.notify_all()
            stays = self._is_ending
        if stays:
            threading.Event().wait()

    def end(self) -> None:
        """Wait until no call is under way, and let daemon threads stay in theirs from now on.

        Ctrl-C ends the waiting, as it ends other exit handlers.
        """
        with self._changed:
            self._is_ending = True
            self._changed.wait_for(lambda: self._under_way == 0)


CALLS = CallsUnderWay()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=CALLS.reset)


def call(function: Callable[P, T]) -> Callable[P, T]:
    """A function that is a call of a pipeline: the interpreter does not end in the middle of it."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        with CALLS.one():
            return function(*args, **kwargs)

    return called


@functools.cache
def wait_for_calls_at_exit() -> None:
    """Let the end of the interpreter wait for calls.

    Exit handlers run in reverse order. The threads of lanes are ended by the handler of
    ``weakref.finalize``, which is registered with the first finalizer: register this one after
    that, so that no lane ends while a call still has work for it.
    """
    atexit.register(CALLS.end)
