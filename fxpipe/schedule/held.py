"""The bytes that each lane holds in the course of a simulated step.

::

    lane 0   |  F0  |  F1  |                       F0's result is made here, on lane 0's device,
                  r ========.                      and waits until the thread of lane 1 launches
    lane 1           |  F0  |  F1  |               the forward that uses it

Three things add up: what micro-batches keep until their backward (:class:`.memory.MemoryChanges`);
what an action needs only while it runs (:class:`.memory.Workspace`); and results that wait for
another lane. Activations that move to the host are there until they have left. When all actions of
a stage are done, an optimizer steps the stage's parameters, for which it may need more memory.

A lane's thread takes the inputs of an action, of which it launches the copies to the lane's device,
when it has launched the action before, and they have been launched where they are made. So a skip
waits at its source, until its consumer's turn comes. Then the thread launches the action itself,
but it runs ahead of the lane's device by ``AHEAD`` at most.

What two lanes launch at the same time has no order, so that one of them may hold the results of an
action more than this in a real run, or less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from fxpipe.schedule.actions import Action, Kind
from fxpipe.schedule.bounds import spread
from fxpipe.schedule.memory import Memory, MemoryChanges, WhileRunning, Workspace
from fxpipe.schedule.occupancy import Span, Transfer
from fxpipe.schedule.recomputation import recomputed_cells
from fxpipe.schedule.world import World

AHEAD = 4
"""How many times values may cross to or from the stream on which a lane computes, as a thread
launches actions, ahead of what the lane's device computes. It is that of the runtime."""

Series = tuple[tuple[float, float], ...]


def held_over_time(
    spans: Sequence[Span],
    world: World,
    lanes: int,
    memory: Memory,
    transfers: Iterable[Transfer] = (),
) -> tuple[Series, ...]:
    """For each lane the bytes that it holds, as pairs of a time and the bytes from that time on.

    ``spans`` are in the order of time within each lane. ``transfers`` are the copies of the step.
    """
    recomputed = recomputed_cells(action for _, action in _actions(spans))
    changes = MemoryChanges(memory, len(world.placement), recomputed)
    running = memory.running or WhileRunning([Workspace()] * len(world.placement))
    workspace = _Workspaces(running, changes, memory.offloaded)
    launched = {} if memory.running is None else _launches(spans, world)
    waiting = [_Waiting(world, changes, running, launched) for _ in range(lanes)]
    updating = running.updating or [0.0] * len(world.placement)
    last = {action.stage: action for _, action in _actions(spans)}  # a stage is in one lane
    kept = spread(memory.fixed, lanes, "fixed memory of each lane")
    held = [[(0.0, amount)] for amount in kept]
    for span, action in _actions(spans):
        lane = span.lane
        begin, end = changes.of(action)
        of_others = waiting[lane].at(action)
        most = max(workspace.of_loss(action), begin + workspace.of(action))
        _append(held[lane], span.start, kept[lane] + of_others + most)
        kept[lane] += begin + end
        waiting[lane].leave(action)
        if action == last.get(action.stage) and updating[action.stage]:
            more = kept[lane] + of_others + updating[action.stage]
            held[lane].append((span.end, more))
            end = span.end + world.costs[action.stage].update
        else:
            end = span.end
        _append(held[lane], end, kept[lane] + of_others)
    leaving = _leaving(spans, transfers)
    return tuple(_with(series, leaving.get(lane, [])) for lane, series in enumerate(held))


def _leaving(
    spans: Iterable[Span], transfers: Iterable[Transfer]
) -> dict[int, list[tuple[float, float, float]]]:
    """For each lane the bytes that leave it for the host: from when, until when, and how many. They
    stay from the end of their forward to that of the copy, and at least until the lane's next move:
    to the host, or back from there."""
    copies = [copy for copy in transfers if copy.source == copy.target]
    lanes = {copy.source for copy in copies}
    moves: dict[int, list[tuple[float, Action]]] = {lane: [] for lane in lanes}
    moved = {copy.action for copy in copies}
    for span, action in _actions(spans):
        if action in moved:
            moves[span.lane].append((span.end, action))
    until = {
        action: following for own in moves.values() for (_, action), (following, _) in pairwise(own)
    }
    ends = {action: end for own in moves.values() for end, action in own}
    found: dict[int, list[tuple[float, float, float]]] = {}
    for copy in copies:
        if copy.action is not None and copy.action.kind is Kind.FORWARD:
            end = max(copy.end, until.get(copy.action, 0.0))
            found.setdefault(copy.source, []).append((ends[copy.action], end, copy.bytes))
    return found


