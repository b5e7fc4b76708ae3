"""Pass "outputs": notes at the output node of the model graph which dimension of each output is the
batch dimension, by which the outputs of micro-batches are put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, cast

from torch import fx

from fxpipe.runtime.microbatch import Dims

OUT_DIMS = "out_dims"


@dataclass(frozen=True)
class OutputDims:
    """Model graph → the same, with ``meta["out_dims"]`` at the output node: for each node that the
    graph returns, in order, the batch dimension of every tensor in its value.

    Args:
        find: the function that finds these dimensions for a graph.

    Raises:
        BatchError: where an output has no batch dimension.
    """

    name: ClassVar[str] = "outputs"
    find: Callable[[fx.GraphModule], list[Dims]]

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        gm.graph.output_node().meta[OUT_DIMS] = self.find(gm)
        return gm


def noted_dims(gm: fx.GraphModule) -> list[Dims]:
    """The batch dimensions of the outputs, as pass "outputs" has noted them.

    Raises ValueError if a later pass has removed the note.
    """
    meta = gm.graph.output_node().meta
    if OUT_DIMS not in meta:
        raise ValueError(
            "the output node of the model graph has no out_dims: a pass that makes a new output "
            "node has to keep the metadata of the old one, and one that takes the place of "
            '"outputs" has to set it'
        )
    return cast("list[Dims]", meta[OUT_DIMS])
