"""The simulator: the times at which the actions of a schedule run, from the costs of stages.

It is event-driven. A free lane begins its next action as soon as the inputs of that action have
arrived. Copies of results to other lanes run while lanes compute. A recomputation waits for no
gradient, so that a lane begins it as soon as it is free, whether or not the schedule has it.

Activations that wait in the host's memory leave as soon as their forward has ended, and come back
when the schedule says so; the backward waits for them. A lane begins no forward while those of two
micro-batches are still on their way to the host.

A last stage computes the loss at the end of its forward, and begins its backward with that of the
loss, if costs say how long these take. They are spans of their own, as in a measured timeline.

When the last action of a stage has ended, its lane steps the parameters of the stage, if costs say
how long that takes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from fxpipe.schedule.actions import Action, Kind
from fxpipe.schedule.held import Series, held_over_time
from fxpipe.schedule.memory import Memory
from fxpipe.schedule.occupancy import Span, Transfer
from fxpipe.schedule.recomputation import Cell, recomputed_cells, with_recomputations
from fxpipe.schedule.schedule import Schedule
from fxpipe.schedule.timeline import Timeline
from fxpipe.schedule.validator import validate
from fxpipe.schedule.world import Links, StageCost, World

HOST = -1  # stands for the host, where events and links have the numbers of stages and lanes
UPDATED = -2  # stands for the parameters of an action's stage, which the optimizer has stepped
OPTIMIZER = "optimizer"
"""The name of the spans in which a lane steps the parameters of a stage."""
LOSS, LOSS_BACKWARD = "loss", "loss backward"
"""The names of the spans in which a lane computes the loss, and its backward."""
AT_ONCE = 2
"""How many micro-batches' activations may be on their way from a lane to the host while it begins
a forward: as the runtime has it, the lane's thread waits for those of the micro-batch before."""


