"""Outputs of a model that are kept, so that a loss is computed of any rows of them.

::

    sample ── model ── outputs, kept by rows ─┬─ rows 0 to 4 ── loss_fn
                                              ├─ rows 0 to 2 ── loss_fn
                                              └─ rows 3, 4 ──── loss_fn

To find out what a loss means, it is computed of a sample, of the sample's parts, of pairs of its
rows. The check of the model has found out that the rows of its outputs are those of its inputs; so
the model need not run for each of these again. Nor do its rounding errors count as the loss's: the
rows have the same bits, whatever other rows there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir.structure import Structure
from fxpipe.ir.tensors import memory_bytes
from fxpipe.runtime.microbatch import rows_at

LARGEST = 2**26
"""The most bytes of outputs that are kept, but for those of the last two runs."""


@dataclass(frozen=True)
class _KeptRows:
    """The inputs and the outputs of one run."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    structure: Structure
    dims: Sequence[int]
    """The batch dimension of each output."""
    rows: int

    @property
    def memory(self) -> int:
        return sum(map(memory_bytes, self.outputs))


class KeptOutputs:
    """A model as a function from its inputs to its output, which runs only where it has not run
    with the same rows.

    A model some of whose outputs have no rows, such as a number for all of them, runs each time.

    Args:
        run: the model.
        dims: the batch dimensions of its inputs.
        out_dims: those of its outputs, by their paths.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Tensor]], Any],
        dims: Sequence[int | None],
        out_dims: Mapping[str, int],
    ) -> None:
        self._run, self._dims, self._out_dims = run, dims, out_dims
        self._kept: list[_KeptRows] = []  # the last one first

    def forget(self) -> None:
        """Keep nothing of what the model has given so far."""
        self._kept.clear()

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """The model's output for these tensors, which is the caller's to change."""
        for kept in self._kept:
            if (rows := _rows_in(kept.inputs, tensors, self._dims)) is not None:
                return _of_rows(kept, rows)
        output = self._run(tensors)
        kept_now = self._of(tensors, output)
        if kept_now is None:
            return output
        self._kept.insert(0, kept_now)
        while len(self._kept) > 2 and sum(each.memory for each in self._kept) > LARGEST:
            self._kept.pop()
        return _of_rows(kept_now, range(kept_now.rows))

    def _of(self, tensors: Sequence[Tensor], output: Any) -> _KeptRows | None:
        """What to keep of a run; None if the output has something other than rows."""
        given = {
            t.shape[dim] for t, dim in zip(tensors, self._dims, strict=True) if dim is not None
        }
        found, structure = Structure.of(output)
        dims = [self._out_dims.get(path, -1) for path in structure.paths()]
        if len(given) != 1 or not all(map(_is_plain, [*tensors, *found])):
            return None
        if any(isinstance(each, int | float) for each in structure.constants()):
            return None  # it may be a number of rows
        (rows,) = given
        if not rows or any(
            not 0 <= dim < each.ndim or each.shape[dim] % rows
            for each, dim in zip(found, dims, strict=True)
        ):
            return None
        outputs = [each.detach() for each in found]
        return _KeptRows([t.detach().clone() for t in tensors], outputs, structure, dims, rows)


def _is_plain(value: Any) -> bool:
    return type(value) is Tensor and value.layout is torch.strided and not value.is_meta


def _of_rows(kept: _KeptRows, rows: Sequence[int]) -> Any:
    """The output for some of the rows of a run. Of each, an output may have several rows, one after
    the other."""
    found = []
    for each, dim in zip(kept.outputs, kept.dims, strict=True):
        several = each.shape[dim] // kept.rows
        these = [row * several + i for row in rows for i in range(several)]
        found.append(rows_at(each, dim, torch.tensor(these)))
    return kept.structure.fill(found)


def _rows_in(
    before: Sequence[Tensor], tensors: Sequence[Tensor], dims: Sequence[int | None]
) -> list[int] | None:
    """For each row of some inputs, the number of an equal row among those of an earlier run; None
    if there are others."""
    equal: Tensor | None = None  # of each row now, whether it is each row before
    for old, new, dim in zip(before, tensors, dims, strict=True):
        if dim is None:
            if not torch.equal(old, new):
                return None
            continue
        one, other = old.movedim(dim, 0), new.movedim(dim, 0)
        if not _is_plain(new) or one.shape[1:] != other.shape[1:]:
            return None
        same = torch.stack([_equals(other, row) for row in one], 1)
        equal = same if equal is None else equal & same
    if equal is None or not bool(equal.any(1).all()):
        return None
    return equal.int().argmax(1).tolist()


def _equals(rows: Tensor, row: Tensor) -> Tensor:
    """For each of some rows, whether it has the numbers of one row; missing ones are equal."""
    same = rows == row
    if rows.is_floating_point():
        same |= rows.isnan() & row.isnan()
    return same.flatten(1).all(1) if same.ndim > 1 else same
