"""Small problems, and all schedules that there are for them."""

from collections.abc import Iterator
from itertools import product

from hypothesis import strategies as st

from fxpipe.schedule import (
    Action,
    Kind,
    Links,
    Memory,
    Schedule,
    StageCost,
    simulate,
    validate,
)
from fxpipe.schedule.problem import SchedulingProblem
from fxpipe.schedule.world import World

UNIT = StageCost(1, 1, 1)


def problem(
    costs, placement=None, microbatches=2, links=None, room=float("inf"), released=0.0, memory=None
):
    """Each stage keeps 1 of a micro-batch, if ``memory`` does not say otherwise; ``room`` is each
    lane's."""
    placement = tuple(range(len(costs))) if placement is None else placement
    lanes, world = 1 + max(placement), World(placement, costs, links or Links())
    memory = memory or Memory((1.0,) * len(costs), released_by_input=released)
    return SchedulingProblem(world, lanes, microbatches, memory, (room,) * lanes)


def costs(stages):
    """Some seconds for each stage; wholes may be dearer or cheaper than two halves."""
    numbers = st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(0, 6))
    one = st.builds(
        lambda n, less: StageCost(*n, backward=None if less is None else n[1] + n[2] - less),
        numbers,
        st.none() | st.just(0.5),
    )
    return st.lists(one, min_size=stages, max_size=stages)


def all_schedules(found: SchedulingProblem) -> Iterator[Schedule]:
    """Every order of every lane, micro-batches in any order, backwards whole or in halves.

    Where the second half takes no time, backwards are whole. Recomputations that may be moved are
    anywhere ahead of their backward.
    """
    stages = len(found.world.placement)
    for lanes in product(*(list(_orders(found, own)) for own in found.own)):
        yield Schedule("one of all", stages, found.microbatches, lanes)


def best(found):
    """The least makespan of all the schedules that there are."""
    links = found.world.links
    return min(
        simulate(schedule, found.world.costs, links).makespan
        for schedule in all_schedules(found)
        if found.fits(found.kept(schedule)) and runs(schedule)
    )


def runs(schedule):
    try:
        validate(schedule)
    except ValueError:
        return False
    return True


def _orders(found, own):
    cells = list(product(own, range(found.microbatches)))
    for halved in product(*((True, False) if found.is_halved(s) else (False,) for s, _ in cells)):
        lines = []
        for (stage, i), is_halved in zip(cells, halved, strict=True):
            second = (Kind.BACKWARD_INPUT, Kind.WEIGHT_GRAD) if is_halved else (Kind.BACKWARD,)
            again = (Kind.RECOMPUTE,) if i < found.movable[stage] else ()
            lines.append(tuple(Action(stage, kind, i) for kind in (Kind.FORWARD, *again, *second)))
        yield from _shuffles(tuple(lines))


def _shuffles(lines):
    if not any(lines):
        yield ()
    for i, line in enumerate(lines):
        if line:
            for rest in _shuffles((*lines[:i], line[1:], *lines[i + 1 :])):
                yield (line[0], *rest)
