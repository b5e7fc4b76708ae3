"""Outputs: which dimension of each output is the batch's, noted at the graph's output node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, cast

from torch import fx

from fxpipe.runtime.microbatch import Dims

OUT_DIMS = "out_dims"


@dataclass(frozen=True)
class OutputDims:
    """Model graph → the same, the output node with ``meta["out_dims"]``: for each node that the
    graph returns, in order, the batch dimension of every tensor in its value.

    ``find`` gives these for a graph. Raises :class:`fxpipe.BatchError` where an output has none.
    """

    name: ClassVar[str] = "outputs"
    find: Callable[[fx.GraphModule], list[Dims]]

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        gm.graph.output_node().meta[OUT_DIMS] = self.find(gm)
        return gm


def noted_dims(gm: fx.GraphModule) -> list[Dims]:
    """What pass "outputs" has noted. Raises ValueError if a pass has removed it since."""
    meta = gm.graph.output_node().meta
    if OUT_DIMS not in meta:
        raise ValueError(
            "the output node of the model graph has no out_dims: a pass that makes a new output "
            "node has to keep the metadata of the old one, and one that takes the place of "
            '"outputs" has to set it'
        )
    return cast("list[Dims]", meta[OUT_DIMS])
