"""A log of the operators in a forward and its recomputation, for the error when the two differ."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir._torch import TorchDispatchMode, pytree
from fxpipe.ir.source import is_a_models


class OpLog(TorchDispatchMode):
    """A context that logs each operator run within it, and the line of the model that calls it.

    Entering the context clears the log.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, str]] = []  # the operator with its arguments, and the line

    def __enter__(self) -> OpLog:
        self.calls = []
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:  # only a recomputation detaches what is saved
            return func(*args, **(kwargs or {}))
        given = ", ".join(_shown(leaf) for leaf in pytree.tree_leaves((args, kwargs or {})))
        self.calls.append((f"{func}({given})", _line()))
        return func(*args, **(kwargs or {}))


def compared(first: OpLog, second: OpLog) -> str:
    """The text of both logs, one after the other. An arrow marks the first difference in each."""
    pairs = zip(first.calls, second.calls, strict=False)
    same = next(
        (i for i, (one, other) in enumerate(pairs) if one[0] != other[0]),
        min(len(first.calls), len(second.calls)),
    )
    lines = []
    for title, log in (("in the forward", first), ("in the recomputation", second)):
        lines.append(f"operators {title}:")
        for i, (call, line) in enumerate(log.calls):
            lines.append(f"{'->' if i == same else '  '} {call}    # {line}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)


def _line() -> str:
    """The innermost line of code that may be a model's."""
    frame = sys._getframe(1)
    while frame is not None and not is_a_models(frame):
        frame = frame.f_back  # type: ignore[assignment]
    return "somewhere" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
