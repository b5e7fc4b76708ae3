"""Progress: what takes time says that it begins, and whoever listens may show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str], None]

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def began(what: str) -> None:
    """Say that a part of the work begins: a pass, say. Nobody listens by default."""
    listener = _listener.get()
    if listener is not None:
        listener(what)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Within it, ``listener`` is told what begins, in this thread."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
