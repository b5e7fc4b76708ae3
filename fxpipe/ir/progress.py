"""Progress: work that takes time reports which part of it begins, and a listener may show that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str], None]

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def report_progress(part: str) -> None:
    """Tell the listener of this context, if there is one, that a part of the work begins.

    ``part`` names it in a word or two: the name of a pass, say.
    """
    listener = _listener.get()
    if listener is not None:
        listener(part)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Within it, ``listener`` is told of each part that begins in this thread.

    An outer listener is told nothing meanwhile.
    """
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
