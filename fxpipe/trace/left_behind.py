"""What code of the user's leaves in Python objects while a graph runs, beside the values of the
graph: a hook that keeps a feature in a dictionary, say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LeftBehind:
    """A container, an object, a module, a tensor or a variable
    (:class:`fxpipe.trace.outer.OuterVariable`) that some node of a graph has changed."""

    thing: Any
    by: str
    """The code that the node runs, in words."""
    names: frozenset[str] = frozenset()
    """The names of the attributes that have changed, if it is a module."""
