"""Brief traces of what a model raises on the very inputs of a call.

Such an error is the user's, and nothing of the compiler can help to find it: of its trace only the
frames of the model and of its layers are left. Its notes, its cause and its context stay::

    called by the user        File "train.py", line 9             kept
    the compiler, the check   17 frames                           left out
    the model                 File "model.py", line 31            kept
    a layer of PyTorch        File "torch/nn/modules/linear.py"   kept, without what calls it
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

from fxpipe.ir.errors import is_itself
from fxpipe.ir.source import is_of_a_layer, is_of_a_model

P = ParamSpec("P")
T = TypeVar("T")


def brief(function: Callable[P, T]) -> Callable[P, T]:
    """A function that compiles a model for a call: what the model itself raises on the inputs of
    that call has a brief trace."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if is_itself(error) and (kept := _of_the_model(error.__traceback__)):
                error.__traceback__ = kept
            raise

    return called


def _of_the_model(trace: TracebackType | None) -> TracebackType | None:
    """The frames of a trace that are of a model or a layer; None if there is none."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    kept: TracebackType | None = None
    for each in reversed(frames):
        file = each.tb_frame.f_code.co_filename
        if is_of_a_model(file) or is_of_a_layer(file):
            kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept
