"""Skip connections by name, for models whose modules do not hand them to each other.

::

    class Encoder(nn.Module):                     class Decoder(nn.Module):
        def forward(self, x):                         def forward(self, x):
            fxpipe.skip.stash("fine", x)                  return x + fxpipe.skip.pop("fine")
            return self.conv(x)

As the model is called, what is stashed lies in a tracker of the running thread until it is popped.
When the model is compiled, the two ends become an edge of its graph, like any other value that is
made here and used there, and nothing is left of the names.

The idea is torchgpipe's (``torchgpipe.skip``), where modules declare their names and yield.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class SkipError(RuntimeError):
    """A skip is stashed or popped where that cannot be; the message names the modules."""


class Namespace:
    """Keeps the names of one part of a model apart from the same names of another part."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Namespace({self.name!r})"


Key = tuple[Namespace | None, str]


class Tracker:
    """What has been stashed and not yet popped, and by whom."""

    def __init__(self, model: nn.Module | None = None, *, strict: bool = True) -> None:
        self._strict = strict
        self._names = {} if model is None else {m: n for n, m in model.named_modules()}
        self._held: dict[Key, tuple[Any, str]] = {}
        self._popped: dict[Key, str] = {}

    def save(self, key: Key, value: Any, module: object) -> None:
        """Stash. Raises :class:`SkipError` if the name is in use."""
        by = self._describe(module)
        if key in self._held and self._strict:
            raise SkipError(
                f"{_text(key)} is stashed by {by}, but it is stashed already, by "
                f"{self._held[key][1]}, and has not been popped: give the two different names, or "
                "namespaces"
            )
        self._held[key] = value, by

    def load(self, key: Key, module: object) -> Any:
        """Pop. Raises :class:`SkipError` if nothing is there."""
        by = self._describe(module)
        if key in self._held:
            self._popped[key] = by
            return self._held.pop(key)[0]
        if key in self._popped:
            why = f"has been popped already, by {self._popped[key]}: keep what pop returns"
        elif others := ", ".join(map(_text, self._held)):
            why = f"has not been stashed by then; what has been is {others}"
        else:
            why = "has not been stashed by then: a skip goes forward only"
        raise SkipError(f"{_text(key)} is popped by {by}, but it {why}")

    def check(self) -> None:
        """At the end of a forward. Raises :class:`SkipError` if anything has not been popped."""
        for key, (_, by) in self._held.items():
            raise SkipError(f"{_text(key)} is stashed by {by}, and nobody pops it")

    def _describe(self, module: object) -> str:
        if not isinstance(module, nn.Module):
            return "a function outside of any module"
        path = self._names.get(module)
        return f"{path} ({type(module).__name__})" if path else f"a {type(module).__name__}"


def _text(key: Key) -> str:
    namespace, name = key
    return repr(name) if namespace is None else f"{name!r} of {namespace!r}"


class _Current(threading.local):
    def __init__(self) -> None:
        # Not strict: an eager forward that has failed on its way may have left something.
        self.tracker = Tracker(strict=False)


_current = _Current()


@contextmanager
def tracking(model: nn.Module | None = None) -> Iterator[Tracker]:
    """A tracker of its own for one forward of a model, complete at its end.

    Raises:
        SkipError: at the end, if something has been stashed that nobody has popped.
    """
    before, tracker = _current.tracker, Tracker(model)
    _current.tracker = tracker
    try:
        yield tracker
    finally:
        _current.tracker = before
    tracker.check()


def stash(name: str, tensor: Any, namespace: Namespace | None = None) -> None:
    """Lay a tensor aside, to be popped later in the same forward.

    Raises:
        SkipError: when compiled, if one of that name lies there already. Called eagerly, it takes
            the place of one that a forward which failed has left.
    """
    _current.tracker.save((namespace, name), tensor, _caller())


def pop(name: str, namespace: Namespace | None = None) -> Any:
    """Take what has been stashed under a name.

    Raises:
        SkipError: if nothing has, or it has been taken.
    """
    return _current.tracker.load((namespace, name), _caller())


def _caller() -> object:
    """The module whose forward has called, for messages."""
    frame = sys._getframe(2)
    return frame.f_locals.get("self")
