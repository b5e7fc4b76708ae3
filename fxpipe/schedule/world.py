"""What a simulation is given beside the order of actions: what stages cost, and what travels over
which links.

::

    lane 0   stage 0 ──edge──┐                  a StageCost for each stage; an Edge for each pair of
    lane 1              stage 1 ──edge──┐       stages between which data travels; a Link for each
    lane 2                         stage 2      pair of lanes
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fxpipe.schedule.actions import Kind
from fxpipe.schedule.schedule import chain


@dataclass(frozen=True)
class StageCost:
    """The seconds that one micro-batch takes at a stage.

    ``backward`` is the whole backward's; None: that of both halves, one after the other.
    """

    forward: float
    backward_input: float
    weight_grad: float = 0.0
    backward: float | None = None

    def __post_init__(self) -> None:
        if not all(math.isfinite(s) and s >= 0 for s in map(self.seconds, Kind)):
            raise ValueError(f"{self}: give seconds, 0 or more")

    def seconds(self, kind: Kind) -> float:
        """The seconds that an action of this kind takes."""
        if kind is Kind.FORWARD:
            return self.forward
        if kind is Kind.BACKWARD_INPUT:
            return self.backward_input
        if kind is Kind.WEIGHT_GRAD:
            return self.weight_grad
        return self.backward_input + self.weight_grad if self.backward is None else self.backward


@dataclass(frozen=True)
class Edge:
    """A pair of stages, the first of which passes values on to the second, in bytes for one
    micro-batch, and gets their gradients back.

    ``gradient_bytes`` None: as many as ``bytes``.
    """

    source: int
    target: int
    bytes: float = 0.0
    gradient_bytes: float | None = None


@dataclass(frozen=True)
class Link:
    """A way between two lanes: ``latency`` in seconds, ``bandwidth`` in bytes a second."""

    latency: float = 0.0
    bandwidth: float = math.inf

    def seconds(self, size: float) -> float:
        """How long ``size`` bytes take."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Links:
    """How data travels between stages.

    Attributes:
        edges: the stage graph's; None: each stage passes on to the next, without bytes.
        link: between any two lanes.
        between: between some lanes, ``{(source, target): Link(...)}``, in place of ``link``.
        overlaps: copies run beside computation, one after the other for each pair of lanes. False:
            the lane that receives does nothing else meanwhile.
        once: what stages are given once in a step, ahead of their first micro-batch, such as a
            parameter that several share; its gradient goes back after their last backward. Bytes
            are those of the step. Always beside computation.
    """

    edges: Sequence[Edge] | None = None
    link: Link = Link()
    between: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    overlaps: bool = True
    once: Sequence[Edge] = ()


class World:
    """All that a simulation is given beside the order of actions: the lane of each stage, the costs
    of stages, and what travels between them."""

    def __init__(self, placement: Sequence[int], costs: Sequence[StageCost], links: Links) -> None:
        stages = len(placement)
        if len(costs) != stages:
            raise ValueError(f"costs of {len(costs)} stages are given: the schedule has {stages}")
        self.placement, self.costs, self.links = tuple(placement), tuple(costs), links
        edges = links.edges
        if edges is None:
            edges = [Edge(source, target) for source, target in chain(stages)]
        for edge in (*edges, *links.once):
            if not 0 <= edge.source < edge.target < stages:
                raise ValueError(
                    f"{edge}: an edge goes from a stage to a later one, of {stages} from 0"
                )
        self.edges = [(edge.source, edge.target) for edge in edges]
        self.before: list[list[int]] = [[] for _ in placement]
        self.after: list[list[int]] = [[] for _ in placement]
        self._travel: dict[tuple[int, int], tuple[float, float]] = {}
        for edge in edges:
            self.before[edge.target].append(edge.source)
            self.after[edge.source].append(edge.target)
            self._travel[edge.source, edge.target] = self.there(edge)
            self._travel[edge.target, edge.source] = self.back(edge)
        # For speed: the simulator asks for these once for each action.
        self._seconds = [
            {kind: cost.seconds(kind) + self._received(stage, kind) for kind in Kind}
            for stage, cost in enumerate(costs)
        ]

    def there(self, edge: Edge) -> tuple[float, float]:
        """How many seconds an edge's values take to the target's lane, and how many bytes they are.

        Both are 0 where source and target are in the same lane.
        """
        return self._over(edge.source, edge.target, edge.bytes)

    def back(self, edge: Edge) -> tuple[float, float]:
        """How many seconds an edge's gradients take back to the source's lane, and their bytes."""
        size = edge.bytes if edge.gradient_bytes is None else edge.gradient_bytes
        return self._over(edge.target, edge.source, size)

    def _over(self, source: int, target: int, size: float) -> tuple[float, float]:
        lanes = self.placement[source], self.placement[target]
        if lanes[0] == lanes[1]:
            return 0.0, 0.0
        return self.links.between.get(lanes, self.links.link).seconds(size), size

    def _received(self, stage: int, kind: Kind) -> float:
        """How many seconds a lane spends on receiving the inputs of an action, which is 0 where
        copies run beside computation."""
        if self.links.overlaps or kind is Kind.WEIGHT_GRAD:
            return 0.0
        sources = self.before[stage] if kind is Kind.FORWARD else self.after[stage]
        return sum(self._travel[source, stage][0] for source in sources)

    def seconds(self, stage: int, kind: Kind) -> float:
        """How many seconds an action occupies its lane."""
        return self._seconds[stage][kind]

    def travel(self, source: int, target: int) -> float:
        """Seconds from the end of an action at one stage until another has what it made."""
        return self._travel[source, target][0] if self.links.overlaps else 0.0

    def size(self, source: int, target: int) -> float:
        """Bytes that travel between these stages, for one micro-batch."""
        return self._travel[source, target][1]