def _with(series: list[tuple[float, float]], more: list[tuple[float, float, float]]) -> Series:
    """A series, with more bytes between some times."""
    if not more:
        return tuple(series)
    changes = [(begin, size) for begin, _, size in more] + [(end, -size) for _, end, size in more]
    base = [
        (time, amount - before)
        for (time, amount), before in zip(
            series, [0.0, *(amount for _, amount in series)], strict=False
        )
    ]
    found: list[tuple[float, float]] = []
    now = 0.0
    for time, change in sorted(base + changes, key=lambda pair: pair[0]):
        now += change
        if found and found[-1][0] == time:
            found.pop()
        found.append((time, now))
    return tuple(found)


def _append(series: list[tuple[float, float]], time: float, amount: float) -> None:
    if amount != series[-1][1]:
        series.append((time, amount))


def _actions(spans: Iterable[Span]) -> Iterator[tuple[Span, Action]]:
    for span in spans:
        if span.action is not None:
            yield span, span.action


class _Workspaces:
    """The bytes that actions need only while they run."""

    def __init__(
        self, running: WhileRunning, changes: MemoryChanges, offloaded: Collection[int]
    ) -> None:
        self._stages, self._loss = running.stages, running.loss
        self._changes, self._offloaded = changes, offloaded

    def of(self, action: Action) -> float:
        """The bytes beyond what is kept once the action has begun."""
        stage = self._stages[action.stage]
        is_again = self._changes.is_again(action)
        match action.kind:
            case Kind.FORWARD:
                own = stage.again if is_again else stage.forward
                return max(own, self._loss) if self._is_last(action) else own
            case Kind.BACKWARD | Kind.BACKWARD_INPUT:
                own = stage.backward if action.kind is Kind.BACKWARD else stage.half
                is_computed = is_again and action.stage not in self._offloaded
                begins_again = is_computed and not self._changes.is_begun(action)
                return max(own, stage.rerun) if begins_again else own
            case Kind.RECOMPUTE:
                return 0.0 if action.stage in self._offloaded else stage.rerun
            case Kind.WEIGHT_GRAD:
                return stage.weights

    def of_loss(self, action: Action) -> float:
        """The bytes, beyond what is kept until then, of the loss's backward, with which a backward
        of the last stage begins. It comes ahead of all else, so also of a recomputation."""
        if action.stage in self._offloaded:
            begins = action.kind.begins_backward
        else:
            is_backward = action.kind.begins_backward and not self._changes.is_begun(action)
            begins = is_backward or action.kind is Kind.RECOMPUTE
        return self._loss if begins and self._is_last(action) else 0.0

    def _is_last(self, action: Action) -> bool:
        return action.stage == len(self._stages) - 1


class _Waiting:
    """The results that wait on a lane's device. ``launched`` says when each action is launched."""

    def __init__(
        self,
        world: World,
        changes: MemoryChanges,
        running: WhileRunning,
        launched: Mapping[Action, _Launch],
    ) -> None:
        self._world, self._launched, self._changes = world, launched, changes
        self._kept, self._views = running.kept_results, running.views
        # Which launch takes each result, its bytes, and how many more the memory has that it is in.
        self._results: list[tuple[_Launch, float, float]] = []

    def at(self, action: Action) -> float:
        """The bytes of all that waits while an action runs, of those that earlier ones have left.
        A gradient that the action itself takes, from its own lane, is part of what it needs, but
        not the rest of the memory that the gradient is in."""
        now = self._launched.get(action, _Launch(0.0, 0.0, -1, -1))
        own = sum(more for taken, _, more in self._results if taken == now)
        self._results = [each for each in self._results if each[0].comes_after(now)]
        return own + sum(size + more for _, size, more in self._results)

    def leave(self, action: Action) -> None:
        """Note the results that an action leaves for others."""
        is_kept = action.kind is Kind.FORWARD and not self._changes.is_again(action)
        for user in _users(action, self._world):
            if (taken := self._launched.get(user)) is not None:
                size = self._world.bytes_between(action.stage, user.stage)
                if is_kept:
                    size -= self._kept.get((action.stage, user.stage), 0.0)
                more = 0.0
                if action.kind is not Kind.FORWARD:
                    more = self._views.get((action.stage, user.stage), 0.0)
                self._results.append((taken, size, more))


