"""Carried: what a transfer carries from rank to rank, as far as it is known ahead of any run.

::

    forward ── wait ── transmit          carries what the forward gives: float32 (8, 3)
    backward ── wait ── transmit         carries a gradient, of the shape of the value that it is
                                         the gradient of
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe import ops
from fxpipe.ir.graph import MICROBATCH, attribute
from fxpipe.runtime.ranks.expected import Sizes
from passes.common.shapes import Shapes, TensorShape, shape_of, shapes_of


@dataclass(frozen=True)
class Carried:
    """What a transfer carries.

    Args:
        shapes: those of the tensors and numbers, for the batch that the model was traced with.
        microbatch: the number of the micro-batch that they belong to; None if they belong to none.
    """

    shapes: Shapes
    microbatch: int | None

    def __str__(self) -> str:
        """The shapes of what is carried, as drawings show them."""
        said = ", ".join(map(str, self.shapes)) or "no tensors"
        is_part = "·part" in said
        return f"{said}, part: the micro-batch's share of the rows" if is_part else said

    def sizes(self, parts: Sequence[Fraction] | None) -> Sizes | None:
        """The bytes of each tensor and number in a run; None if they cannot be known.

        ``parts``: for each micro-batch, how many rows it has for each row of the batch that the
        model was traced with; None if that is not known.
        """
        part = None if parts is None or self.microbatch is None else parts[self.microbatch]
        found = [shape.bytes(part) for shape in self.shapes]
        return None if None in found else tuple(found)  # type: ignore[arg-type]


def carried(gm: fx.GraphModule, value: Any) -> Carried | None:
    """What a transfer of a value carries: of a node of the graph, or of values with nodes among
    them. None if that follows from values, or is not known."""
    nodes: list[fx.Node] = []
    fx.map_arg(value, nodes.append)
    found = [_shapes(gm, node) for node in nodes]
    shapes = [shape for each in found for shape in each or ()]
    microbatches = {_microbatch(node) for node in nodes}
    is_known = nodes and None not in found and len(microbatches) == 1
    return Carried(tuple(shapes), microbatches.pop()) if is_known else None


def _shapes(gm: fx.GraphModule, node: fx.Node) -> Shapes | None:
    if node.target in (ops.wait, ops.send):
        inner = carried(gm, node.args[0])
        return None if inner is None else inner.shapes
    if node.target is ops.seeds:
        count = node.args[0]
        assert isinstance(count, int)
        return (TensorShape(torch.int64),) * count
    if node.op == "get_attr":
        tensor = attribute(gm, str(node.target))
        return (shape_of(tensor),) if isinstance(tensor, Tensor) else None
    return shapes_of(node)


def _microbatch(node: fx.Node) -> int | None:
    number: int | None = node.meta.get(MICROBATCH)
    return number
