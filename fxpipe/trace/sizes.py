"""Sizes: the sizes of inputs for which an exported graph is right.

::

    def forward(self, ids):                  torch.export traces ids (4, 12) as (s0, s1)
        _, t = ids.shape
        assert t <= self.block_size          a condition: the graph is right for s1 <= 1024
        x = self.table + self.embed(ids)     a condition that fixes a size: s1 == 12, if the table
                                             has 12 rows

``torch.export`` evaluates each branch of a model's Python code, and each requirement of an
operator, with the sizes of the example, and notes as a condition which way it went. The conditions
are guards of the compiled program: a call whose sizes do not fulfil them is compiled anew.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxpipe.ir._torch import (
    CONVOLUTION_KERNEL,
    KERNELS,
    SOURCE_OF_GUARD,
    FakeTensor,
    first_symbol,
    formats_of_convolution,
)
from fxpipe.ir.source import is_a_models
from fxpipe.trace.errors import Refused, at, is_model_line
from fxpipe.trace.patches import patched

Place = tuple[int, int]
"""A dimension of an input: the number of the tensor among the inputs, and the dimension."""

Shapes = Sequence[Sequence[int]]
"""The shapes of all input tensors, in order."""

MANY = 20
"""The most conditions that a size may take part in. A size of which a model asks more (windows that
are shifted, merged and padded) is made a constant, since the export would take many times as long.
"""

Symbol = Any
"""A symbol of sympy, which stands for a size."""


@dataclass(frozen=True)
class Condition:
    """A relation between sizes that holds wherever the graph is right."""

    relation: Any  # of sympy
    where: str = field(default="", compare=False)
    """The line of the model that has led to it; "" if none is known."""

    def holds(self, sizes: Mapping[Symbol, int]) -> bool:
        """Whether the relation is true for these values of its symbols."""
        value = self.relation.subs({s: sizes[s] for s in self.relation.free_symbols})
        return bool(value == True)  # noqa: E712 - sympy's true; a relation is left undecided

    def text(self, names: Mapping[Symbol, str]) -> str:
        """The relation in words: ``ids.size(1) <= 1024``."""
        by_symbol = {str(symbol): name for symbol, name in names.items()}
        said = _in_words(self.relation)
        return re.sub(r"\bs\d+\b", lambda found: by_symbol.get(found[0], found[0]), said)


SIGNS = {
    "Equality": "==",
    "Unequality": "!=",
    "LessThan": "<=",
    "StrictLessThan": "<",
    "GreaterThan": ">=",
    "StrictGreaterThan": ">",
}
TURNED = {"<=": ">=", "<": ">", ">=": "<=", ">": "<"}


def _in_words(relation: Any) -> str:
    """A relation of sympy as Python would have it: ``a <= b``, where sympy says ``-b + a <= 0``."""
    kind = relation.func.__name__
    if kind in ("And", "Or"):
        return f" {kind.lower()} ".join(sorted(map(_in_words, relation.args)))
    if kind not in SIGNS:
        return str(relation)
    sign, terms = SIGNS[kind], (relation.lhs - relation.rhs).as_ordered_terms()
    less = [term for term in terms if term.could_extract_minus_sign()]
    left = sum(term for term in terms if term not in less)
    right = -sum(less)
    if not getattr(left, "free_symbols", ()):
        left, sign, right = right, TURNED.get(sign, sign), left
    return f"{left} {sign} {right}"


@dataclass(frozen=True)
class Sizes:
    """The sizes for which a graph is right.

    Args:
        symbols: the dimension of an input that each symbol stands for.
        batch: the symbols of batch dimensions; in a call they have the rows of a micro-batch.
        conditions: the relations between the symbols.
        fixed: the dimensions whose size is a constant of the graph, each with the reason: the line
            of the model that makes it one, "" if none is known.
        values: what torch.export has found each symbol to equal: itself, another symbol, a number.
    """

    symbols: Mapping[Symbol, Place]
    batch: frozenset[Symbol]
    conditions: tuple[Condition, ...]
    fixed: Mapping[Place, str]
    values: Mapping[Symbol, Any]

    @property
    def free(self) -> dict[Place, Symbol]:
        """The dimensions, other than the batch's, whose size may vary, with their symbols."""
        return {
            place: symbol
            for symbol, place in self.symbols.items()
            if symbol not in self.batch and place not in self.fixed
        }

    def same_as(self, place: Place) -> Any:
        """What torch.export has found the size of a free dimension to equal: dimensions for which
        that is the same have to be of one size."""
        return self.values[self.free[place]]

    def broken(self, shapes: Shapes, rows: Iterable[int]) -> Condition | None:
        """The first condition that does not hold for inputs of these shapes; None if all hold.

        Args:
            rows: the sizes of the micro-batches. To torch.export 1 is a constant, and no value of
                a symbol; a graph is run beside the model on one row, and not asked about it here.
        """
        values = {symbol: shapes[i][dim] for symbol, (i, dim) in self.symbols.items()}
        for count in sorted({max(2, n) for n in rows} or {2}):
            values |= dict.fromkeys(self.batch, count)
            for condition in self.conditions:
                if not condition.holds(values):
                    return condition
        return None

    def pinned(self, places: Mapping[Place, str]) -> Sizes:
        """The same sizes, with constants for those of some dimensions; each with the reason."""
        return replace(self, fixed={**self.fixed, **places})