def simulate(
    schedule: Schedule,
    costs: Sequence[StageCost],
    links: Links | None = None,
    memory: Memory | None = None,
) -> Timeline:
    """The timeline of a step that follows the schedule.

    Overlapping actions (:class:`fxpipe.schedule.Overlap`) run one after the other.

    Args:
        costs: the cost of each stage.
        links: how data travels between stages. None: each stage sends to the next one only, and
            copies take no time.
        memory: the bytes that stages and lanes keep. None: the timeline has no memory.

    Raises:
        ScheduleError: if the schedule cannot run.
        ValueError: if there is not one cost for each stage, or if an edge of ``links`` names a
            stage that the schedule does not have.
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"schedule is {schedule!r}: give a Schedule, such as "
            'fxpipe.schedule.named("1f1b", lanes=2, microbatches=4)'
        )
    for cost in costs:
        if not isinstance(cost, StageCost):
            raise TypeError(f"costs has {cost!r}: give a StageCost for each stage")
    world = World(schedule.placement, costs, links or Links())
    validate(schedule, edges=world.edges)
    return play(schedule, world, memory)


def play(schedule: Schedule, world: World, memory: Memory | None = None) -> Timeline:
    """Simulate a schedule that has not been validated. Actions that wait forever are missing from
    the timeline."""
    lines = [
        list(with_recomputations(schedule.actions(lane), world.checkpointed))
        for lane in range(len(schedule.lanes))
    ]
    reached = [0] * len(lines)

    def in_order(run: Run, lane: int) -> Action | None:
        line, position = lines[lane], reached[lane]
        if position == len(line) or not run.is_ready(line[position]):
            return None
        reached[lane] += 1
        return line[position]

    brought = recomputed_cells(action for line in lines for action in line)
    away = {cell for cell in brought if world.costs[cell[0]].offloaded}
    run = Run(world, len(lines), schedule.microbatches, in_order, away)
    run.to_the_end()
    return timeline_of(run, schedule.name, memory)


Choose = Callable[["Run", int], Action | None]
"""A function that gives the next action of a free lane, which has to be ready; None: the lane waits
until the next event."""


class Run:
    """A run of the simulator, in which time goes from event to event. ``choose`` gives the next
    action of each free lane. Where it chooses no recomputation, the backward begins with it. The
    cells that are ``away`` have their activations on the host, until it chooses to reload them."""

    def __init__(
        self,
        world: World,
        lanes: int,
        microbatches: int,
        choose: Choose,
        away: Collection[Cell] = frozenset(),
    ) -> None:
        self.world, self.lanes, self.microbatches = world, lanes, microbatches
        self.now = 0.0
        self.spans: list[Span] = []
        self.transfers: list[Transfer] = []
        self._choose = choose
        self._free = [True] * lanes
        self._link_free: dict[tuple[int, int], float] = {}
        # An event is (time, number, action, target): the end of an action if the target is None,
        # else the arrival of its result at a stage. If there is no action, it is the arrival of a
        # value that is sent once in a step.
        self._events: list[tuple[float, int, Action | None, int | None]] = []
        self._arrivals = 0
        stages = range(len(world.placement))
        self._lacks_forward = [[len(world.before[s])] * microbatches for s in stages]
        self._lacks_backward = [[1 + len(world.after[s])] * microbatches for s in stages]
        self._lacks_weight = [[1] * microbatches for _ in stages]
        self._lacks_recomputation = [[1] * microbatches for _ in stages]
        self._recomputed: set[Cell] = set()
        self._backwards_left = [microbatches for _ in stages]
        self._away = away
        self._leaving = [0] * lanes  # how many micro-batches' activations are on their way out
        self._left: dict[Cell, float] = {}  # when those of a cell are on the host
        self._back: dict[Cell, float] = {}  # and when all of them are back
        for stage, microbatch in away:
            self._lacks_backward[stage][microbatch] += 1
        self._give_once()

    def is_ready(self, action: Action) -> bool:
        """Whether the inputs of an action have arrived at its stage."""
        if action.kind is Kind.FORWARD:
            if self._leaving[self.world.placement[action.stage]] >= AT_ONCE:
                return False
            lacks = self._lacks_forward
        elif action.kind is Kind.WEIGHT_GRAD:
            lacks = self._lacks_weight
        elif action.kind is Kind.RECOMPUTE:
            # What comes back is given the memory of what has left, and the lane waits for that.
            is_back = (action.stage, action.microbatch) in self._away
            if is_back and self._leaving[self.world.placement[action.stage]]:
                return False
            lacks = self._lacks_recomputation
        else:
            lacks = self._lacks_backward
        return lacks[action.stage][action.microbatch] == 0

    def seconds(self, action: Action) -> float:
        """The seconds for which an action occupies its lane if it begins now."""
        stage, own = action.stage, self.world.seconds(action.stage, action.kind)
        is_again = action.microbatch < self.world.checkpointed[stage]
        is_recomputed = (stage, action.microbatch) in self._recomputed
        if is_again and not is_recomputed and action.kind.begins_backward:
            return own + self.world.seconds(stage, Kind.RECOMPUTE)
        back = self._back.get((stage, action.microbatch))
        if back is not None and action.kind.begins_backward:
            # It begins with what is back, and does its last part behind the tensor that is last.
            last = own / max(1, self.world.costs[stage].offloaded_tensors)
            return max(own, back + last - self.now)
        return own

    def to_the_end(self) -> None:
        """Go from event to event until none is left. Then all actions are done, or all lanes wait
        forever."""
        self._start()
        while self._events:
            self.now = self._events[0][0]
            while self._events and self._events[0][0] == self.now:
                _, _, action, target = heapq.heappop(self._events)
                if target is None:
                    assert action is not None
                    self._end(action)
                elif target == HOST:
                    assert action is not None
                    self._moved(action)
                elif target == UPDATED:
                    assert action is not None
                    self._free[self.world.placement[action.stage]] = True
                elif action is None:
                    self._wait_for_once(target, -1)
                else:
                    self._arrive(action, target)
            self._start()

    def _start(self) -> None:
        for lane in range(self.lanes):
            if self._free[lane] and (action := self._choose(self, lane)) is not None:
                end = self.now + self.seconds(action)
                self._free[lane] = False
                self.spans += self._spans(Span(lane, self.now, end, action), action)
                self._push(end, action, None)

    def _spans(self, whole: Span, action: Action) -> list[Span]:
        """The span of an action, and that of the loss or its backward, which is part of it."""
        cost, start, end = self.world.costs[action.stage], whole.start, whole.end
        if cost.loss and action.kind is Kind.FORWARD:
            between = end - cost.loss
            return [replace(whole, end=between), Span(whole.lane, between, end, None, LOSS)]
        if cost.loss_backward and action.kind.begins_backward:
            between = start + cost.loss_backward
            loss = Span(whole.lane, start, between, None, LOSS_BACKWARD)
            return [loss, replace(whole, start=between)]
        return [whole]

    def _push(self, time: float, action: Action | None, target: int | None) -> None:
        self._arrivals += 1
        heapq.heappush(self._events, (time, self._arrivals, action, target))

    def _end(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
            self._backwards_left[stage] -= 1
            if not self._backwards_left[stage]:
                self._return(stage)
        self._free[self.world.placement[stage]] = not self._update(action)
        if action.kind is Kind.FORWARD:
            self._lacks_backward[stage][microbatch] -= 1
            self._lacks_recomputation[stage][microbatch] -= 1
            self._move(action)
            targets = self.world.after[stage]
        elif action.kind is Kind.WEIGHT_GRAD:
            return
        elif action.kind is Kind.RECOMPUTE:
            self._recomputed.add((stage, microbatch))
            self._move(action)
            return
        else:
            self._lacks_weight[stage][microbatch] -= 1
            targets = self.world.before[stage]
        for target in targets:
            self._send(action, target)

    def _update(self, action: Action) -> bool:
        """Step the parameters of a stage if this was its last action. Return whether the lane is
        busy with that."""
        seconds = self.world.costs[action.stage].update
        is_busy = seconds > 0 and not self._backwards_left[action.stage]
        if is_busy:
            lane, end = self.world.placement[action.stage], self.now + seconds
            self.spans.append(Span(lane, self.now, end, None, OPTIMIZER))
            self._push(end, action, UPDATED)
        return is_busy

    def _move(self, action: Action) -> None:
        """Let the activations of a cell leave for the host, or come back, if they do."""
        cell = action.stage, action.microbatch
        if cell not in self._away:
            return
        lane = self.world.placement[action.stage]
        is_leaving = action.kind is Kind.FORWARD
        way = (lane, HOST) if is_leaving else (HOST, lane)
        start = max(self.now, self._link_free.get(way, 0.0), self._left.get(cell, 0.0))
        self._link_free[way] = end = start + self.world.to_host(action.stage)
        if is_leaving:
            self._left[cell] = end
            self._leaving[lane] += 1
        cost = self.world.costs[action.stage]
        self.transfers.append(Transfer(lane, lane, start, end, action, cost.offloaded))
        if is_leaving:
            self._push(end, action, HOST)
        else:  # the backward uses one tensor after the other
            self._back[cell] = end
            first = start + (end - start) / max(1, cost.offloaded_tensors)
            self._push(first, action, HOST)

    def _moved(self, action: Action) -> None:
        """Note that the activations of a cell have come to the host, or that the first are back."""
        if action.kind is Kind.FORWARD:
            self._leaving[self.world.placement[action.stage]] -= 1
        else:
            self._lacks_backward[action.stage][action.microbatch] -= 1

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
        """Send the values that are sent once in a step. Forwards of their target stages wait for
        them."""
        for edge in self.world.links.once:
            seconds, size = self.world.there(edge)
            if seconds:
                end = self._copied(edge.source, edge.target, seconds, size, None)
                self._push(end, None, edge.target)
                self._wait_for_once(edge.target, 1)

    def _wait_for_once(self, stage: int, more: int) -> None:
        self._lacks_forward[stage] = [count + more for count in self._lacks_forward[stage]]

    def _return(self, stage: int) -> None:
        """Send back the gradients of the values that a stage was sent once in the step."""
        for edge in self.world.links.once:
            seconds, size = self.world.back(edge)
            if edge.target == stage and seconds:
                self._copied(stage, edge.source, seconds, size, None)

    def _arrive(self, action: Action, target: int) -> None:
        is_forward = action.kind is Kind.FORWARD
        lacks = self._lacks_forward if is_forward else self._lacks_backward
        lacks[target][action.microbatch] -= 1


def timeline_of(run: Run, name: str, memory: Memory | None) -> Timeline:
    """The timeline of a finished run. If ``memory`` is given, the timeline has the bytes that lanes
    hold over time."""
    spans = tuple(sorted(run.spans, key=lambda span: (span.lane, span.start, span.end)))
    names = tuple(f"lane {lane}" for lane in range(run.lanes))
    held: tuple[Series, ...] = ()
    if memory is not None:
        held = held_over_time(spans, run.world, run.lanes, memory, run.transfers)
    return Timeline(name, names, spans, tuple(run.transfers), held)