@dataclass(frozen=True)
class _Launch:
    """When a lane's thread takes the inputs of an action, when it launches the action, the action's
    position in its lane, and whether it comes right behind a reload."""

    taken: float
    time: float
    lane: int
    position: int
    is_behind_reload: bool = False

    def comes_after(self, other: _Launch) -> bool:
        """Whether the inputs of this action are taken after the other one is launched. A lane may
        launch several actions at the same time, one after the other. What other lanes take at that
        time is gone, but if they begin to reload something first, tensor by tensor."""
        if self.lane == other.lane:
            return self.position > other.position
        return self.taken > other.time or (self.is_behind_reload and self.taken == other.time)


def _users(action: Action, world: World) -> Iterator[Action]:
    """The actions that may use the result of an action: a backward may be whole, or in halves."""
    if action.kind is Kind.FORWARD:
        for stage in world.after[action.stage]:
            yield Action(stage, Kind.FORWARD, action.microbatch)
    elif action.kind.begins_backward:
        for stage in world.before[action.stage]:
            for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
                yield Action(stage, kind, action.microbatch)


def _launches(spans: Iterable[Span], world: World) -> dict[Action, _Launch]:
    """When the threads of lanes launch the actions."""
    crossings = [_crossings(stage, world) for stage in range(len(world.placement))]
    found: dict[Action, _Launch] = {}
    threads: defaultdict[int, _Thread] = defaultdict(_Thread)
    needed: dict[Action, float] = {}  # when the last of an action's inputs is sent
    for span, action in sorted(_actions(spans), key=lambda pair: (pair[0].start, pair[0].end)):
        thread, (received, sent) = threads[span.lane], crossings[action.stage][action.kind]
        taken = thread.now = max(thread.now, needed.pop(action, 0.0))
        thread.cross(received)
        behind = thread.reloads
        found[action] = _Launch(taken, thread.now, span.lane, thread.launched, behind)
        thread.launched, thread.computed = thread.launched + 1, span.end
        is_offloaded = world.costs[action.stage].offloaded > 0
        thread.reloads = is_offloaded and action.kind is Kind.RECOMPUTE
        thread.cross(sent)
        for user in _users(action, world):
            needed[user] = max(thread.now, needed.get(user, 0.0))
    return found


def _crossings(stage: int, world: World) -> dict[Kind, tuple[int, int]]:
    """How often values cross to the stream on which an action of a stage is computed, and from it,
    by the kind of the action: once for each stage in another lane. The first stage receives from
    the caller, and so does the loss."""
    last = len(world.placement) - 1
    before, after = (
        sum(world.placement[other] != world.placement[stage] for other in others)
        for others in (world.before[stage], world.after[stage])
    )

    def of(kind: Kind) -> tuple[int, int]:
        if kind is Kind.FORWARD:
            return before + (stage == 0), after + (stage == last)
        return (after, before) if kind.begins_backward else (0, 0)

    return {kind: of(kind) for kind in Kind}


@dataclass
class _Thread:
    """A lane's thread of the host: when it is, how much it has launched, until when the lane's
    device computes all that, whether the last of it is a reload, and until when the device computes
    what came ahead of each crossing so far."""

    now: float = 0.0
    launched: int = 0
    computed: float = 0.0
    reloads: bool = False
    ends: list[float] = field(default_factory=list)

    def cross(self, times: int) -> None:
        """Let values cross, and wait for the crossing ``AHEAD`` before."""
        for _ in range(times):
            self.ends.append(self.computed)
            if len(self.ends) > AHEAD:
                self.now = max(self.now, self.ends[-1 - AHEAD])
