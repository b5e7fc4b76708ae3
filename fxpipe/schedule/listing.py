"""List scheduling: of the actions that are ready, a free lane takes the one that a rule prefers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from fxpipe.schedule.actions import Action, Kind
from fxpipe.schedule.problem import SLACK, SchedulingProblem
from fxpipe.schedule.schedule import Schedule
from fxpipe.schedule.simulator import Run


@dataclass(frozen=True)
class Rule:
    """A rule by which a free lane chooses among the actions that are ready.

    Attributes:
        room: the most that each lane may keep.
        forward_first: whether forwards go before backwards, as long as there is room for them.
        deep_first: whether a forward of a later stage goes before one of an earlier stage.
        patience: a lane waits for an action that it prefers and that is about to become ready, if
            the wait is shorter than this fraction of the action that it could do now.
        halves: whether backwards are in halves; then a lane does weight gradients when it can do
            nothing else.
    """

    room: tuple[float, ...]
    forward_first: bool
    deep_first: bool
    patience: float
    halves: bool


def rules(problem: SchedulingProblem) -> Iterator[Rule]:
    """The rules to try: first those that keep little, last those that may use all the room."""
    several = any(len(own) > 1 for own in problem.own)
    costs = problem.world.costs
    is_split_dear = any(c.seconds(Kind.BACKWARD) < c.halves for c in costs)
    halves = [True, False] if is_split_dear else [True]
    for room, forward, deep, patience, halved in product(
        _rooms(problem),
        (True, False),
        (True, False) if several else (True,),
        (0.0, 0.5, 1.0),
        halves,
    ):
        yield Rule(room, forward, deep, patience, halved)


def _rooms(problem: SchedulingProblem) -> list[tuple[float, ...]]:
    whole = [problem.largest(own) for own in problem.own]
    more = [_kept_of(problem, own) for own in problem.own]
    lanes = range(problem.lanes)
    found = []
    for microbatches in (
        [problem.lanes - lane for lane in lanes],  # as 1F1B
        [problem.lanes for _ in lanes],  # as ZB-H1 and ZB-V
        [2 * problem.lanes - 1 for _ in lanes],  # as ZB-H2
    ):
        room = [
            size + each * (count - 1)
            for size, each, count in zip(whole, more, microbatches, strict=True)
        ]
        found.append(tuple(map(min, room, problem.room)))
    found.append(problem.room)
    return list(dict.fromkeys(found))


def _kept_of(problem: SchedulingProblem, stages: Sequence[int]) -> float:
    """The bytes that a lane keeps of the first micro-batch between its forwards and its
    backwards."""
    return sum(sum(problem.changes.of(Action(stage, Kind.FORWARD, 0))) for stage in stages)


def list_schedule(problem: SchedulingProblem, rule: Rule) -> Schedule | None:
    """Simulate a step in which each free lane does what the rule prefers; return its order.

    None if all lanes get stuck. That may happen if only some micro-batches are checkpointed: those
    that a lane has begun may leave no room to recompute any of them.
    """
    lister = _Lister(problem, rule)
    run = Run(problem.world, problem.lanes, problem.microbatches, lister.choose)
    run.to_the_end()
    lanes: list[list[Action]] = [[] for _ in range(problem.lanes)]
    for span in run.spans:
        if span.action is not None:
            lanes[span.lane].append(span.action)
    stages = len(problem.world.placement)
    if min(lister.backwards) < problem.microbatches or any(lister.owed):
        return None
    return Schedule("auto", stages, problem.microbatches, tuple(map(tuple, lanes)))


class _Lister:
    """The state of list scheduling: which micro-batch is next at each stage, and how much each lane
    keeps."""

    def __init__(self, problem: SchedulingProblem, rule: Rule) -> None:
        self.problem, self.rule = problem, rule
        stages = len(problem.world.placement)
        self.forwards = [0] * stages
        self.backwards = [0] * stages
        self.owed: list[deque[int]] = [deque() for _ in range(stages)]
        self.kept = [0.0] * problem.lanes
        # For each lane, how many forwards have only kept their inputs and wait for recomputation.
        self.checkpointed = [0] * problem.lanes
        # For each lane, the inputs under way to it: when they arrive, at which stage, and whether a
        # forward needs them.
        self.coming: list[list[tuple[float, int, bool]]] = [[] for _ in range(problem.lanes)]
        # A lane begins a micro-batch only if there is room for it at the lane's later stages too
        # (``later``), and to recompute one (``again``). Otherwise the micro-batches that a lane has
        # begun could fill its room, and none could be finished.
        self.later = [
            {
                kind: problem.alone([other for other in problem.own[lane] if other > stage], i)
                for kind, i in problem.kinds.items()
            }
            for stage, lane in enumerate(problem.world.placement)
        ]
        self.again = [
            max(problem.changes.of(Action(stage, Kind.BACKWARD, 0))[0] for stage in own)
            for own in problem.own
        ]

    def choose(self, run: Run, lane: int) -> Action | None:
        ready = [action for action in self._next(lane) if run.is_ready(action)]
        if not ready:
            return None
        best = min(ready, key=lambda action: self._rank(action.kind, action.stage))
        if self._waits(run, lane, best):
            return None
        self._take(run, lane, best)
        return best

    def _next(self, lane: int) -> Iterator[Action]:
        for stage in self.problem.own[lane]:
            forward, backward = self.forwards[stage], self.backwards[stage]
            if forward < self.problem.microbatches and self._has_room(lane, stage):
                yield Action(stage, Kind.FORWARD, forward)
            if backward < forward:
                is_halved = self.rule.halves and self.problem.is_halved(stage)
                kind = Kind.BACKWARD_INPUT if is_halved else Kind.BACKWARD
                if self._fits(lane, self.problem.changes.of(Action(stage, kind, backward))[0]):
                    yield Action(stage, kind, backward)
            if self.owed[stage]:
                yield Action(stage, Kind.WEIGHT_GRAD, self.owed[stage][0])

    def _has_room(self, lane: int, stage: int) -> bool:
        """Whether there is room to begin the next micro-batch of a stage."""
        forward = Action(stage, Kind.FORWARD, self.forwards[stage])
        then = self.later[stage][self.problem.kind(forward.microbatch)]
        is_again = self.problem.is_checkpointed(stage, forward.microbatch)
        if is_again or self.checkpointed[lane]:
            then = max(then, self.again[lane])
        return self._fits(lane, self.problem.changes.of(forward)[0] + then)

    def _fits(self, lane: int, more: float) -> bool:
        return self.kept[lane] + more <= self.rule.room[lane] * SLACK

    def _rank(self, kind: Kind, stage: int) -> tuple[int, int]:
        """The rank of an action: of those that are ready, a lane takes the one of lowest rank."""
        if kind is Kind.WEIGHT_GRAD:
            return 2, -stage
        if kind is Kind.FORWARD:
            return 1 - self.rule.forward_first, -stage if self.rule.deep_first else stage
        return int(self.rule.forward_first), -stage

    def _waits(self, run: Run, lane: int, best: Action) -> bool:
        """Whether the lane waits, since an action of lower rank becomes ready within the rule's
        patience."""
        self.coming[lane] = [known for known in self.coming[lane] if known[0] > run.now]
        latest = run.now + self.rule.patience * self.problem.world.seconds(best.stage, best.kind)
        rank = self._rank(best.kind, best.stage)
        return any(
            time < latest
            and self._rank(Kind.FORWARD if is_forward else Kind.BACKWARD, stage) < rank
            and (not is_forward or self._has_room(lane, stage))
            for time, stage, is_forward in self.coming[lane]
        )

    def _take(self, run: Run, lane: int, action: Action) -> None:
        stage, world = action.stage, self.problem.world
        self.kept[lane] += sum(self.problem.changes.of(action))
        if self.problem.is_checkpointed(stage, action.microbatch):
            is_last = action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD)
            self.checkpointed[lane] += (action.kind is Kind.FORWARD) - is_last
        if action.kind is Kind.WEIGHT_GRAD:
            self.owed[stage].popleft()
            return
        is_forward = action.kind is Kind.FORWARD
        if is_forward:
            self.forwards[stage] += 1
        else:
            self.backwards[stage] += 1
        if action.kind is Kind.BACKWARD_INPUT:
            self.owed[stage].append(action.microbatch)
        end = run.now + run.seconds(action)
        for target in world.after[stage] if is_forward else world.before[stage]:
            known = end + world.travel(stage, target), target, is_forward
            self.coming[world.placement[target]].append(known)
