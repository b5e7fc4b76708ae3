"""``len(x)`` of a tensor, which a trace is to record as the size that it is.

::

    forward(x):  ... .expand(len(x))      traced    x ── size(0) ── expand

Python makes an int of what ``len`` gives: symbolic tracing, which has none, would fail, and an
export would make a constant of the batch size, so that each batch size were compiled by itself. So
the functions of a model's classes find another ``len`` while they are traced: among the globals of
their modules, which hide the built-in function.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import Tensor, fx, nn

from fxpipe.ir.source import is_of_a_model
from fxpipe.trace.patches import LOCK


@contextmanager
def lengths_recorded(model: nn.Module) -> Iterator[None]:
    """Inside the ``with`` block ``len(x)`` is ``x.size(0)`` for the functions of a model's classes,
    in this thread, where ``x`` is a tensor, or stands for a value in a symbolic trace."""
    thread = threading.get_ident()

    def length(value: Any) -> Any:
        is_recorded = isinstance(value, fx.Proxy) or (isinstance(value, Tensor) and value.ndim > 0)
        if is_recorded and threading.get_ident() == thread:
            return value.size(0)
        return len(value)

    with LOCK:
        scopes = _scopes(model)
        for names in scopes:
            names["len"] = length
        try:
            yield
        finally:
            for names in scopes:
                names.pop("len", None)


def _scopes(model: nn.Module) -> list[dict[str, Any]]:
    """The globals of the functions of a model's classes, but for those that have a ``len``."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    functions = [
        value
        for kind in kinds
        for value in vars(kind).values()
        if isinstance(value, FunctionType) and is_of_a_model(value.__code__.co_filename)
    ]
    scopes = {id(each.__globals__): each.__globals__ for each in functions}
    return [names for names in scopes.values() if "len" not in names]
