"""The costs and links of a simulation: how long the actions of stages take, and how long copies
between them take.

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

    ``backward`` is for a whole backward; None: the sum of its halves, ``backward_input`` and
    ``weight_grad``. ``recompute`` is for the forward that is run again ahead of the backward, by
    ``checkpointed`` micro-batches, which are the first ones. ``offloaded`` are the bytes that a
    micro-batch moves to the host's memory and back, in place of being run again, and
    ``offloaded_tensors`` the number of tensors that have these, each of which is a copy of its own.
    ``update`` is for the optimizer's step of the stage's parameters, once in a step, when all its
    actions are done. ``loss`` is for the loss, which a last stage computes at the end of a forward,
    and ``loss_backward`` for that of the loss, with which its backward begins; the other fields do
    not count these.

    Raises ValueError if a number is negative or not finite.
    """

    forward: float
    backward_input: float
    weight_grad: float = 0.0
    backward: float | None = None
    recompute: float = 0.0
    checkpointed: int = 0
    offloaded: float = 0.0
    offloaded_tensors: int = 1
    update: float = 0.0
    loss: float = 0.0
    loss_backward: float = 0.0

    def __post_init__(self) -> None:
        given = [*map(self.seconds, Kind), self.update, self.loss, self.loss_backward]
        if not all(math.isfinite(seconds) and seconds >= 0 for seconds in given):
            raise ValueError(f"{self}: give seconds, 0 or more")

    def seconds(self, kind: Kind) -> float:
        """The seconds that an action of this kind takes, with those of the loss."""
        if kind is Kind.FORWARD:
            return self.forward + self.loss
        if kind is Kind.BACKWARD_INPUT:
            return self.backward_input + self.loss_backward
        if kind is Kind.WEIGHT_GRAD:
            return self.weight_grad
        if kind is Kind.RECOMPUTE:
            return self.recompute
        return self.halves if self.backward is None else self.backward + self.loss_backward

    @property
    def halves(self) -> float:
        """The seconds that a backward takes in two halves, with those of the loss."""
        return self.seconds(Kind.BACKWARD_INPUT) + self.seconds(Kind.WEIGHT_GRAD)


@dataclass(frozen=True)
class Edge:
    """An edge of the stage graph: stage ``source`` sends values to stage ``target``, and gets their
    gradients back.

    ``bytes`` are the values of one micro-batch, and ``gradient_bytes`` their gradients; None: as
    many as ``bytes``. ``tensors`` is the number of these values, each of which is a copy of its
    own, and ``gradient_tensors`` that of their gradients; None: as many.
    """

    source: int
    target: int
    bytes: float = 0.0
    gradient_bytes: float | None = None
    tensors: int = 1
    gradient_tensors: int | None = None


@dataclass(frozen=True)
class Link:
    """A connection of two lanes: ``latency`` in seconds for each copy, ``bandwidth`` in bytes per
    second."""

    latency: float = 0.0
    bandwidth: float = math.inf

    def seconds(self, size: float, copies: int = 1) -> float:
        """The seconds that ``copies`` of ``size`` bytes together take, one after the other."""
        return copies * self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Links:
    """How data travels between stages.

    Attributes:
        edges: the edges of the stage graph. None: each stage sends 0 bytes to the next one.
        link: the link between any two lanes that are not in ``between``.
        between: the links between some lanes, ``{(source, target): Link(...)}``.
        overlaps: whether copies overlap computation; then only copies between the same two lanes
            wait for each other. False: a lane computes nothing while it receives.
        once: edges that are used once in a step, such as a shared parameter. The values are sent
            when the step begins, and the gradients after the last backward of ``target``. Bytes are
            for the whole step. These copies always overlap computation.
        host: the link of each lane to the host's memory, and back, which are two ways; a lane that
            is not named has one that takes no time.
    """

    edges: Sequence[Edge] | None = None
    link: Link = Link()
    between: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    overlaps: bool = True
    once: Sequence[Edge] = ()
    host: Mapping[int, Link] = field(default_factory=dict)


