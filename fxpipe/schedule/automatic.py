"""``schedule="auto"``: the search for the schedule with the smallest makespan.

The search starts from the named schedules and from list scheduling by many rules, and places
recomputations of checkpointed micro-batches in their idle time (:mod:`fxpipe.schedule.placing`). It
looks through all schedules if they are few, and improves the best one by moving actions into idle
time.

Micro-batches are alike, so one of the best schedules takes them in their order at every stage:
forwards, backwards, and weight gradients. So the search only decides, for each lane, in which order
the actions of its stages take turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from fxpipe.schedule.actions import Entry, Kind
from fxpipe.schedule.bounds import Bound, spread
from fxpipe.schedule.catalogue import NAMES, named
from fxpipe.schedule.exact import shorter
from fxpipe.schedule.halves import joined, joined_at
from fxpipe.schedule.listing import list_schedule, rules
from fxpipe.schedule.memory import Memory
from fxpipe.schedule.moves import moved, moves
from fxpipe.schedule.placing import filled, placed
from fxpipe.schedule.problem import SLACK, NoRoom, SchedulingProblem, there_and_back
from fxpipe.schedule.schedule import Needs, Schedule
from fxpipe.schedule.simulator import play
from fxpipe.schedule.timeline import Timeline
from fxpipe.schedule.world import Links, StageCost, World

_FEW = 200
"""The search looks through all schedules if there are no more actions than this."""
_NODES = 100
"""To look at so many beginnings of schedules counts as much effort as one simulation."""


@dataclass(frozen=True)
class Found:
    """The result of :func:`search`.

    Attributes:
        schedule: the best schedule.
        timeline: the step in time, as the simulator predicts it for this schedule.
        bound: a lower bound, in seconds, on the step with any schedule of this placement.
        is_optimal: whether it is proven that no schedule of this placement is shorter.
    """

    schedule: Schedule
    timeline: Timeline
    bound: float
    is_optimal: bool


def auto(
    costs: Sequence[StageCost],
    lanes: int,
    microbatches: int,
    *,
    placement: Sequence[int] | None = None,
    links: Links | None = None,
    memory: Memory | None = None,
    max_bytes: Bound | None = None,
    effort: int = 200,
    moves_recomputations: bool = True,
) -> Schedule:
    """The schedule that :func:`search` finds; the arguments are the same."""
    return search(
        costs,
        lanes,
        microbatches,
        placement=placement,
        links=links,
        memory=memory,
        max_bytes=max_bytes,
        effort=effort,
        moves_recomputations=moves_recomputations,
    ).schedule


def search(
    costs: Sequence[StageCost],
    lanes: int,
    microbatches: int,
    *,
    placement: Sequence[int] | None = None,
    links: Links | None = None,
    memory: Memory | None = None,
    max_bytes: Bound | None = None,
    effort: int = 200,
    moves_recomputations: bool = True,
) -> Found:
    """Search for the schedule with the smallest makespan in the simulator.

    Of schedules with equal makespan it takes the one whose lanes idle least between their first and
    their last action, since in a long run steps overlap outside of that time. Of these it takes the
    one that keeps the fewest bytes. The result is never longer than a named schedule that has this
    placement and keeps within ``max_bytes``. The same arguments give the same schedule.

    Args:
        costs: the cost of each stage. A stage whose ``weight_grad`` is 0 has whole backwards.
        lanes: the number of lanes.
        microbatches: the number of micro-batches in a step.
        placement: the lane of each stage. None: the search tries three placements: stages go down
            the lanes and up again (a V), around the lanes in a loop, or neighbours share a lane.
        links: how data travels between stages, as :func:`fxpipe.schedule.simulate` takes it.
        memory: the bytes that stages keep; only ``max_bytes`` needs it.
        max_bytes: the most bytes that a lane may hold, with ``memory.fixed``: one number for all
            lanes, or one for each.
        effort: how many schedules to simulate to improve the best one. If there are few actions, a
            search through all schedules takes about as much time again.
        moves_recomputations: whether checkpointed micro-batches may be recomputed anywhere ahead of
            their backward. Only lanes for which ``max_bytes`` has a bound do so: who checkpoints
            wants to save memory, and without a bound nobody knows how much there is to spare.
            False: right ahead of it, as where a stage is recomputed in segments.

    Raises:
        ValueError: if a number is too small, or if the arguments disagree on how many stages or
            lanes there are.
        NoRoom: if no schedule keeps within ``max_bytes``. It is a ValueError.
    """
    for what, count, least in (
        ("lanes", lanes, 1),
        ("microbatches", microbatches, 1),
        ("effort", effort, 0),
    ):
        if count < least:
            raise ValueError(f"{what} is {count}: give {least} or more")
    if placement is None:
        placements = _placements(len(costs), lanes)
    else:
        placements = [_checked(placement, len(costs), lanes)]
    worlds = [World(each, costs, links or Links()) for each in placements]
    problems = [
        replace(
            _problem(world, lanes, microbatches, memory, max_bytes),
            moves_recomputations=moves_recomputations,
        )
        for world in worlds
    ]
    errors = [problem.misfit() for problem in problems]
    if all(errors):
        raise NoRoom(errors[0])
    best: Found | None = None
    for problem, error in zip(problems, errors, strict=True):
        if error is None and (best is None or _ideal(problem) < _key(best.timeline)):
            found = _found(problem, memory, effort)
            if best is None or _value(problem, found) < _value(problem, best):
                best = found
    assert best is not None
    return best


def _placements(stages: int, lanes: int) -> list[tuple[int, ...]]:
    if stages < lanes:
        raise ValueError(f"costs are of {stages} stages: give {lanes} or more, one for each lane")
    loop = tuple(stage % lanes for stage in range(stages))
    turns = [*range(lanes), *reversed(range(lanes))]
    snake = tuple(turns[stage % (2 * lanes)] for stage in range(stages))
    blocks = tuple(stage * lanes // stages for stage in range(stages))
    return list(dict.fromkeys((snake, loop, blocks)))


def _checked(placement: Sequence[int], stages: int, lanes: int) -> tuple[int, ...]:
    if len(placement) != stages or set(placement) != set(range(lanes)):
        raise ValueError(
            f"placement is {list(placement)}: give the lane of each of {stages} stages, "
            f"and to each of {lanes} lanes, counted from 0, a stage"
        )
    return tuple(placement)


def _problem(
    world: World, lanes: int, microbatches: int, memory: Memory | None, max_bytes: Bound | None
) -> SchedulingProblem:
    stages = len(world.placement)
    if memory is None:
        if max_bytes is not None:
            raise ValueError(
                "max_bytes needs memory=Memory(activations=...): what each stage keeps"
            )
        no_bound = (float("inf"),) * lanes
        return SchedulingProblem(world, lanes, microbatches, Memory((1.0,) * stages), no_bound)
    bounds = spread(
        float("inf") if max_bytes is None else max_bytes, lanes, "max_bytes of each lane"
    )
    fixed = spread(memory.fixed, lanes, "fixed memory of each lane")
    room = tuple(bound - held for bound, held in zip(bounds, fixed, strict=True))
    return SchedulingProblem(world, lanes, microbatches, memory, room)


def _value(problem: SchedulingProblem, found: Found) -> tuple[float, ...]:
    return *_key(found.timeline), sum(problem.kept(found.schedule))


def _key(timeline: Timeline) -> tuple[float, float]:
    """The numbers that the search minimizes: the makespan, and then the sum over lanes of the time
    from a lane's first start to its last end.

    Both are rounded, so that the order in which seconds were added does not matter.
    """
    return _rounded(timeline.makespan), _rounded(sum(timeline.own_spans))


def _ideal(problem: SchedulingProblem) -> tuple[float, float]:
    """A lower bound on :func:`_key`: no step is shorter, and no lane idles between its actions."""
    return _rounded(problem.bound), _rounded(sum(problem.work))


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.9g}")


def _found(problem: SchedulingProblem, memory: Memory | None, effort: int) -> Found:
    """The best schedule for one placement of stages on lanes.

    A first search has recomputations right ahead of their backwards. Where they may be moved, a
    second one starts from what that has found, so that no step is longer for it.
    """
    first = _ScheduleSearch(replace(problem, moves_recomputations=False), memory, effort)
    found = first.found(first.starts())
    if not any(problem.movable):
        return found
    second = _ScheduleSearch(problem, memory, effort)
    return second.found(second.placed([found.schedule, *first.tried]))


class _ScheduleSearch:
    """The search for one placement of stages on lanes, with the best schedule so far."""

    def __init__(self, problem: SchedulingProblem, memory: Memory | None, effort: int) -> None:
        self.problem, self.memory, self.effort = problem, memory, effort
        self.tried: list[Schedule] = []
        self.best: tuple[Schedule, Timeline] | None = None
        self.value: tuple[float, ...] = ()

    def found(self, starts: Iterable[Schedule]) -> Found:
        """The best schedule to which these lead."""
        problem = self.problem
        for schedule in starts:
            self.tried.append(schedule)
            self._try(schedule)
        if self.best is None:
            self._try(self._one_by_one())
        assert self.best is not None  # one micro-batch after the other always runs, and always fits
        is_optimal = self._look_through()
        while not self._is_perfect() and self._mend():
            pass
        for schedule in self._merged():
            self._try(schedule, or_equal=True)
        schedule, timeline = self.best
        is_optimal = is_optimal or timeline.makespan <= problem.bound * SLACK
        bound = timeline.makespan if is_optimal else problem.bound
        return Found(
            replace(schedule, name="auto"), replace(timeline, name="auto"), bound, is_optimal
        )

    def _try(self, schedule: Schedule, or_equal: bool = False) -> bool:
        """Simulate a schedule, and keep it if it can run and is better than the best so far, or
        with ``or_equal`` as good. Returns whether it is kept."""
        kept = self.problem.kept(schedule)
        if not self.problem.fits(kept):
            return False
        timeline = play(schedule, self.problem.world, self.memory)
        done = {span.action for span in timeline.spans}
        if not all(done.issuperset(schedule.actions(i)) for i in range(self.problem.lanes)):
            return False
        value = *_key(timeline), sum(kept)
        if self.best is not None and (value > self.value or (value == self.value and not or_equal)):
            return False
        self.best, self.value = (schedule, timeline), value
        return True

    def _is_perfect(self) -> bool:
        return self.best is not None and _key(self.best[1]) <= _ideal(self.problem)

    # ------------------------------------------------------------------------------- where to start

    def starts(self) -> Iterator[Schedule]:
        """The named schedules, and those of list scheduling, each order once: many rules lead to
        the same."""
        known = set[tuple[tuple[Entry, ...], ...]]()
        for schedule in chain(self._named(), self._listed()):
            if schedule.lanes not in known:
                known.add(schedule.lanes)
                yield schedule

    def placed(self, schedules: Sequence[Schedule]) -> Iterator[Schedule]:
        """The first of these schedules, and each with recomputations in idle time."""
        yield schedules[0]
        for schedule in schedules:
            if not self._is_perfect():
                yield placed(self.problem, schedule)

    def _named(self) -> Iterator[Schedule]:
        world = self.problem.world
        for name in NAMES:
            try:
                schedule = named(
                    name,
                    lanes=self.problem.lanes,
                    microbatches=self.problem.microbatches,
                    stages=len(world.placement),
                )
            except ValueError:  # no schedule of this name has so many stages or micro-batches
                continue
            if schedule.placement == world.placement:
                yield schedule
                yield joined(schedule, world.edges)  # a pipeline runs it in this form

    def _listed(self) -> Iterator[Schedule]:
        for rule in rules(self.problem):
            if not self._is_perfect():
                schedule = list_schedule(self.problem, rule)
                if schedule is not None:
                    yield schedule

    def _one_by_one(self) -> Schedule:
        """The schedule that needs the least room: each micro-batch goes through all stages, forward
        and backward, before the next one begins."""
        microbatches = self.problem.microbatches
        lanes = tuple(
            tuple(action for i in range(microbatches) for action in there_and_back(own, i))
            for own in self.problem.own
        )
        return Schedule("auto", len(self.problem.world.placement), microbatches, lanes)

    def _look_through(self) -> bool:
        """Look through all schedules, if they are few. True if none is shorter than the best."""
        assert self.best is not None
        problem, world = self.problem, self.problem.world
        actions = 3 * len(world.placement) * problem.microbatches
        makespan = self.best[1].makespan
        if actions > _FEW or makespan <= problem.bound * SLACK:
            return False
        schedule, is_all = shorter(problem, makespan, _NODES * self.effort)
        if schedule is None:
            return is_all
        # The exact search takes copies not to wait for each other. So its result is the shortest
        # if no copy waits in the simulator either.
        return self._try(schedule) and is_all and _no_copy_waits(self.best[1])

    # ------------------------------------------------------------------------------- to improve it

    def _mend(self) -> bool:
        """Move single actions of the best schedule until one move makes it better. False if no move
        does, or if the effort is spent."""
        assert self.best is not None
        schedule, timeline = self.best
        schedule = filled(self.problem, schedule)
        for move in moves(schedule, timeline, Needs(schedule, self.problem.world.edges)):
            if self.effort == 0:
                return False
            self.effort -= 1
            if self._try(moved(schedule, move)):
                return True
        return False

    def _merged(self) -> Iterator[Schedule]:
        """The best schedule with the two halves of a backward joined to a whole one where they
        follow each other, for each stage whose whole backward takes no longer than its halves."""
        assert self.best is not None
        for stage, cost in enumerate(self.problem.world.costs):
            if cost.seconds(Kind.BACKWARD) <= cost.halves * SLACK:
                yield joined_at(self.best[0], {stage})


def _no_copy_waits(timeline: Timeline) -> bool:
    """Whether each copy starts as soon as the action that made its data has ended, so that no copy
    waits for the link."""
    ends = {span.action: span.end for span in timeline.spans}
    return all(
        copy.action is None or copy.start <= ends[copy.action] * SLACK
        for copy in timeline.transfers
    )
