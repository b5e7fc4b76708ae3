"""Values of a symbolic trace that the forward uses as a key, or writes as text.

::

    scales = {3: 2.0, 9: 3.0}
    return h * scales.get(x.shape[1], 1.0)      the size of the trace is no key: always 1.0
    return self.per_length[str(x.shape[1])](h)  its text is "getitem_1"

Python asks a key for its hash, and compares only what has the same. The proxy that stands for a
size has a hash of its own, so that nothing is found, and nothing tells of it. ``torch.export``
takes the size for a constant there, with a guard.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import fx

from fxpipe.ir.source import is_of_a_model, is_pythons
from fxpipe.trace.errors import source_line


class Proxy(fx.Proxy):
    """A proxy whose tracer notes in ``looked_up`` at which line of a model it has been used as a
    key, or written as text."""

    def __hash__(self) -> int:
        self._note(sys._getframe(1))
        return super().__hash__()

    def __repr__(self) -> str:
        self._note(sys._getframe(1))
        return super().__repr__()

    def __str__(self) -> str:
        self._note(sys._getframe(1))
        return super().__repr__()

    def __format__(self, specification: str) -> str:
        self._note(sys._getframe(1))
        return super().__repr__()

    def _note(self, frame: FrameType | None) -> None:
        """Note the line of the model that runs, if the frame is of it, or of Python's own library,
        which it has called (an ``Enum``, a ``Counter``)."""
        tracer: Any = self.tracer
        while frame is not None and is_pythons(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None and is_of_a_model(frame.f_code.co_filename):
            tracer.looked_up = tracer.looked_up or source_line(
                frame.f_code.co_filename, frame.f_lineno
            )
