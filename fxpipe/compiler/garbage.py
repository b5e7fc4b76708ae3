"""While something is compiled, Python looks for garbage among the objects made meanwhile only.

::

    before            a compilation                        after
    ─────────────────┬────────────────────────────────────┬──────────
    a million objects│ set aside, as gc.freeze() does     │ as before
                     │ 100,000 new ones: collected        │

A compilation makes many objects, and each time that their number has grown by a quarter of all,
Python searches every object of the process for cycles that nobody refers to. Those of an imported
PyTorch alone are half a million, and hardly one of them is garbage: a tenth of the time of a
compilation went into it.

Of the new objects hardly one is garbage either, so that Python looks for it after every
:data:`AT_ONCE` of them only: after 700, as it does by itself, that took a twentieth of the time.

Memory that a compilation has freed is given back to the system at its end (:mod:`fxpipe.ir.heap`).
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fxpipe.ir.heap import forget_level, give_back

OF_PYTHON = 10_000
"""Fewer objects than that are frozen by nobody else: Python 3.12 freezes some hundreds of its own,
as it starts. Who calls ``gc.freeze`` freezes what an imported PyTorch has, half a million."""

AT_ONCE = 7_000
"""The new objects after which Python looks for garbage among them, unless it has been told to wait
for more, or not to look at all."""

_lock = threading.Lock()
_users = 0  # how many compilations are under way, in all threads
_has_frozen = False
_thresholds: tuple[int, int, int] | None = None  # those ahead of the compilations, if changed


@contextmanager
def older_objects_set_aside() -> Iterator[None]:
    """A context in which the garbage collector does not look at objects that were there before.

    Nothing is lost: they are looked at again afterwards. Objects that somebody else has frozen
    (``gc.freeze``) remain so, and then nothing more is set aside.
    """
    global _users, _has_frozen, _thresholds
    with _lock:
        if not _users and gc.get_freeze_count() < OF_PYTHON:
            gc.collect(1)  # else what is garbage already would stay for as long as the compilation
            gc.freeze()
            _has_frozen = True
        if not _users and 0 < gc.get_threshold()[0] < AT_ONCE:
            _thresholds = gc.get_threshold()
            gc.set_threshold(AT_ONCE, *_thresholds[1:])
        if not _users:
            forget_level()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users and _has_frozen:
                gc.unfreeze()
                _has_frozen = False
            if not _users and _thresholds is not None:
                gc.set_threshold(*_thresholds)
                _thresholds = None
        give_back()
