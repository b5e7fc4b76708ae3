"""Texts that a forward makes for people only: it logs or prints them, or keeps them ready for an
error, and computes nothing by them.

::

    logger.debug(f"queries of shape {x.shape}")    told: nobody takes what the call gives
    torch._assert(h == w, f"{h} is not {w}")       told, if at all
    return self.heads[f"{x.shape[1]}"](x)          a key
    logger.debug(self.names[f"{x.shape[1]}"])      a key, although what is found there is told

Python calls ``__format__`` alike in all of these. The place of the code that runs tells them apart,
in the tree of its source: a text is only told if it stands among the arguments of a statement that
is a call of this kind, and nothing but making text is between it and that call.
"""

from __future__ import annotations

import ast
import linecache
import logging
from functools import cache
from itertools import islice
from types import FrameType

from fxpipe.ir._torch import ASSERT
from fxpipe.ir.source import is_pythons

_LOG = "debug", "info", "warning", "warn", "error", "exception", "critical", "log"
_LOG_ONCE = "debug_once", "info_once", "warning_once", "warn_once"
_CHECK = ASSERT.__name__, "_check", "_check_value", "torch_compilable_check"
_TELL = frozenset(("print", *_LOG, *_LOG_ONCE, *_CHECK))
"""The names of functions and methods that log, warn, print, or check a condition."""

_MAKE_TEXT = frozenset(("str", "repr", "format", "join"))

_Span = tuple[int, int, int, int]
"""Where code stands: its first line and last line, its first column and the one behind it."""


def is_only_told(frame: FrameType) -> bool:
    """Whether what runs in a frame makes text that is only logged, printed, or said in an error.

    False also where the source is not known. A frame of Python's own library stands for the code
    that has called it.
    """
    while is_pythons(frame.f_code.co_filename):
        if frame.f_code.co_filename == logging.__file__:
            return True  # for a handler, which may be of any package
        if frame.f_back is None:
            return False
        frame = frame.f_back
    code = frame.f_code
    place = next(islice(code.co_positions(), frame.f_lasti // 2, None), None)
    if place is None or None in place:
        return False
    first, last, begin, end = place
    assert first is not None and last is not None and begin is not None and end is not None
    span = first, last, begin, end
    return any(
        _contains(call, span) and _leads_to(call, span)
        for call in _calls_that_tell(code.co_filename)
    )


@cache
def _calls_that_tell(filename: str) -> list[ast.Call]:
    """The calls in a file that tell something, as statements."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return []
    statements = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return [node for node in statements if isinstance(node, ast.Call) and _name(node) in _TELL]


def _name(call: ast.Call) -> str:
    """The name of the function or of the method that is called; "" for any other expression."""
    function = call.func
    return getattr(function, "attr", getattr(function, "id", ""))


def _leads_to(node: ast.AST, span: _Span) -> bool:
    """Whether only text is made between a node and the code at a place within it."""
    inner = [child for child in ast.iter_child_nodes(node) if _contains(child, span)]
    for child in inner:
        if isinstance(child, ast.Call) and _name(child) not in _MAKE_TEXT:
            return False
        if isinstance(child, ast.Subscript | ast.Compare | ast.Lambda | ast.NamedExpr):
            # What stands here may be a key, or be kept. A size is taken of a shape by a subscript,
            # which has no text of its own: the text is made by what is around it.
            return False
        return _leads_to(child, span)
    return True


def _contains(node: ast.AST, span: _Span) -> bool:
    """Whether code at a place is within a node of a tree."""
    if not isinstance(node, ast.expr | ast.keyword):
        return False
    first, last, begin, end = span
    if node.end_lineno is None or node.end_col_offset is None:
        return False
    starts = (node.lineno, node.col_offset) <= (first, begin)
    return starts and (last, end) <= (node.end_lineno, node.end_col_offset)