class World:
    """The inputs of a simulation, except for the order of actions: the lane and the cost of each
    stage, and the edges and links between them."""

    def __init__(self, placement: Sequence[int], costs: Sequence[StageCost], links: Links) -> None:
        stages = len(placement)
        if len(costs) != stages:
            raise ValueError(f"costs of {len(costs)} stages are given: the schedule has {stages}")
        self.placement, self.costs, self.links = tuple(placement), tuple(costs), links
        self.checkpointed = [cost.checkpointed for cost in costs]
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
        self._bytes: dict[tuple[int, int], float] = {}
        for edge in edges:
            self.before[edge.target].append(edge.source)
            self.after[edge.source].append(edge.target)
            self._travel[edge.source, edge.target] = self.there(edge)
            self._travel[edge.target, edge.source] = self.back(edge)
            self._bytes[edge.source, edge.target] = edge.bytes
            self._bytes[edge.target, edge.source] = _gradient_bytes(edge)
        # Computed once, since the simulator needs them for each action.
        self._seconds = [
            {kind: cost.seconds(kind) + self._received(stage, kind) for kind in Kind}
            for stage, cost in enumerate(costs)
        ]

    def there(self, edge: Edge) -> tuple[float, float]:
        """The seconds that a copy of an edge's values takes, and their bytes. Both are 0 if the two
        stages are in the same lane."""
        return self._over(edge.source, edge.target, edge.bytes, edge.tensors)

    def back(self, edge: Edge) -> tuple[float, float]:
        """The seconds that a copy of an edge's gradients takes, and their bytes. Both are 0 if the
        two stages are in the same lane."""
        tensors = edge.tensors if edge.gradient_tensors is None else edge.gradient_tensors
        return self._over(edge.target, edge.source, _gradient_bytes(edge), tensors)

    def _over(self, source: int, target: int, size: float, copies: int) -> tuple[float, float]:
        lanes = self.placement[source], self.placement[target]
        if lanes[0] == lanes[1]:
            return 0.0, 0.0
        return self.links.between.get(lanes, self.links.link).seconds(size, copies), size

    def _received(self, stage: int, kind: Kind) -> float:
        """The seconds that a lane spends on receiving the inputs of an action; 0 if copies overlap
        computation."""
        if self.links.overlaps or kind in (Kind.WEIGHT_GRAD, Kind.RECOMPUTE):
            return 0.0
        sources = self.before[stage] if kind is Kind.FORWARD else self.after[stage]
        return sum(self._travel[source, stage][0] for source in sources)

    def seconds(self, stage: int, kind: Kind) -> float:
        """The seconds for which an action occupies its lane."""
        return self._seconds[stage][kind]

    def to_host(self, stage: int) -> float:
        """The seconds that the activations of a micro-batch take to the host's memory, or back."""
        link = self.links.host.get(self.placement[stage], Link())
        return link.seconds(self.costs[stage].offloaded, self.costs[stage].offloaded_tensors)

    def travel(self, source: int, target: int) -> float:
        """The seconds from the end of an action at stage ``source`` to the arrival of its result at
        stage ``target``; 0 if lanes spend this time on receiving."""
        return self._travel[source, target][0] if self.links.overlaps else 0.0

    def size(self, source: int, target: int) -> float:
        """The bytes that ``source`` sends to ``target`` for one micro-batch: values if ``target``
        is the later stage, else gradients. None are sent if the two are in the same lane."""
        return self._travel[source, target][1]

    def bytes_between(self, source: int, target: int) -> float:
        """The bytes of what ``target`` takes from ``source`` for one micro-batch, wherever they
        are: values if ``target`` is the later stage, else gradients."""
        return self._bytes[source, target]


def _gradient_bytes(edge: Edge) -> float:
    return edge.bytes if edge.gradient_bytes is None else edge.gradient_bytes
