"""Python's logging of what the compiler does, under the name "fxpipe".

Nothing is shown unless the user sets logging up::

    logging.basicConfig(level=logging.INFO)     all of it
    logging.getLogger("fxpipe.guards").setLevel(logging.WARNING)     but this

============================ =======================================================================
``fxpipe.compilations``      each compilation of a kind of call: how long it took, what traced the
                             model, and for which calls the program is right; at level DEBUG the
                             times of its phases, and those of pipelines and steps. Once in a
                             compilation that takes more than 20 seconds, a line says so, also
                             where logging has not been set up
``fxpipe.guards``            why a call needs a compilation, ahead of it
``fxpipe.plan``              each setting that is tried where ``schedule="auto"`` or
                             ``chunks="auto"`` leaves it open, and what it would take; then where
                             the model is cut, and how its stages run; or, if it does not fit, each
                             other option that is tried for the advice, and whether it would fit
``fxpipe.warnings``          each warning, once in a process
============================ =======================================================================
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from types import FrameType

from fxpipe.ir.source import is_a_users

LOGGER = logging.getLogger("fxpipe")
LOGGER.addHandler(logging.NullHandler())  # Python would print warnings a second time without one
COMPILATIONS = LOGGER.getChild("compilations")
GUARDS = LOGGER.getChild("guards")
PLAN = LOGGER.getChild("plan")
WARNINGS = LOGGER.getChild("warnings")

_told: ContextVar[set[str] | None] = ContextVar("told", default=None)

MANY = 1000  # the most warnings that are remembered


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Give a warning as ``warnings.warn`` does, for the line of the user's that has led to it, and
    log it if it is the first one of its text. Within :func:`each_once` it is given once."""
    told = _told.get()
    if told is not None and text in told:
        return
    _log(text)
    warnings.warn(text, category, _level())
    if told is not None:
        told.add(text)


@contextmanager
def each_once(told: set[str] | None) -> Iterator[None]:
    """Inside the ``with`` block :func:`warn` gives no warning whose text is in ``told``, to which
    it adds those that it gives; None: it gives all.

    Python gives a warning once for a line, but forgets that whenever somebody catches warnings, as
    PyTorch does while it traces a model. So a model that is compiled again for other calls would
    warn of the same again.
    """
    token = _told.set(told)
    try:
        yield
    finally:
        _told.reset(token)


def line_of_the_user() -> tuple[str, int]:
    """The file and the line that :func:`warn` would give a warning for."""
    frame = sys._getframe(_level() - 1)
    return frame.f_code.co_filename, frame.f_lineno


def _level() -> int:
    """The ``stacklevel`` of the innermost frame that may be a user's, as :func:`warn` has to give
    it; that of its caller, if there is none, as in a thread of our own."""
    frame: FrameType | None = sys._getframe(2)
    level = 2
    while frame is not None:
        name = frame.f_globals.get("__name__", "")  # of generated code, it is that of its module
        if is_a_users(frame.f_code.co_filename, name):
            return level
        frame, level = frame.f_back, level + 1
    return 2


@lru_cache(MANY)
def _log(text: str) -> None:
    WARNINGS.warning("%s", text)
