"""The rows of a call: how many there are, and the same call with fewer, more or other ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir.structure import map_tensors
from fxpipe.meaning.listed import Column
from fxpipe.runtime.microbatch import InDim, first_rows

MIXED, WHOLE, MOVED, GIVEN = LEVELS = "mixed", "whole rows", "moved", "given"
"""How far the rows of a sample are from those of the example, the farthest first:

- "mixed": rows in another order, and any integer or flag of a tensor in place of any other of it;
- "whole rows": rows in another order, each with its integers and flags as they are, but for tensors
  which hold one number everywhere: these get others;
- "moved": rows in another order;
- "given": the rows as they are.

Floating-point values differ from the example's in all but the last. A model may refuse some of it
(its lengths have to be sorted, say), and where integers have been mixed a row may be none that the
model is made for (with more marks for parts of a picture than a picture has, say)."""


@dataclass
class Sample:
    """The inputs that a mode has been compiled for, two rows of them."""

    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    dims: Sequence[InDim]  # of the tensors
    batch: int | None

    @staticmethod
    def of(
        args: tuple[Any, ...], kwargs: dict[str, Any], dims: Sequence[InDim], batch: int | None
    ) -> Sample:
        """Make the sample of a call: its inputs, with two rows of them at most."""
        return Sample(with_rows((args, kwargs), dims, min(2, batch or 0)), dims, batch)

    def repeated(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs of the shapes they were: the two rows over and over."""
        return with_rows(self.inputs, self.dims, self.batch or 0)


def batch_size(values: Sequence[Any], dims: Sequence[InDim]) -> int | None:
    """The size of the mini-batch that these tensors are of, None if none has one."""
    sizes = (v.shape[dim] for v, dim in zip(values, dims, strict=True) if isinstance(dim, int))
    return next(sizes, None)


def with_rows(
    inputs: tuple[tuple[Any, ...], dict[str, Any]], dims: Sequence[InDim], rows: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with so many rows, the first ones of this one's, or all of them over and over."""
    remaining = iter(dims)

    def resized(tensor: Tensor) -> Tensor:
        dim = next(remaining)
        return first_rows(tensor.detach(), dim, rows) if isinstance(dim, int) else tensor

    args, kwargs = map_tensors(resized, inputs)
    return args, kwargs


def out_of_inference_mode(inputs: Any) -> Any:
    """The inputs, copied out of inference mode if they have been made in it."""
    return map_tensors(lambda t: t.clone() if t.is_inference() else t, inputs)


def sampled(
    tensors: Sequence[Tensor], dims: Sequence[int | None], rows: int, level: str, seed: int
) -> list[Tensor]:
    """So many rows made of those of the example, and tensors like those that all rows share.

    The same rows of all tensors belong together, so that what a model takes for granted of a row
    remains true.
    """
    draw = torch.Generator().manual_seed(seed)
    batch = batch_size(tensors, dims) or 0
    order = torch.arange(rows) % batch
    if level != GIVEN:
        order = torch.randperm(max(batch, rows), generator=draw)[:rows] % batch
    found = []
    for tensor, dim in zip(tensors, dims, strict=True):
        if isinstance(tensor, Column):
            found.append(_rows_of(tensor, order.tolist(), level, draw))
            continue
        value = tensor.detach()
        if dim is not None:
            own = value.index_select(dim, (order % value.shape[dim]).to(value.device))
            value = own if level == GIVEN else _perturbed(own, value, dim, level, draw)
        elif level != GIVEN:
            value = _perturbed(value, value, 0, MOVED, draw)
        found.append(value)
    return found


def _rows_of(column: Column, order: Sequence[int], level: str, draw: torch.Generator) -> Any:
    """The rows of a list in that order, each perturbed by itself."""
    rows = [column.tensors[i].detach() for i in order]
    if level == GIVEN:
        return Column(rows)
    return Column([_perturbed(row, row, 0, level if row.ndim else MOVED, draw) for row in rows])


def part(
    tensors: Sequence[Tensor], dims: Sequence[int | None], start: int, rows: int
) -> list[Tensor]:
    """So many rows from one on: copies, since a model may write to its inputs."""
    return [
        (tensor if dim is None else tensor.narrow(dim, start, rows)).clone()
        for tensor, dim in zip(tensors, dims, strict=True)
    ]


def _perturbed(
    rows: Tensor, example: Tensor, dim: int, level: str, draw: torch.Generator
) -> Tensor:
    """Other values of the same kind: none is out of the example's range, if that has one."""
    if not rows.numel() or rows.is_meta or rows.layout != torch.strided:
        return rows
    if rows.is_complex():
        return rows * (1 + 0.1 * torch.rand(rows.shape, generator=draw)).to(rows.device)
    if rows.is_floating_point():
        finite = example[example.isfinite()]
        if not finite.numel():
            return rows
        low, high = finite.min(), finite.max()
        if low == high or not bool((finite == finite.round()).all()):
            noise = torch.rand(rows.shape, generator=draw).to(rows)
            return _shaken(rows, low, high, noise)
    if level == MIXED or (level == WHOLE and bool((example == example.flatten()[0]).all())):
        return _exchanged(rows, example, dim, draw)
    return rows


def _shaken(rows: Tensor, low: Tensor, high: Tensor, noise: Tensor) -> Tensor:
    if low == high:
        return rows + noise * (low.abs() if low else 1)
    shaken = (rows + (noise - 0.5) * 0.5 * (high - low)).clamp(low, high)
    return torch.where(rows.isfinite(), shaken, rows)


def _exchanged(rows: Tensor, example: Tensor, dim: int, draw: torch.Generator) -> Tensor:
    """Whole numbers and flags: any of those that the example has.

    On an accelerator, where an index out of range ends the process, any of those at the same place
    of another row.
    """
    if example.device.type != "cpu":
        batch = example.shape[dim]
        index = torch.randint(batch, rows.shape, generator=draw).to(example.device)
        return example.gather(dim, index)
    flat = example.flatten()
    if rows.dtype not in (torch.bool, torch.uint8) and bool((flat == flat[0]).all()):
        if rows.is_floating_point() or flat[0] < 0:
            return rows
        return rows + torch.randint(2, rows.shape, generator=draw).to(rows.dtype)
    return flat[torch.randint(flat.numel(), rows.shape, generator=draw)]
