"""The simulator: when each action of a schedule runs, given what it costs.

It is event-driven. A lane that is free begins with its next action as soon as that action's inputs
have arrived; what an action makes travels to other lanes while lanes compute.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fxpipe.schedule.actions import Action, Kind
from fxpipe.schedule.occupancy import Span, Transfer
from fxpipe.schedule.schedule import Schedule, chain
from fxpipe.schedule.timeline import Timeline
from fxpipe.schedule.validator import Bound, growth, spread, validate


@dataclass(frozen=True)
class StageCost:
    """What one micro-batch costs at a stage, in seconds.

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
        """What an action of this kind takes."""
        if kind is Kind.FORWARD:
            return self.forward
        if kind is Kind.BACKWARD_INPUT:
            return self.backward_input
        if kind is Kind.WEIGHT_GRAD:
            return self.weight_grad
        return self.backward_input + self.weight_grad if self.backward is None else self.backward


@dataclass(frozen=True)
class Edge:
    """What a stage passes to another, in bytes for one micro-batch, and the gradients back.

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


@dataclass(frozen=True)
class Memory:
    """What lanes hold, in bytes.

    Attributes:
        activations: what each stage keeps of a micro-batch until its backward.
        fixed: what each lane holds all the time, for all or for each: parameters, their gradients.
        released_by_input: the part of the activations that is free after a backward's input half.
        checkpointed: the number of micro-batches, the first ones, that keep only ``inputs`` until
            their backward, which begins by computing their activations again.
        inputs: what a stage keeps of those, for all or for each.
    """

    activations: Sequence[float]
    fixed: Bound = 0.0
    released_by_input: float = 0.0
    checkpointed: int = 0
    inputs: Bound = 0.0


def simulate(
    schedule: Schedule,
    costs: Sequence[StageCost],
    links: Links | None = None,
    memory: Memory | None = None,
) -> Timeline:
    """The timeline of a step that follows the schedule.

    Overlapping actions (:class:`fxpipe.schedule.Overlap`) are run one after the other.

    Args:
        costs: one for each stage.
        links: None: stages pass on to the next, in no time.
        memory: None: the timeline knows nothing of it.

    Raises:
        ScheduleError: if the schedule cannot run.
        ValueError: for numbers that do not fit it.
    """
    world = World(schedule.placement, costs, links or Links())
    validate(schedule, edges=world.edges)
    return play(schedule, world, memory)


def play(schedule: Schedule, world: World, memory: Memory | None = None) -> Timeline:
    """:func:`simulate` without :func:`validate`: what waits forever is not in the timeline."""
    lines = [list(schedule.actions(lane)) for lane in range(len(schedule.lanes))]
    reached = [0] * len(lines)

    def in_order(run: Run, lane: int) -> Action | None:
        line, position = lines[lane], reached[lane]
        if position == len(line) or not run.is_ready(line[position]):
            return None
        reached[lane] += 1
        return line[position]

    run = Run(world, len(lines), schedule.microbatches, in_order)
    run.to_the_end()
    return timeline_of(run, schedule.name, memory)


class World:
    """What a simulation is given besides the order of actions: the lane of each stage, what stages
    cost, and what travels between them."""

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


Choose = Callable[["Run", int], Action | None]
"""What a free lane does next, of what is ready; None to wait until something happens."""


class Run:
    """Time, going from event to event. What lanes do is up to ``choose``."""

    def __init__(self, world: World, lanes: int, microbatches: int, choose: Choose) -> None:
        self.world, self.lanes, self.microbatches = world, lanes, microbatches
        self.now = 0.0
        self.spans: list[Span] = []
        self.transfers: list[Transfer] = []
        self._choose = choose
        self._free = [True] * lanes
        self._link_free: dict[tuple[int, int], float] = {}
        # An event is the end of an action on its lane (target None), or an arrival at a stage.
        # One without an action is the arrival of what comes once.
        self._events: list[tuple[float, int, Action | None, int | None]] = []
        self._arrivals = 0
        stages = range(len(world.placement))
        self._lacks_forward = [[len(world.before[s])] * microbatches for s in stages]
        self._lacks_backward = [[1 + len(world.after[s])] * microbatches for s in stages]
        self._lacks_weight = [[1] * microbatches for _ in stages]
        self._backwards_left = [microbatches for _ in stages]
        self._give_once()

    def is_ready(self, action: Action) -> bool:
        """Whether the inputs of an action have arrived at its stage."""
        if action.kind is Kind.FORWARD:
            lacks = self._lacks_forward
        elif action.kind is Kind.WEIGHT_GRAD:
            lacks = self._lacks_weight
        else:
            lacks = self._lacks_backward
        return lacks[action.stage][action.microbatch] == 0

    def to_the_end(self) -> None:
        """Go from event to event until none is left: all actions are done, or all lanes wait."""
        self._start()
        while self._events:
            self.now = self._events[0][0]
            while self._events and self._events[0][0] == self.now:
                _, _, action, target = heapq.heappop(self._events)
                if target is None:
                    assert action is not None
                    self._end(action)
                elif action is None:
                    self._wait_for_once(target, -1)
                else:
                    self._arrive(action, target)
            self._start()

    def _start(self) -> None:
        for lane in range(self.lanes):
            if self._free[lane] and (action := self._choose(self, lane)) is not None:
                end = self.now + self.world.seconds(action.stage, action.kind)
                self._free[lane] = False
                self.spans.append(Span(lane, self.now, end, action))
                self._push(end, action, None)

    def _push(self, time: float, action: Action | None, target: int | None) -> None:
        self._arrivals += 1
        heapq.heappush(self._events, (time, self._arrivals, action, target))

    def _end(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
            self._backwards_left[stage] -= 1
            if not self._backwards_left[stage]:
                self._return(stage)
        self._free[self.world.placement[stage]] = True
        if action.kind is Kind.FORWARD:
            self._lacks_backward[stage][microbatch] -= 1
            targets = self.world.after[stage]
        elif action.kind is Kind.WEIGHT_GRAD:
            return
        else:
            self._lacks_weight[stage][microbatch] -= 1
            targets = self.world.before[stage]
        for target in targets:
            self._send(action, target)

    def _send(self, action: Action, target: int) -> None:
        seconds, size = (
            self.world.travel(action.stage, target),
            self.world.size(action.stage, target),
        )
        if seconds:
            self._push(self._copied(action.stage, target, seconds, size, action), action, target)
        else:
            self._arrive(action, target)

    def _copied(
        self, source: int, target: int, seconds: float, size: float, action: Action | None
    ) -> float:
        """Occupy the link between two stages for a copy, and return the time at which it ends."""
        way = self.world.placement[source], self.world.placement[target]
        start = max(self.now, self._link_free.get(way, 0.0))
        self._link_free[way] = end = start + seconds
        self.transfers.append(Transfer(*way, start, end, action, size))
        return end

    def _give_once(self) -> None:
        """Send what stages are given once; their forwards wait for it."""
        for edge in self.world.links.once:
            seconds, size = self.world.there(edge)
            if seconds:
                end = self._copied(edge.source, edge.target, seconds, size, None)
                self._push(end, None, edge.target)
                self._wait_for_once(edge.target, 1)

    def _wait_for_once(self, stage: int, more: int) -> None:
        self._lacks_forward[stage] = [count + more for count in self._lacks_forward[stage]]

    def _return(self, stage: int) -> None:
        """Send the gradients of what a stage has been given once."""
        for edge in self.world.links.once:
            seconds, size = self.world.back(edge)
            if edge.target == stage and seconds:
                self._copied(stage, edge.source, seconds, size, None)

    def _arrive(self, action: Action, target: int) -> None:
        is_forward = action.kind is Kind.FORWARD
        lacks = self._lacks_forward if is_forward else self._lacks_backward
        lacks[target][action.microbatch] -= 1


def timeline_of(run: Run, name: str, memory: Memory | None) -> Timeline:
    """The timeline of a finished run; with ``memory`` it says what lanes hold at each time."""
    spans = tuple(sorted(run.spans, key=lambda span: (span.lane, span.start, span.end)))
    names = tuple(f"lane {lane}" for lane in range(run.lanes))
    held = () if memory is None else _memory(run, spans, memory)
    return Timeline(name, names, spans, tuple(run.transfers), held)


def _memory(
    run: Run, spans: Sequence[Span], memory: Memory
) -> tuple[tuple[tuple[float, float], ...], ...]:
    stages = len(run.world.placement)
    sizes: list[float] = spread(memory.activations, stages, "activations of each stage")
    inputs = spread(memory.inputs, stages, "inputs of each stage")
    fixed = spread(memory.fixed, run.lanes, "fixed memory of each lane")
    held = [[(0.0, float(amount))] for amount in fixed]
    for span in spans:
        if span.action is not None:
            stage, again = span.action.stage, span.action.microbatch < memory.checkpointed
            kept = inputs[stage] if again else None
            first, last = _change(span.action.kind, sizes[stage], kept, memory.released_by_input)
            for time, change in ((span.start, first), (span.end, last)):
                if change:
                    held[span.lane].append((time, held[span.lane][-1][1] + change))
    return tuple(map(tuple, held))


def _change(kind: Kind, size: float, inputs: float | None, released: float) -> tuple[float, float]:
    """By how much an action changes what is held, when it begins and when it ends.

    ``inputs``: all that is kept of a checkpointed micro-batch; None: it keeps its activations.
    """
    change = growth(kind, released) * size
    if kind is Kind.FORWARD:
        return (change if inputs is None else inputs), 0.0
    if inputs is None:
        return 0.0, change
    is_first, is_last = kind is not Kind.WEIGHT_GRAD, kind is not Kind.BACKWARD_INPUT
    return size * is_first, change - inputs * is_last
