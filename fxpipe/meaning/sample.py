"""The rows of a call: how many there are, and the same call with fewer or more of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fxpipe.ir.structure import map_tensors
from fxpipe.runtime.microbatch import first_rows


@dataclass
class Sample:
    """The inputs that a mode has been compiled for, two rows of them."""

    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    dims: list[int | None]  # of the tensors
    batch: int | None

    @staticmethod
    def of(
        args: tuple[Any, ...], kwargs: dict[str, Any], dims: list[int | None], batch: int | None
    ) -> Sample:
        """Of a call."""
        return Sample(with_rows((args, kwargs), dims, min(2, batch or 0)), dims, batch)

    def repeated(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs of the shapes they were: the two rows over and over."""
        return with_rows(self.inputs, self.dims, self.batch or 0)


def batch_size(values: Sequence[Any], dims: Sequence[int | None]) -> int | None:
    """The size of the mini-batch that these tensors are of, None if none has one."""
    sizes = (v.shape[dim] for v, dim in zip(values, dims, strict=True) if dim is not None)
    return next(sizes, None)


def with_rows(
    inputs: tuple[tuple[Any, ...], dict[str, Any]], dims: Sequence[int | None], rows: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with so many rows, the first ones of this one's, or all of them over and over."""
    remaining = iter(dims)

    def resized(tensor: Tensor) -> Tensor:
        dim = next(remaining)
        return tensor if dim is None else first_rows(tensor.detach(), dim, rows)

    args, kwargs = map_tensors(resized, inputs)
    return args, kwargs


def out_of_inference_mode(inputs: Any) -> Any:
    """The inputs, copied out of inference mode if they have been made in it."""
    return map_tensors(lambda t: t.clone() if t.is_inference() else t, inputs)
