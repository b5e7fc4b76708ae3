"""The lines of the model at which each node of a graph is recorded."""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType
from typing import Any

from torch import fx

from fxpipe.ir.source import is_a_models
from fxpipe.trace.patches import patched

_TRACE = inspect.unwrap(fx.Tracer.trace).__code__


def running_lines() -> str:
    """The lines of the model that are running, in the format of a Python traceback. fx can record
    them too, among those of PyTorch, but takes a large part of a millisecond for each node."""
    lines: list[str] = []
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code is not _TRACE:
        # A function that PyTorch has made by eval is of no module.
        if is_a_models(frame) and "__name__" in frame.f_globals:
            lines.append(_line(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return "".join(reversed(lines))


@lru_cache
def _line(code: CodeType, number: int) -> str:
    text = linecache.getline(code.co_filename, number).strip()
    return f'  File "{code.co_filename}", line {number}, in {code.co_name}\n    {text}\n'


@contextmanager
def lines_of_the_model() -> Iterator[None]:
    """Inside the ``with`` block ``torch.export`` gives nodes the lines of the model as their stack
    traces, where it would give them those of all of PyTorch that is running."""

    def replace(original: Callable[..., fx.Node]) -> Callable[..., fx.Node]:
        def create_node(tracer: Any, *args: Any, **kwargs: Any) -> fx.Node:
            tracer.record_stack_traces = False
            node = original(tracer, *args, **kwargs)
            if lines := running_lines():
                node.stack_trace = lines
            return node

        return create_node

    with patched(fx.proxy.TracerBase, "create_node", replace):
        yield
