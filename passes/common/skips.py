"""Which stage sends which value to which other stage, for the pass "portals" and the report.

::

    stage 0 ──b── stage 1 ──c── stage 2 ──d── stage 3        b, c, d: to the next stage
       └────────────────a─────────────────────┘              a: a long skip, 0 → 3

A value that several later stages use visits them in order, 0 → 1 → 3, each hop straight from one
user to the next: every stage gets it once, and its gradient, on the way back, is summed from the
last user to the first, as the model's own backward does (the bits are the same). A hop to the next
stage is a copy; one that passes over stages is a skip, and goes through a portal.

A parameter that stages on several devices use lives in the first of these stages. It is brought
from there to each of the others once for all micro-batches (pass "tied").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from fxpipe.ir.cost import batch_bytes
from fxpipe.ir.graph import HOME, MICROBATCH, ONCE, ORIGIN, STAGE
from fxpipe.ir.text import human_bytes


@dataclass(frozen=True)
class Hop:
    """One value on its way from one stage to another that uses it.

    Args:
        value: its name in the model graph; a parameter's path.
        source: the stage that sends it; None for an input, which the caller sends straight to the
            first stage that uses it.
        target: the stage that receives it.
        bytes: its size for a whole mini-batch.
        once: whether it is a parameter, brought ahead of all micro-batches (pass "tied"). Any other
            value travels in parts, one with each micro-batch.
    """

    value: str
    source: int | None
    target: int
    bytes: int
    once: bool = False

    @property
    def is_skip(self) -> bool:
        """Whether the value passes over a stage, with each micro-batch, and so needs portals."""
        return self.source is not None and self.target > self.source + 1 and not self.once

    def __str__(self) -> str:
        way = f"stage {self.source} -> stage {self.target}"
        return f"{self.value}: {way}, {human_bytes(self.bytes)}" + ", once" * self.once


@dataclass(frozen=True)
class SkipLayout:
    """All values that travel between stages. Bytes are those of a whole mini-batch."""

    hops: tuple[Hop, ...]

    @property
    def skips(self) -> tuple[Hop, ...]:
        """The hops that pass over stages, and go through portals."""
        return tuple(hop for hop in self.hops if hop.is_skip)

    @property
    def brought(self) -> tuple[Hop, ...]:
        """The hops of parameters, each of which is made once for all micro-batches."""
        return tuple(hop for hop in self.hops if hop.once)

    def __str__(self) -> str:
        said = "no skips: every value is used in its own stage or the next\n"
        skips = "".join(f"{hop}\n" for hop in self.skips) or said
        return skips + "".join(f"{hop}\n" for hop in self.brought)


def stage_of(node: fx.Node) -> int | None:
    """The stage of a node; None for a node of the caller: inputs, scatter, gather, output."""
    return node.meta.get(STAGE)


def routes(graph: fx.Graph) -> Iterator[tuple[fx.Node, list[int | None]]]:
    """Yield each value that leaves its stage, with the list of the stages that it visits.

    First in the list is the stage that makes the value (None for an input), then all stages that
    use it, in order. The graph may be a stage graph, or one unrolled over micro-batches.
    """
    for node in graph.nodes:
        source = stage_of(node)
        if source is None and node.op != "placeholder" and MICROBATCH not in node.meta:
            continue
        users = {stage_of(user) for user in node.users if ONCE not in user.meta} - {None, source}
        if users:
            yield node, [source, *sorted(s for s in users if s is not None)]


def skip_layout(stage_graph: fx.GraphModule) -> SkipLayout:
    """The hops of a stage graph."""
    hops = []
    for node in stage_graph.graph.nodes:
        if HOME in node.meta:
            (source,) = node.all_input_nodes
            size = batch_bytes(node)
            hops.append(Hop(str(source.target), node.meta[HOME], node.meta[STAGE], size, once=True))
    for node, stages in routes(stage_graph.graph):
        name, size = node.meta.get(ORIGIN, node.name), batch_bytes(node)
        for source, target in pairwise(stages):
            assert target is not None
            hops.append(Hop(name, source, target, size))
    return SkipLayout(tuple(hops))
