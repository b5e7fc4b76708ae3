"""Checkpoint: cells that keep no activations, and are run again just ahead of their backward.

::

    before     ── stage ── wait ── copy

    after      ── checkpoint ── wait ── recompute ── copy
                       `..... handle ......'

In the backward ``recompute`` comes before ``wait``: the stage runs again while the gradient is
still being copied.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxpipe import ops
from fxpipe.graph import MICROBATCH, STAGE
from passes.cells import Cell, Writer, cell_of, cells, outgoing, sweep

MODES = ("never", "except_last", "always")


@dataclass(frozen=True)
class Checkpoint:
    """Pipeline graph → the same with checkpointed cells: none, all, or all but the last
    micro-batch's, whose backward follows at once."""

    name: ClassVar[str] = "checkpoint"
    mode: str = "never"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(
                f"checkpoint is {self.mode!r}: give {', '.join(map(repr, MODES[:-1]))} or "
                f"{MODES[-1]!r}"
            )

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        found = cells(gm.graph)
        last = max((microbatch for microbatch, _ in found), default=0)
        for cell, nodes in found.items():
            if self.mode == "always" or (self.mode == "except_last" and cell[0] < last):
                _checkpoint(cell, nodes)
        return sweep(gm)


def _checkpoint(cell: Cell, nodes: list[fx.Node]) -> None:
    (call,) = (node for node in nodes if node.op == "call_module")
    with call.graph.inserting_before(call):
        stage = call.graph.create_node("get_attr", call.target, name=f"{call.name}_module")
    stage.meta = {STAGE: cell[1], MICROBATCH: cell[0]}
    writer = Writer(cell, after=call)
    pair = writer.call(ops.checkpoint, (stage, *call.args), "checkpoint")
    output = writer.item(pair, 0, like=call)
    handle = writer.call(operator.getitem, (pair, 1), "handle")
    call.replace_all_uses_with(output)
    call.graph.erase_node(call)
    nodes = [output if node is call else node for node in nodes]
    writer = Writer(cell, after=max(handle, nodes[-1]))
    leaving = outgoing(nodes)
    writer.gate(ops.recompute, leaving, handle, uses=lambda user: cell_of(user) != cell)
