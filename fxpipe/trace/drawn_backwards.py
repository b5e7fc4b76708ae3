"""Random numbers that an autograd Function draws in its backward.

::

    def backward(ctx, gradient):
        return gradient + 0.1 * torch.rand_like(gradient)     in which order stages draw these is a
                                                              matter of which one is faster

What draws random numbers in a forward is given a seed (pass "random"). A backward is run by
autograd, in the thread of its stage, and is given none. So such a Function is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.ir._torch import TorchDispatchMode
from fxpipe.trace.errors import Refused, source_line
from fxpipe.trace.example import Example, Traced
from fxpipe.trace.functions import code_of_call


def refuse(example: Example, tensors: Sequence[Tensor], traced: Traced) -> None:
    """Raise ``Refused`` if an autograd Function of the user's draws random numbers in its backward.

    Args:
        tensors: inputs that the model takes.
    """
    gm = traced.graph_module
    functions = {f for node in gm.graph.nodes if (f := _function(node)) is not None}
    if not functions:
        return
    seen = _DrawsWithin({function.backward.__code__ for function in functions})
    with seen:
        example.run(tensors, traced, backward=example.trained)
    if seen.line:
        raise Refused(
            f"the backward of an autograd Function draws random numbers (at {seen.line}), whose "
            "order would depend on which stage is faster: draw them in its forward, and keep them "
            "by ctx.save_for_backward"
        )


def _function(node: fx.Node) -> Any:
    """The autograd Function of the user's that a node applies; None if it applies none."""
    function = code_of_call(node.target) if node.op == "call_function" else None
    backward: Callable[..., Any] | None = getattr(function, "backward", None)
    return function if isinstance(getattr(backward, "__code__", None), CodeType) else None


class _DrawsWithin(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the first line of some functions at which an operator draws random numbers."""

    def __init__(self, codes: set[CodeType]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.codes, self.line = codes, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not self.line:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_code not in self.codes:
                frame = frame.f_back
            if frame is not None:
                self.line = source_line(frame.f_code.co_filename, frame.f_lineno)
        return func(*args, **(kwargs or {}))
