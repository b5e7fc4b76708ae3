"""Writes, for pass "step", how parameters are brought to another device once for all micro-batches.

Pass "tied" says which parameters these are, and which stages borrow them.

::

    weight ── replicate ── forward_mb0, forward_mb1, ...             in the stage that borrows it
    weight ◁─ accumulate ── send ── gathered, after its last backward
"""

from __future__ import annotations

from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import HOME, SHAPES, STAGE, attribute
from fxpipe.runtime.streams import COPY
from fxpipe.schedule import Action
from passes.common.shapes import shape_of
from passes.to_step.nodes import Nodes
from passes.to_step.traffic import Traffic


class Replicas:
    """Makes a replica of a parameter for each stage that borrows it, and brings gradients home."""

    def __init__(self, gm: fx.GraphModule, nodes: Nodes, traffic: Traffic) -> None:
        self.nodes, self.traffic = nodes, traffic
        brought = gm.graph.find_nodes(op="call_function", target=ops.bring)
        self.homes = {node.meta[HOME] for node in brought}
        self.made: dict[fx.Node, fx.Node] = {}

    def of(self, brought: fx.Node) -> fx.Node:
        """The replica for a "bring" node of the stage graph, one for all micro-batches."""
        if brought not in self.made:
            source, *streams = brought.args
            parameter = self.nodes.attribute(str(source.target))  # type: ignore[union-attr]
            args = parameter, *streams
            replica = self.nodes.whole(ops.replicate, args, f"{brought}_replica")
            self.nodes.place(replica, brought.meta[STAGE], 0)
            replica.meta[HOME] = brought.meta[HOME]
            self.made[brought] = replica
        return self.made[brought]

    def gather(self, last: dict[int, Action]) -> None:
        """Bring the gradients of replicas to the stages in which the parameters live.

        ``last``: the last action of each stage, after which its gradients are complete.
        """
        for brought, replica in self.made.items():
            stage, home = brought.meta[STAGE], brought.meta[HOME]
            grad = self.nodes.call(ops.gathered, (replica,), f"{brought}_gathered", last[stage])
            parameter = attribute(self.nodes.gm, str(replica.args[0].target))  # type: ignore[union-attr]
            grad.meta[SHAPES] = (shape_of(parameter),)
            made = self.traffic.depart([grad], home, last[stage])
            start = self.nodes.stream(stage, COPY)
            (arrived,) = self.traffic.bring(made, start, last[home], [f"{brought}_grad"])
            args = replica.args[0], arrived
            self.nodes.call(ops.accumulate, args, f"{brought}_accumulate", last[home])
