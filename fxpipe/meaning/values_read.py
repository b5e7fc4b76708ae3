"""Values of inputs that a model's code reads as numbers: a size, or a condition, goes by them.

::

    f = f[:, :lengths.max()]        13 for all rows of a sample,  13 and 9 for two parts of it

Micro-batches then have other sizes than the mini-batch, and no batch dimension explains that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fxpipe.ir._torch import TorchDispatchMode
from fxpipe.ir.tensors import tensors_of
from fxpipe.trace import called
from fxpipe.trace.errors import at, is_model_line, since


@dataclass(frozen=True)
class DifferingValue:
    """A value that the model reads in one line, which differs between a sample and its parts."""

    where: str
    """The line of the model, with its file and number."""
    inputs: tuple[str, ...]
    """The names of the inputs that the value is computed from."""
    whole: Any
    parts: tuple[Any, ...]


def differing_value(
    run: Callable[[list[Tensor]], Any],
    names: Sequence[str],
    whole: list[Tensor],
    parts: Sequence[list[Tensor]],
    rows: Sequence[int],
) -> DifferingValue | None:
    """The first value of inputs that the model reads in a line, where it reads no other one, and
    that is another one for a part of a sample than for the whole; None if there is none.

    Args:
        run: runs the model with these tensors.
        names: the names of the tensors.
        rows: how many rows the whole has, and each part. A value that is just that tells nothing.
    """
    (reads, *others) = [_reads(run, names, tensors) for tensors in (whole, *parts)]
    for where, (inputs, values) in reads.items():
        found = [set(values), *(set(other[where][1]) for other in others if where in other)]
        if len(found) < len(parts) + 1 or any(len(each) > 1 for each in found):
            continue
        (first, *theirs) = [value for each in found for value in each]
        if any(each != first for each in theirs) and [first, *theirs] != list(rows):
            return DifferingValue(where, inputs, first, tuple(theirs))
    return None


_ByLine = dict[str, tuple[tuple[str, ...], list[Any]]]
"""By the line of the model: the inputs that values are computed from, and the values."""


def _reads(
    run: Callable[[list[Tensor]], Any], names: Sequence[str], tensors: list[Tensor]
) -> _ByLine:
    mode = _NotingReads()
    for name, tensor in zip(names, tensors, strict=True):
        mode.computed_from[tensor] = (name,)
    with mode:
        run(tensors)
    return mode.reads


class _NotingReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that notes from which inputs each tensor is computed, and where values of
    these are read as numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.computed_from: Any = WeakTensorKeyDictionary()
        self.reads: _ByLine = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = tensors_of((args, kwargs))
        inputs = dict.fromkeys(n for t in given for n in self.computed_from.get(t, ()))
        if not inputs:
            return result
        if func is torch.ops.aten._local_scalar_dense.default:
            frames = [frame for frame in since(called) if is_model_line(frame)]
            if frames:
                self.reads.setdefault(at(frames[-1]), (tuple(inputs), []))[1].append(result)
        for tensor in tensors_of(result):
            self.computed_from[tensor] = tuple(inputs)
        return result
