"""Checks that a model makes of values: ``if`` statements of which one branch only raises.

::

    if labels.max() >= self.classes:                raises where it is true,  goes on with False
        raise ValueError("labels out of range")
    assert mask.any(), "nothing to attend to"       raises where it is false, goes on with True

A trace has no values to decide by, and need not: it goes on as the model does where it does not
raise. What has been looked at becomes an assertion in the graph.
"""

from __future__ import annotations

import ast
import dis
import linecache
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir._torch import FakeTensor
from fxpipe.ir.source import is_of_a_model
from fxpipe.trace.patches import caller, patched

ASSERTED = "a check of the model's own has failed, "


@contextmanager
def asserted() -> Iterator[None]:
    """While a model is exported, what its own checks look at is asserted in the graph."""

    def replace(original: Any) -> Any:
        def __bool__(tensor: Tensor) -> bool:
            if isinstance(tensor, FakeTensor) and torch.compiler.is_exporting():
                frame = caller()
                goes_on_with = _goes_on_with(frame)
                if goes_on_with is not None:
                    _assert(tensor, goes_on_with, frame)
                    return goes_on_with
            return original(tensor)  # type: ignore[no-any-return]

        return __bool__

    with patched(Tensor, "__bool__", replace):
        yield


def _assert(tensor: Tensor, value: bool, frame: FrameType) -> None:
    file, line = frame.f_code.co_filename, frame.f_lineno
    where = f"{ASSERTED}at {file}:{line}: {linecache.getline(file, line).strip()}"
    torch.ops.aten._assert_async.msg(tensor if value else tensor.logical_not(), where)


def _goes_on_with(frame: FrameType) -> bool | None:
    """The truth value of what is being decided in a frame with which it does not raise; None if
    neither branch is there to raise, or more than this value decides."""
    code = frame.f_code
    if not is_of_a_model(code.co_filename) or not _branches(code, frame.f_lasti):
        return None
    # The instruction that branches may have the place of the whole statement; the one before it
    # has computed the value, and has the place of the expression.
    last = frame.f_lasti // 2
    places = list(islice(code.co_positions(), last - 1, last + 1))
    for test, raises_with in _checks(code.co_filename):
        for place in reversed(places):
            if (value := _decides(test, place, raises_with)) is not None:
                return not value
    return None


def _branches(code: CodeType, instruction: int) -> bool:
    """Whether an instruction asks for the truth value to branch by it; functions such as ``all``
    ask too, and decide by it what nobody here knows."""
    name = dis.opname[code.co_code[instruction]]
    # From Python 3.13 on a comparison of which only the truth is asked gives that.
    return "JUMP" in name or name in ("TO_BOOL", "COMPARE_OP")


Place = tuple[int | None, int | None, int | None, int | None]


@lru_cache(maxsize=64)
def _checks(filename: str) -> list[tuple[ast.expr, bool]]:
    """The conditions in a file by which something raises, and the truth values with which."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:  # a notebook's cell with magic commands
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            found.append((node.test, False))
        elif isinstance(node, ast.If) and _only_raises(node.body):
            found.append((node.test, True))
        elif isinstance(node, ast.If) and _only_raises(node.orelse):
            found.append((node.test, False))
    return found


_LEAVES = ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Await, ast.Try


def _only_raises(body: list[ast.stmt]) -> bool:
    """Whether statements end with an exception, whatever they do before."""
    return (
        bool(body)
        and isinstance(body[-1], ast.Raise)
        and not any(isinstance(node, _LEAVES) for each in body for node in ast.walk(each))
    )


def _decides(test: ast.expr, place: Place, value: bool) -> bool | None:
    """With which truth value the expression at ``place`` gives all of a test this ``value``, those
    before it having been evaluated; None if it is no part of the test, or does not decide."""
    if isinstance(test, ast.Compare) and len(test.ops) > 1:
        return None  # a < b < c is decided in two steps, in one place
    if (test.lineno, test.end_lineno, test.col_offset, test.end_col_offset) == place:
        return value
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _decides(test.operand, place, not value)
    if isinstance(test, ast.BoolOp):
        # One true operand is enough for "or", one that is false for "and"; else the last decides.
        one_is_enough = isinstance(test.op, ast.Or) is value
        operands = test.values if one_is_enough else test.values[-1:]
        decided = (_decides(each, place, value) for each in operands)
        return next((each for each in decided if each is not None), None)
    return None
