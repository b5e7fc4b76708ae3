"""Skip connections by name, for models whose modules do not hand them to each other.

::

    class Encoder(nn.Module):                     class Decoder(nn.Module):
        def forward(self, x):                         def forward(self, x):
            fxpipe.skip.stash("fine", x)                  return x + fxpipe.skip.pop("fine")
            return self.conv(x)

In an eager call, a stashed tensor is kept in a tracker of the running thread until it is popped.
When the model is compiled, stash and pop become an edge of its graph, like that of any other value
that one node computes and another one uses; the names are gone from the graph.

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
    """A skip is stashed twice, popped before it is stashed, or never popped; the message names the
    modules."""


class Namespace:
    """Keeps the names of one part of a model apart from the same names of another part."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Namespace({self.name!r})"


Key = tuple[Namespace | None, str]


class Tracker:
    """The tensors that have been stashed in one forward and not yet popped, with the modules that
    have stashed them.

    ``strict``: whether stashing a name that is in use is an error; if not, it replaces the tensor.
    """

    def __init__(self, model: nn.Module | None = None, *, strict: bool = True) -> None:
        self._strict = strict
        self._names = {} if model is None else {m: n for n, m in model.named_modules()}
        self._held: dict[Key, tuple[Any, str]] = {}
        self._popped: dict[Key, str] = {}

    def save(self, key: Key, value: Any, module: object) -> None:
        """Stash a value. Raises :class:`SkipError` if the name is in use and it is strict."""
        by = self._describe(module)
        if key in self._held and self._strict:
            raise SkipError(
                f"{_text(key)} is stashed by {by}, but it is stashed already, by "
                f"{self._held[key][1]}, and has not been popped: give the two different names, or "
                "namespaces"
            )
        self._held[key] = value, by

    def load(self, key: Key, module: object) -> Any:
        """Pop a value. Raises :class:`SkipError` if nothing is stashed under the name."""
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
        """Called at the end of a forward: raises :class:`SkipError` if a value has not been
        popped."""
        for key, (_, by) in self._held.items():
            raise SkipError(
                f"{_text(key)} is stashed by {by}, and nobody pops it: pop it in a "
                "module that runs later, or do not stash it"
            )

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
        # Not strict: an eager forward that has raised an error may have left stashed tensors.
        self.tracker = Tracker(strict=False)


_current = _Current()


@contextmanager
def tracking(model: nn.Module | None = None) -> Iterator[Tracker]:
    """Give one forward of a model, inside the ``with`` block, a strict tracker of its own.

    Raises:
        SkipError: at the end of the block, if a value has been stashed and not popped.
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
        SkipError: while the model is compiled, if the name is in use already. In an eager call the
            new tensor replaces the old one, which a forward that raised an error may have left.
    """
    _current.tracker.save((namespace, name), tensor, _calling_module())


def pop(name: str, namespace: Namespace | None = None) -> Any:
    """Take the tensor that has been stashed under a name earlier in the same forward.

    Raises:
        SkipError: if none has been stashed under that name, or it has been popped already.
    """
    return _current.tracker.load((namespace, name), _calling_module())


def _calling_module() -> object:
    """The module whose forward has called ``stash`` or ``pop``, for messages only.

    Users call these two as plain functions, so that no argument says which module is running, and
    PyTorch does not tell it either: hooks that would, on every module, slow down each forward and
    make modules look as if a user watched them. So this function reads one local variable, which is
    ``self``, of the frame that has made the call. Where it is no module, the messages speak of a
    function; no value of a model depends on it.
    """
    caller = sys._getframe(2)
    return caller.f_locals.get("self")
