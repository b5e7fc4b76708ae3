"""Checks of values in a model's forward: ``if`` and ``assert`` statements with a branch that does
nothing but raise an error.

::

    if labels.max() >= self.classes:                raises where it is true,  goes on with False
        raise ValueError("labels out of range")
    assert mask.any(), "nothing to attend to"       raises where it is false, goes on with True
    torch._assert(mask.any(), "nothing...")         the same

A trace has no values by which to decide such a branch, but need not: it follows the branch that
does not raise. The condition becomes an assertion in the graph, which checks it in every run.
"""

from __future__ import annotations

import ast
import dis
import linecache
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxpipe.ir._torch import ASSERT, FakeTensor
from fxpipe.ir.checks import check
from fxpipe.ir.source import is_a_models
from fxpipe.trace.blame import Blamed
from fxpipe.trace.errors import DEPENDS_ON_VALUES, Refused, source_line
from fxpipe.trace.patches import caller, patched
from fxpipe.trace.running import Running

ASSERTED = "a check of the model's own has failed, "


@contextmanager
def asserted(running: Running) -> Iterator[list[Exception]]:
    """Inside the ``with`` block, the conditions of the model's checks become assertions in the
    graph that is being exported.

    Yields an error for each other branch that depends on values, in a list that grows. Such a
    branch ends the export, unless the model itself catches what it raises: then the graph would
    have what the model does after an error that no real run has.
    """
    undecided: list[Exception] = []

    def decided(value: Any, original: Callable[[Any], bool], frame: FrameType) -> bool:
        try:
            return original(value)
        except GuardOnDataDependentSymNode:
            if is_a_models(frame):
                line = source_line(frame.f_code.co_filename, frame.f_lineno)
                text = f"{DEPENDS_ON_VALUES}, and the model catches the error (at {line})"
                part = running.part
                undecided.append(Refused(text) if part is None else Blamed(part, text))
            raise

    def of_tensors(original: Any) -> Any:
        def __bool__(tensor: Tensor) -> bool:
            frame = caller()
            if isinstance(tensor, FakeTensor) and torch.compiler.is_exporting():
                goes_on_with = _goes_on_with(frame)
                if goes_on_with is not None:
                    check(tensor, goes_on_with, _where(frame))
                    return goes_on_with
            return decided(tensor, original, frame)

        return __bool__

    def of_numbers(original: Any) -> Any:
        def __bool__(number: torch.SymBool) -> bool:
            return decided(number, original, caller())

        return __bool__

    with (
        patched(Tensor, "__bool__", of_tensors),
        patched(torch.SymBool, "__bool__", of_numbers),
    ):
        yield undecided


def as_a_check(condition: Any, message: Any = "") -> tuple[Any, bool, str]:
    """The arguments of :func:`~fxpipe.ir.checks.check` for those of ``torch._assert``, which takes
    the truth value of a tensor on the host: while passes run a graph, its tensors have no values.
    """
    return condition, True, f"{ASSERTED}{message}"


def _where(frame: FrameType) -> str:
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{ASSERTED}at {file}:{line}: {linecache.getline(file, line).strip()}"


def _goes_on_with(frame: FrameType) -> bool | None:
    """The truth value that the condition which a frame is evaluating must have for the model to go
    on without an error.

    None if the condition is no check, as neither branch raises, or if other values decide as well.
    """
    code = frame.f_code
    if code is ASSERT.__code__:
        return True
    checks = is_a_models(frame) or code.co_filename.startswith(_DISTRIBUTIONS)
    if not checks or not _branches(code, frame.f_lasti):
        return None
    # Each instruction has a place in the source. The place of the instruction that branches may be
    # the whole statement. The instruction before it has computed the value, and its place is the
    # expression.
    last = frame.f_lasti // 2
    places = list(islice(code.co_positions(), last - 1, last + 1))
    for test, raises_with in _checks(code.co_filename):
        for place in reversed(places):
            if (value := _decides(test, place, raises_with)) is not None:
                return not value
    return None


_DISTRIBUTIONS = torch.distributions.__path__[0]
"""The folder of ``torch.distributions``, whose classes check the values of their parameters and
samples, too, and raise an error for values out of range."""


def _branches(code: CodeType, instruction: int) -> bool:
    """Whether an instruction takes the truth value of a tensor to branch by it. A call (of ``all``,
    say) takes truth values as well, but what depends on them cannot be known here."""
    name = dis.opname[code.co_code[instruction]]
    # From Python 3.13 on a comparison may take the truth value of its result itself.
    return "JUMP" in name or name in ("TO_BOOL", "COMPARE_OP")


Place = tuple[int | None, int | None, int | None, int | None]


@lru_cache(maxsize=64)
def _checks(filename: str) -> list[tuple[ast.expr, bool]]:
    """The conditions of all checks in a file, each with the truth value for which it raises."""
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


# Statements by which a block may end, or be left for a while, without raising.
_LEAVES = ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Await, ast.Try


def _only_raises(body: list[ast.stmt]) -> bool:
    """Whether a block of statements can end in no other way than by raising an exception."""
    return (
        bool(body)
        and isinstance(body[-1], ast.Raise)
        and not any(isinstance(node, _LEAVES) for each in body for node in ast.walk(each))
    )


def _decides(test: ast.expr, place: Place, value: bool) -> bool | None:
    """The truth value of the expression at ``place`` which makes the whole test have ``value``.

    The operands of ``and`` and ``or`` before it have been evaluated and have not decided the test.
    None if the expression is no part of the test, or does not decide it alone.
    """
    if isinstance(test, ast.Compare) and len(test.ops) > 1:
        return None  # a < b < c is decided in two steps, in one place
    if (test.lineno, test.end_lineno, test.col_offset, test.end_col_offset) == place:
        return value
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _decides(test.operand, place, not value)
    if isinstance(test, ast.BoolOp):
        # One true operand makes "or" true, one false operand makes "and" false. For the other
        # outcome all operands have to agree, and the last one decides.
        one_is_enough = isinstance(test.op, ast.Or) is value
        operands = test.values if one_is_enough else test.values[-1:]
        decided = (_decides(each, place, value) for each in operands)
        return next((each for each in decided if each is not None), None)
    return None
