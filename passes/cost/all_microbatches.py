"""All micro-batches: the pass multiplies costs by the number of micro-batches, where the model was
traced with a single one, since later passes expect the costs of a mini-batch.

::

    traced with 2 of 6 rows     linear: 2 rows, 1.5 ms        after     linear: 4.5 ms, 3 copies

A graph that takes one batch size only has been traced with a single micro-batch, so that pass
"cost" gives its nodes the costs of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxpipe.ir.graph import COPIES, COST, SAVED, SAVED_STATE, VALUE, WORKSPACE, stage_nodes
from fxpipe.ir.tensors import tensors_of


@dataclass(frozen=True)
class AllMicrobatches:
    """Model graph with the costs of one micro-batch (pass "cost") → the same, with the costs of all
    ``chunks`` micro-batches. ``meta["copies"]`` says how many tensors of a mini-batch each tensor
    of the graph stands for."""

    name: ClassVar[str] = "all_microbatches"
    chunks: int

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        for node in stage_nodes(gm.graph):
            node.meta[COST] = node.meta[COST].times(self.chunks)
            for key in (SAVED, SAVED_STATE):
                if key in node.meta:
                    node.meta[key] = tuple(
                        (memory, size * self.chunks) for memory, size in node.meta[key]
                    )
            if WORKSPACE in node.meta:
                node.meta[WORKSPACE] = node.meta[WORKSPACE].times(self.chunks)
        for node in gm.graph.nodes:
            if node.op not in ("get_attr", "output"):
                node.meta[COPIES] = (self.chunks,) * len(tensors_of(node.meta.get(VALUE)))
        return gm
