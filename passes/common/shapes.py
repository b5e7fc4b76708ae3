"""Shapes: the dtypes and shapes of what goes from stage to stage, for micro-batches of any size.

::

    traced with 8 rows     x: float32 (8, 3), which grows in dimension 0
    micro-batch of 2       2/8 of the rows: float32 (2, 3), 24 bytes

They are read off the fake values of the stage graph, and off what pass "rows" has noted there, so
that nothing is run for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.ir._torch import pytree
from fxpipe.ir.graph import GROWS, SHAPES, VALUE
from fxpipe.ir.tensors import tensors_of


@dataclass(frozen=True)
class TensorShape:
    """The shape of a tensor, for the batch that the model was traced with.

    Args:
        sizes: those of its dimensions. A dimension that repeats the same memory has size 1, as that
            memory travels once.
        grows: the dimensions that are larger for more rows; None if that is not known.
        requires_grad: whether it may have a gradient.
    """

    dtype: torch.dtype
    sizes: tuple[int, ...] = ()
    grows: tuple[int, ...] | None = ()
    requires_grad: bool = False

    def __str__(self) -> str:
        """The dtype and the sizes. Those that grow are said as multiples of the part of the rows
        that a micro-batch has: ``float32 (8·part, 3)``."""
        grows = range(len(self.sizes)) if self.grows is None else self.grows
        sizes = [
            f"{size}·part" if dim in grows else str(size) for dim, size in enumerate(self.sizes)
        ]
        return f"{str(self.dtype).removeprefix('torch.')} ({', '.join(sizes)})"

    def bytes(self, part: Fraction | None) -> int | None:
        """The bytes of the tensor for a micro-batch; None if they cannot be known.

        ``part``: how many rows the micro-batch has for each row of the batch that the model was
        traced with; None if that is not known.
        """
        is_as_traced = part == 1 or self.grows == ()
        if not is_as_traced and (part is None or self.grows is None):
            return None
        sizes = [
            size if is_as_traced or dim not in self.grows else size * part  # type: ignore[operator]
            for dim, size in enumerate(self.sizes)
        ]
        count = math.prod(sizes)
        is_whole = all(Fraction(size).denominator == 1 for size in sizes)
        return int(count) * self.dtype.itemsize if is_whole else None


Shapes = tuple[TensorShape, ...]
"""The shapes of the tensors and numbers in a value, in order."""


def shapes_of(node: fx.Node) -> Shapes | None:
    """The shapes in the value of a node; None if they are not known."""
    if SHAPES in node.meta:
        found: Shapes = node.meta[SHAPES]
        return found
    return _shapes_in(node.meta[VALUE], node.meta.get(GROWS)) if VALUE in node.meta else None


def shapes_of_gradient(node: fx.Node) -> Shapes | None:
    """The shapes in the gradient of a node's value, if no gradient is missing there; None if they
    are not known."""
    shapes = shapes_of(node)
    return None if shapes is None else tuple(shape for shape in shapes if shape.requires_grad)


def shape_of(tensor: Tensor, grows: tuple[int, ...] | None = ()) -> TensorShape:
    """The shape of a tensor."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    stored = tuple(1 if stride == 0 else int(size) for size, stride in sizes)
    return TensorShape(tensor.dtype, stored, grows, tensor.requires_grad)


_NUMBERS = {int: torch.int64, float: torch.float64}


def _shapes_in(value: Any, grows: tuple[tuple[int, ...], ...] | None) -> Shapes | None:
    tensors = tensors_of(value)
    if any(tensor.layout != torch.strided for tensor in tensors):
        return None
    known = dict(zip(map(id, tensors), grows or (None,) * len(tensors), strict=True))
    return tuple(
        shape_of(leaf, known[id(leaf)])
        if isinstance(leaf, Tensor)
        else TensorShape(_NUMBERS[type(leaf)])
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, Tensor) or type(leaf) in _NUMBERS
    )
