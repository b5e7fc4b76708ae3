"""Who asks: the model's own code, in the thread that traces it, or somebody else.

What a model may ask PyTorch for is replaced while the model runs (:mod:`fxpipe.trace.patches`), to
see that it asks. PyTorch asks the same in its own functions, and so does a model that is running in
another thread: neither counts.
"""

from __future__ import annotations

import dis
import threading
from collections.abc import Callable
from types import FrameType

from fxpipe.ir.source import is_a_models, is_of_a_layer, is_pythons

_ASK_FOR_A_CLASS = "LOAD_ATTR", "LOAD_METHOD", "MATCH_CLASS"


def in_this_thread() -> Callable[[], bool]:
    """A function that tells whether it is called in the thread that has called this one."""
    thread = threading.get_ident()
    return lambda: threading.get_ident() == thread


def by_the_model(*, layers: bool = False) -> Callable[[FrameType], bool]:
    """A function that tells of a frame whether it asks for a model: whether it runs code that may
    be a model's, in the thread that has called this function.

    Args:
        layers: whether the code of PyTorch's layers counts as well.
    """
    is_here = in_this_thread()

    def asks(frame: FrameType) -> bool:
        counts = is_a_models(frame) or (layers and is_of_a_layer(frame.f_code.co_filename))
        return counts and is_here()

    return asks


def is_called_by_a_model(frame: FrameType | None) -> bool:
    """Whether a frame runs code that may be a model's, or of Python's own library, which the model
    has called (an ``Enum``, a ``Counter``, a logger)."""
    while frame is not None and is_pythons(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and is_a_models(frame)


def asks_for_a_class(frame: FrameType) -> bool:
    """Whether a frame, which has asked an object for its ``__class__``, does so for a model, and is
    at an instruction of Python's that asks: by ``x.__class__``, by ``match``, or in
    ``functools.singledispatch``. In a call it is PyTorch that asks, which would take what stands
    for a tensor, and says that it is one, for a tensor."""
    code = frame.f_code.co_code[frame.f_lasti]
    return dis.opname[code] in _ASK_FOR_A_CLASS and is_called_by_a_model(frame)