def sizes_of(program: torch.export.ExportedProgram, batch_dims: Sequence[int | None]) -> Sizes:
    """Read from an exported program for which sizes of its inputs it is right.

    Raises:
        Refused: if the batch size has to equal another size.
    """
    by_name = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    inputs = [by_name[name].meta["val"] for name in program.graph_signature.user_inputs]
    symbols: dict[Symbol, Place] = {}
    values: dict[Symbol, Any] = {}
    batch: set[Symbol] = set()
    constant: set[Symbol] = set()
    own: dict[bool, set[Symbol]] = {True: set(), False: set()}
    for i, (tensor, batch_dim) in enumerate(zip(inputs, batch_dims, strict=True)):
        for dim, size in enumerate(tensor.shape):
            if isinstance(size, int):
                continue
            symbol, now = first_symbol(size), size.node.expr
            symbols[symbol], values[symbol] = (i, dim), now
            own[dim == batch_dim] |= now.free_symbols
            if dim == batch_dim:
                batch.add(symbol)
            elif now.is_number:
                constant.add(symbol)
    if not own[True].isdisjoint(own[False]):
        raise Refused("its batch size has to equal another size of its inputs")
    mode = next((each.fake_mode for each in inputs if isinstance(each, FakeTensor)), None)
    guards = mode.shape_env.guards if mode is not None and mode.shape_env is not None else ()
    noted = [
        Condition(guard.expr, _line(guard.sloc))
        for guard in guards
        if guard.expr.free_symbols and guard.expr.free_symbols <= symbols.keys()
    ]
    one = dict.fromkeys(batch, next(iter(batch), None))  # all inputs have as many rows
    relations = [
        each
        for each in noted
        if not each.relation.free_symbols <= constant  # that is a matter of the guard on the shape
        and each.relation.xreplace(one) != True  # noqa: E712 - sympy's true
    ]
    least = [Condition(s >= 2) for s in symbols if s not in batch and s not in constant]
    fixed = {symbols[symbol]: _fixing(symbol, noted) for symbol in constant}
    return Sizes(symbols, frozenset(batch), (*least, *dict.fromkeys(relations)), fixed, values)


def _fixing(symbol: Symbol, conditions: Iterable[Condition]) -> str:
    """The line of the model that makes a size a constant, and why if that is not to be seen."""
    about = [each for each in conditions if symbol in each.relation.free_symbols]
    exact = [each for each in about if each.relation.is_Equality and symbol in each.relation.args]
    where = next((each.where for each in (*exact, *about)), "")
    return (
        f"it takes part in more than {MANY} conditions, at {where}" if len(about) > MANY else where
    )


def _line(source: Any) -> str:
    frame = source.framework_loc
    return at(frame) if isinstance(frame, traceback.FrameSummary) and is_model_line(frame) else ""


@contextmanager
def model_lines() -> Iterator[None]:
    """Inside the ``with`` block, a guard of torch.export names the line of the model that has led
    to it, where it would name a line of PyTorch."""

    def replaced(original: Callable[..., Any]) -> Callable[..., Any]:
        def source(*args: Any, **kwargs: Any) -> Any:
            found, frame = original(*args, **kwargs), _model_frame()
            return found if frame is None else replace(found, framework_loc=frame)

        return source

    with patched(ShapeEnv, SOURCE_OF_GUARD, replaced):
        yield


@contextmanager
def any_kernel() -> Iterator[None]:
    """Inside the ``with`` block, torch.export notes no conditions for the choice of a convolution's
    kernel. By one of these (oneDNN serves from 16 pictures on), a graph would be right for some
    batch sizes only, although it computes the same at others.

    This holds where the result has the same strides whichever kernel computes it: for contiguous
    tensors, and on the CPU for pictures whose channels are last, and in one dimension. Elsewhere
    the choice may decide about strides, so that the conditions remain.
    """

    def replaced(original: Callable[..., Any]) -> Callable[..., Any]:
        def choose(*args: Any, **kwargs: Any) -> Any:
            # PyTorch 2.11 gives all arguments by name, later versions the first ones by position.
            x = args[0] if args else kwargs["input"]
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            mode = getattr(x, "fake_mode", None)
            if mode is None or mode.shape_env is None:
                return original(*args, **kwargs)
            with mode.shape_env.suppress_guards():
                if _is_strided_alike(x, weight):
                    return original(*args, **kwargs)
            return original(*args, **kwargs)

        return choose

    with patched(KERNELS, CONVOLUTION_KERNEL, replaced):
        yield


def _is_strided_alike(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether all kernels give a convolution of ``x`` the same strides."""
    if x.is_contiguous() and weight.is_contiguous():
        return True
    return x.device.type == "cpu" and len(formats_of_convolution(x, weight)) == 1


def _model_frame() -> traceback.FrameSummary | None:
    """The innermost frame of the model's code that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_a_models(frame):
        frame = frame.f_back
    if frame is None:
        return None
    code = frame.f_code
    return traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name)


def near(size: int) -> Iterator[int]:
    """Other sizes than this one, of two or more, in the order in which they are tried: the half
    first, as a run with it takes less time; then neighbours, and those that are apart by powers of
    two, as many models take multiples of one only."""
    others = [size // 2, size - 1, size + 1]
    others += [size + sign * 2**n for n in range(1, 7) for sign in (-1, 1)]
    return (n if n >= 2 else size + 1 for n in (*others, 2 * size))
