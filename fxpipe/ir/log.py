"""Python's logging of what the compiler does, under the name "fxpipe".

Nothing is shown unless the user sets logging up::

    logging.basicConfig(level=logging.INFO)     all of it
    logging.getLogger("fxpipe.guards").setLevel(logging.WARNING)     but this

============================ =======================================================================
``fxpipe.compilations``      each compilation of a kind of call: how long it took, what traced the
                             model, and for which calls the program is right; at level DEBUG the
                             times of its phases, and those of pipelines and steps
``fxpipe.guards``            why a call needs a compilation, ahead of it
``fxpipe.plan``              each setting that is tried where ``schedule="auto"`` or
                             ``chunks="auto"`` leaves it open, and what it would take; then where
                             the model is cut, and how its stages run
``fxpipe.warnings``          each warning, once in a process
============================ =======================================================================
"""

from __future__ import annotations

import logging
import warnings
from functools import lru_cache

LOGGER = logging.getLogger("fxpipe")
LOGGER.addHandler(logging.NullHandler())  # Python would print warnings a second time without one
COMPILATIONS = LOGGER.getChild("compilations")
GUARDS = LOGGER.getChild("guards")
PLAN = LOGGER.getChild("plan")
WARNINGS = LOGGER.getChild("warnings")

MANY = 1000  # the most warnings that are remembered


def warn(text: str, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
    """Give a warning as ``warnings.warn`` does, and log it if it is the first one of its text."""
    _log(text)
    warnings.warn(text, category, stacklevel + 1)


@lru_cache(MANY)
def _log(text: str) -> None:
    WARNINGS.warning("%s", text)
