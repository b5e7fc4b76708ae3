"""The exact search, for small cases: branch and bound over active schedules.

In an active schedule no action can be done earlier without delaying another one, and one of the
best schedules is active (Giffler and Thompson 1960). To list active schedules: of all actions that
can be next, take the one that can end first; the next action on its lane is one that could begin
before that end. Where the memory of lanes is bounded, an action that takes some of it, such as a
forward or a recomputation, may also be put off until the lane has done another action. A branch is
cut off if it cannot beat the best schedule so far, or if another branch has done the same actions
no later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from fxpipe.schedule.actions import Action, Kind
from fxpipe.schedule.memory import MemoryChanges
from fxpipe.schedule.problem import SLACK, SchedulingProblem
from fxpipe.schedule.recomputation import without_needless
from fxpipe.schedule.schedule import Schedule

_T = TypeVar("_T")


def shorter(problem: SchedulingProblem, than: float, nodes: int) -> tuple[Schedule | None, bool]:
    """The shortest schedule, or None if none is shorter than ``than`` seconds; and whether the
    search has ruled out all shorter ones.

    No copy waits for another one's link here. Every stage takes the micro-batches in their order.
    If only some micro-batches are checkpointed, they are not alike, and so another order might be
    shorter: then the second result is False, unless memory is not bounded and recomputations take
    no time.

    Args:
        nodes: how many beginnings of schedules to look at before giving up.
    """
    search = _BranchAndBound(problem, than, nodes)
    search.go(_beginning(problem))
    return search.found, search.nodes > 0 and problem.is_order_free


@dataclass(frozen=True)
class _PartialSchedule:
    """The beginning of a schedule.

    Attributes:
        orders: the actions of each lane so far.
        free: the time at which each lane has done them.
        kept: what each lane keeps at that time.
        forwards: for each stage, the times at which the forwards of micro-batches ended.
        inputs: for each stage, the times at which gradients of its inputs were computed.
        again: for each stage, how many micro-batches have been recomputed.
        owed: for each stage, the micro-batches whose weight gradients are still to be computed.
        off: the stages, with a kind of action, whose next action of that kind is put off.
    """

    orders: tuple[tuple[Action, ...], ...]
    free: tuple[float, ...]
    kept: tuple[float, ...]
    forwards: tuple[tuple[float, ...], ...]
    inputs: tuple[tuple[float, ...], ...]
    again: tuple[int, ...]
    owed: tuple[tuple[int, ...], ...]
    off: frozenset[tuple[int, Kind]] = frozenset()


def _beginning(problem: SchedulingProblem) -> _PartialSchedule:
    lanes, stages = problem.lanes, len(problem.world.placement)
    zeros, nothing = (0.0,) * lanes, ((),) * stages
    none = (0,) * stages
    return _PartialSchedule(((),) * lanes, zeros, zeros, nothing, nothing, none, nothing)


@dataclass(frozen=True)
class _Option:
    """An action that can be next on its lane. ``after`` is the least time from the action's end to
    the end of the step. A backward whose recomputation runs right ahead of it starts with that."""

    action: Action
    lane: int
    start: float
    end: float
    after: float


class _Next(NamedTuple):
    """What can be next at a stage: ``ready`` is when its inputs are there, ``again`` the seconds of
    the recomputation that it starts with, and ``after`` as for :class:`_Option`."""

    kind: Kind
    microbatch: int
    ready: float
    after: float
    again: float = 0.0


class _BranchAndBound:
    def __init__(self, problem: SchedulingProblem, than: float, nodes: int) -> None:
        self.problem, self.world, self.best, self.nodes = problem, problem.world, than, nodes
        cells = {(s, i) for s, count in enumerate(problem.movable) for i in range(count)}
        self.changes = MemoryChanges(problem.memory, len(self.world.placement), cells)
        self.found: Schedule | None = None
        self._seen: dict[object, list[tuple[float, ...]]] = {}

    def go(self, state: _PartialSchedule) -> None:
        if self.nodes == 0:
            return
        self.nodes -= 1
        options = self._options(state)
        if self._least(state, options) * SLACK >= self.best or self._is_seen(state):
            return
        if not options:
            self._finish(state)
            return
        first = min(options, key=lambda option: (option.end, option.lane))
        rivals = [
            option
            for option in options
            if option.lane == first.lane and (option.start < first.end or option is first)
        ]
        for option in sorted(rivals, key=lambda option: (-option.after, option.start)):
            self.go(self._done(state, option))
        takes_room = sum(self.changes.of(first.action)) > 0
        if takes_room and math.isfinite(self.problem.room[first.lane]):
            self.go(replace(state, off=state.off | {(first.action.stage, first.action.kind)}))

    def _finish(self, state: _PartialSchedule) -> None:
        if any(len(ends) < self.problem.microbatches for ends in state.inputs):
            return  # some actions have been put off, and there is no room for any of them
        stages = len(self.world.placement)
        self.best = max(state.free)
        lanes = tuple(tuple(without_needless(order)) for order in state.orders)
        self.found = Schedule("auto", stages, self.problem.microbatches, lanes)

    # ----------------------------------------------------------------------------- what can be next

    def _options(self, state: _PartialSchedule) -> list[_Option]:
        found = []
        for stage, lane in enumerate(self.world.placement):
            for what in (
                *self._forward(state, stage),
                *self._recomputation(state, stage),
                *self._backward(state, stage),
                *(_Next(Kind.WEIGHT_GRAD, i, 0.0, 0.0) for i in state.owed[stage][:1]),
            ):
                action = Action(stage, what.kind, what.microbatch)
                if (stage, what.kind) in state.off or not self._has_room(state, lane, action):
                    continue
                begin = max(what.ready, state.free[lane] + what.again)
                end = begin + self.world.seconds(stage, what.kind)
                start = state.free[lane] if what.again else begin
                found.append(_Option(action, lane, start, end, what.after))
        return found

    def _has_room(self, state: _PartialSchedule, lane: int, action: Action) -> bool:
        more = self.changes.of(action)[0]
        return not more or state.kept[lane] + more <= self.problem.room[lane] * SLACK

    def _forward(self, state: _PartialSchedule, stage: int) -> list[_Next]:
        sources, i = self.world.before[stage], len(state.forwards[stage])
        if i == self.problem.microbatches or any(len(state.forwards[s]) <= i for s in sources):
            return []
        ways = [state.forwards[s][i] + self.world.travel(s, stage) for s in sources]
        ready = max(ways, default=0.0)
        return [_Next(Kind.FORWARD, i, ready, self.problem.after_forward[stage])]

    def _recomputation(self, state: _PartialSchedule, stage: int) -> list[_Next]:
        i = state.again[stage]
        if i >= min(self.problem.movable[stage], len(state.forwards[stage])):
            return []
        return [_Next(Kind.RECOMPUTE, i, 0.0, self.problem.after_recomputation[stage])]

    def _backward(self, state: _PartialSchedule, stage: int) -> list[_Next]:
        targets, i = self.world.after[stage], len(state.inputs[stage])
        if len(state.forwards[stage]) <= i or any(len(state.inputs[t]) <= i for t in targets):
            return []
        seconds, again = {kind: self.world.seconds(stage, kind) for kind in Kind}, 0.0
        if state.again[stage] <= i < self.problem.recomputed[stage]:
            if i < self.problem.movable[stage]:
                return []
            again = seconds[Kind.RECOMPUTE]
        ready = max([0.0, *(state.inputs[t][i] + self.world.travel(t, stage) for t in targets)])
        both = seconds[Kind.BACKWARD_INPUT] + seconds[Kind.WEIGHT_GRAD]
        found = []
        if self.problem.is_halved(stage):
            after = max(self.problem.after_gradient[stage], seconds[Kind.WEIGHT_GRAD])
            found.append(_Next(Kind.BACKWARD_INPUT, i, ready, after, again))
        if not found or seconds[Kind.BACKWARD] < both:
            found.append(_Next(Kind.BACKWARD, i, ready, self.problem.after_gradient[stage], again))
        return found

    def _done(self, state: _PartialSchedule, option: _Option) -> _PartialSchedule:
        action, lane = option.action, option.lane
        stage, kind = action.stage, action.kind
        done = replace(
            state,
            orders=_put(state.orders, lane, (*state.orders[lane], action)),
            free=_put(state.free, lane, option.end),
            kept=_put(state.kept, lane, state.kept[lane] + sum(self.changes.of(action))),
            off=frozenset(each for each in state.off if self.world.placement[each[0]] != lane),
        )
        if kind is Kind.FORWARD:
            ends = (*state.forwards[stage], option.end)
            return replace(done, forwards=_put(state.forwards, stage, ends))
        if kind is Kind.RECOMPUTE:
            return replace(done, again=_put(state.again, stage, state.again[stage] + 1))
        if kind is Kind.WEIGHT_GRAD:
            return replace(done, owed=_put(state.owed, stage, state.owed[stage][1:]))
        ends = (*state.inputs[stage], option.end)
        again = _put(state.again, stage, max(state.again[stage], len(ends)))
        done = replace(done, inputs=_put(state.inputs, stage, ends), again=again)
        if kind is Kind.BACKWARD:
            return done
        owed = (*state.owed[stage], action.microbatch)
        return replace(done, owed=_put(state.owed, stage, owed))

    # ----------------------------------------------------------------------------- what can be left

    def _least(self, state: _PartialSchedule, options: list[_Option]) -> float:
        """A lower bound on the step with any schedule that begins like this."""
        ways: dict[tuple[int, Kind], float] = {}
        for option in options:  # a backward may be whole or in halves: the bound is the smaller one
            action = option.action
            key = action.stage, Kind.BACKWARD if action.kind.begins_backward else action.kind
            if action.kind is not Kind.WEIGHT_GRAD:
                ways[key] = min(option.end + option.after, ways.get(key, math.inf))
        lanes = map(sum, zip(state.free, self._work(state), strict=True))
        return max([*ways.values(), *lanes])

    def _work(self, state: _PartialSchedule) -> list[float]:
        """For each lane, the fewest seconds of work that it still has to do."""
        count, seconds = self.problem.microbatches, self.world.seconds
        return [
            sum(
                (count - len(state.forwards[s])) * seconds(s, Kind.FORWARD)
                + (count - len(state.inputs[s])) * self.problem.backward(s)
                + max(0, self.problem.recomputed[s] - state.again[s]) * seconds(s, Kind.RECOMPUTE)
                + len(state.owed[s]) * seconds(s, Kind.WEIGHT_GRAD)
                for s in own
            )
            for own in self.problem.own
        ]

    def _is_seen(self, state: _PartialSchedule) -> bool:
        """Whether another beginning has done the same actions, and none of them later."""
        counts = tuple(map(len, (*state.forwards, *state.inputs)))
        times = (
            *state.free,
            *_awaited(state.forwards, self.world.after),
            *_awaited(state.inputs, self.world.before),
        )
        known = self._seen.setdefault((counts, state.again, state.owed, state.off), [])
        if any(all(a <= b for a, b in zip(old, times, strict=True)) for old in known):
            return True
        known.append(times)
        return False


def _awaited(ends: tuple[tuple[float, ...], ...], targets: list[list[int]]) -> list[float]:
    """The times among ``ends`` (of actions, by stage and micro-batch) that still matter: those of
    actions whose result some stage in ``targets`` has not used yet."""
    found: list[float] = []
    for own, others in zip(ends, targets, strict=True):
        found += own[min((len(ends[other]) for other in others), default=len(own)) :]
    return found


def _put(items: tuple[_T, ...], index: int, value: _T) -> tuple[_T, ...]:
    return (*items[:index], value, *items[index + 1 :])
