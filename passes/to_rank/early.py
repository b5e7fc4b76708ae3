"""Post early: the pass moves each receive of a rank to where its memory is free.

::

    before     forward 0 ─ forward 1 ─ receive 0 ─ backward 0 ─ receive 1 ─ backward 1

    after      receive 0 ─ forward 0 ─ forward 1 ─ backward 0 ─ receive 1 ─ backward 1

Pass "project" puts a receive where the value is made on the other rank, in the order in which the
schedule was written. A rank that is late would let the other one wait with its value. A receive
does not stop a rank, so that it may come earlier: as soon as there are not more values of its edge
on the rank, received or awaited, than there are at some point of the schedule anyway. This changes
neither what is computed nor the order of the transfers of an edge.

That ranks cannot wait for each other in a circle (see :mod:`passes.verify.transfers`) holds for the
graph ahead of this pass, and stays true, since each edge waits by itself. It is not so where edges
share a communicator, on which all transfers keep their order: those stay where they are.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import MICROBATCH, STAGE
from fxpipe.runtime.ranks.transport import Edge
from passes.to_rank.project import edge_of


@dataclass(frozen=True)
class PostEarly:
    """Rank graph → the same, whose receives are posted as early as the schedule's memory allows.

    Args:
        kept: edges whose receives stay where they are.
    """

    name: ClassVar[str] = "post_early"
    kept: Collection[Edge] = frozenset()

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        nodes = list(gm.graph.nodes)
        ends = _Ends(nodes)
        edges: dict[Edge, list[fx.Node]] = {}
        for node in gm.graph.find_nodes(op="call_function", target=ops.receive):
            edges.setdefault(edge_of(node)[0], []).append(node)
        first = gm.graph.find_nodes(op="placeholder")[-1]
        for edge, receives in reversed(edges.items()):  # what moves last to a place is first there
            if edge not in self.kept:
                _move(receives, nodes, ends, first)
        gm.recompile()
        return gm


class _Ends:
    """Until when a rank has a received value: the place of the last node of its stage and
    micro-batch; the end of the program for a value that belongs to none."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.places = {node: place for place, node in enumerate(nodes)}
        self._last = {self._key(node): place for place, node in enumerate(nodes)}

    @staticmethod
    def _key(node: fx.Node) -> tuple[int | None, int | None]:
        return node.meta.get(STAGE), node.meta.get(MICROBATCH)

    def of(self, receive: fx.Node) -> int:
        keys = [self._key(user) for user in receive.users]
        return max((self._last[key] for key in keys if None not in key), default=len(self.places))


def _move(
    receives: Sequence[fx.Node], nodes: Sequence[fx.Node], ends: _Ends, first: fx.Node
) -> None:
    """Move the receives of one edge. ``first``: the node behind which a program begins."""
    lives = [(ends.places[receive], ends.of(receive)) for receive in receives]
    most = max(sum(begin <= at < end for begin, end in lives) for at, _ in lives)
    ended: list[int] = []  # where the lives of earlier values end, in order
    behind, earliest = first, -1
    for number, (receive, (begin, end)) in enumerate(zip(receives, lives, strict=True)):
        if number >= most and ended[number - most] > earliest:
            earliest = ended[number - most]
            behind = nodes[earliest] if earliest < begin else receive
        if earliest < begin and behind is not receive:
            behind.append(receive)
        behind = receive
        insort(ended, end)
