"""The simulator: when each action of a schedule runs, given what it costs.

It is event-driven. A lane that is free begins with its next action as soon as that action's inputs
have arrived; what an action makes travels to other lanes while lanes compute.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from fxpipe.schedule.actions import Action, Kind
from fxpipe.schedule.memory import Memory, held_over_time
from fxpipe.schedule.occupancy import Span, Transfer
from fxpipe.schedule.schedule import Schedule
from fxpipe.schedule.timeline import Timeline
from fxpipe.schedule.validator import validate
from fxpipe.schedule.world import Links, StageCost, World


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
    stages = len(run.world.placement)
    held = () if memory is None else held_over_time(spans, run.lanes, stages, memory)
    return Timeline(name, names, spans, tuple(run.transfers), held)
