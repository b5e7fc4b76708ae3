"""The nodes by which a model checks values in its forward: they raise an error, or do nothing.

::

    if ids.max() >= n: raise ...          max ─ ge ─ logical_not ─ _assert_async
    torch._assert(ids.max() < n, "...")   max ─ lt ─ check
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.ir._torch import ASSERT_ASYNC


def check(condition: Any, wanted: bool, message: str) -> None:
    """Raise RuntimeError with this message unless a condition has the truth value that is wanted.
    That of a tensor on an accelerator is checked there, so that the host does not wait."""
    if isinstance(condition, Tensor):
        torch.ops.aten._assert_async.msg(condition if wanted else condition.logical_not(), message)
    elif bool(condition) is not wanted:
        raise RuntimeError(message)


fx.has_side_effect(check)

_CHECKS = frozenset(
    (
        check,
        ASSERT_ASYNC,
        torch.ops.aten._assert_async.default,
        torch.ops.aten._assert_async.msg,
    )
)


def is_check(node: fx.Node) -> bool:
    """Whether a node does nothing but raise an error where values are not as they have to be."""
    return node.op == "call_function" and node.target in _CHECKS
