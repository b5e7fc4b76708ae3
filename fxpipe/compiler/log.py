"""A log of how long each phase of a compilation takes.

It is written to Python's logger "fxpipe", at level INFO, if ``compile(verbose=True)`` is given or
the environment asks for it::

    FXPIPE_LOGS=compile python train.py
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from fxpipe.ir.progress import Phase, phase, timed

LOGGER = logging.getLogger("fxpipe")
VARIABLE = "FXPIPE_LOGS"
COMPILE = "compile"


def wants_log() -> bool:
    """Whether the environment asks for a log of compilations."""
    return COMPILE in os.environ.get(VARIABLE, "").replace(" ", "").split(",")


@contextmanager
def logged(title: str, is_wanted: bool) -> Iterator[None]:
    """The ``with`` block is a phase of the compilation. If ``is_wanted``, a table is logged at the
    end of the block, also if an exception ends it: how long the block took, and how long each phase
    within it."""
    if not is_wanted:
        with phase(title, quiet=True):
            yield
        return
    whole = Phase(title)
    try:
        with timed(title) as whole:
            yield
    finally:
        _show(whole.table())


def _show(text: str) -> None:
    """Log a message so that it is seen: where logging has not been set up, on stderr."""
    level = LOGGER.level
    handler = None if LOGGER.hasHandlers() else logging.StreamHandler()
    if handler is not None:
        LOGGER.addHandler(handler)
    if not LOGGER.isEnabledFor(logging.INFO):
        LOGGER.setLevel(logging.INFO)
    try:
        LOGGER.info("%s", text)
    finally:
        LOGGER.setLevel(level)
        if handler is not None:
            LOGGER.removeHandler(handler)
