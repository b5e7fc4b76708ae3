"""The check that a schedule can run, and that it keeps within bounds on memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from fxpipe.ir.text import human_bytes
from fxpipe.schedule.actions import Action, Kind
from fxpipe.schedule.bounds import Bound, spread
from fxpipe.schedule.memory import MemoryChanges, counting, held_in_order
from fxpipe.schedule.order import run_order
from fxpipe.schedule.schedule import Edges, Needs, Schedule

_Place = tuple[int, int]
"""A lane, and a position in it."""

_NEEDED = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.WEIGHT_GRAD
"""The kinds of which every micro-batch needs some: recomputations may be left out."""


class ScheduleError(ValueError):
    """A schedule cannot run, or keeps more than a bound allows. The message says where."""


def validate(
    schedule: Schedule,
    max_live: Bound | None = None,
    *,
    max_live_in_lane: Bound | None = None,
    activation_bytes: Sequence[float] | None = None,
    max_bytes: Bound | None = None,
    released_by_input: float = 0.0,
    edges: Edges | None = None,
) -> None:
    """Refuse a schedule that cannot run, or that keeps more than a bound allows. Each bound is one
    number for all stages (or lanes), or one for each.

    Args:
        max_live: the most micro-batches that may be alive at a stage.
        max_live_in_lane: the most micro-batches that may be alive in a lane, which counts a
            micro-batch once for each of its stages that keeps activations of it.
        activation_bytes: the bytes that each stage keeps of a micro-batch.
        max_bytes: the most bytes of activations that a lane may hold.
        released_by_input: the fraction of a micro-batch's activations that the input half of its
            backward frees, as for :func:`live`.
        edges: the edges of the stage graph. None: each stage sends to the next one only.

    Raises:
        ScheduleError: if an action is missing or comes twice; if its stage or micro-batch does not
            exist; if a stage is in two lanes; if lanes wait for each other in a circle; or if a
            bound is exceeded. The message says where, by lane and position, both counted from 0.
        ValueError: if ``max_bytes`` is given without ``activation_bytes``.
    """
    _check(schedule, None if edges is None else tuple((source, target) for source, target in edges))
    if max_bytes is not None and activation_bytes is None:
        raise ValueError("max_bytes needs activation_bytes: what each stage keeps of a micro-batch")
    bounds = (
        (max_live, None, "stage"),
        (max_live_in_lane, None, "lane"),
        (max_bytes, activation_bytes, "lane"),
    )
    for bound, weights, of in bounds:
        if bound is not None:
            _check_bound(schedule, bound, weights, released_by_input, of)


@lru_cache(maxsize=128)  # a search simulates the same schedule with many costs
def _check(schedule: Schedule, edges: tuple[tuple[int, int], ...] | None) -> None:
    """Raise ScheduleError for a schedule that lacks an action or in which lanes wait forever."""
    _check_complete(schedule, _places(schedule))
    _check_runs(schedule, Needs(schedule, edges))


# ---------------------------------------------------------------------------- no action is missing


def _places(schedule: Schedule) -> dict[Action, _Place]:
    places: dict[Action, _Place] = {}
    lane_of: dict[int, _Place] = {}
    for lane, entries in enumerate(schedule.lanes):
        for position, entry in enumerate(entries):
            for action in entry.parts:
                here = lane, position
                _check_known(schedule, action, here)
                first = lane_of.setdefault(action.stage, here)
                if first[0] != lane:
                    raise ScheduleError(
                        f"stage {action.stage} is in two lanes: {_at(first)} and {_at(here)} "
                        f"({action}); a stage has one lane"
                    )
                if action in places:
                    raise ScheduleError(
                        f"{action} comes twice: {_at(places[action])} and {_at(here)}"
                    )
                places[action] = here
    return places


def _check_known(schedule: Schedule, action: Action, here: _Place) -> None:
    for what, index, count in (
        ("stage", action.stage, schedule.stages),
        ("micro-batch", action.microbatch, schedule.microbatches),
    ):
        if not 0 <= index < count:
            raise ScheduleError(
                f"{action}, {_at(here)}, is of {what} {index}: "
                f"the schedule has {count}, counted from 0"
            )


def _check_complete(schedule: Schedule, places: dict[Action, _Place]) -> None:
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            forward, whole, first, second = (Action(stage, kind, microbatch) for kind in _NEEDED)
            where = f"stage {stage}, micro-batch {microbatch}"
            if forward not in places:
                raise ScheduleError(f"{where}: the forward {forward} is missing")
            if whole in places:
                for half in (first, second):
                    if half in places:
                        raise ScheduleError(
                            f"{where}: a whole backward {whole}, {_at(places[whole])}, and also "
                            f"{half}, {_at(places[half])}, which is a part of it"
                        )
            elif first not in places and second not in places:
                raise ScheduleError(
                    f"{where}: the backward is missing, {whole} or its halves {first}, {second}"
                )
            for half, other in ((first, second), (second, first)):
                if half in places and other not in places:
                    raise ScheduleError(
                        f"{where}: {half}, {_at(places[half])}, lacks its other half {other}"
                    )


# ---------------------------------------------------------------------------- nothing waits forever


def _check_runs(schedule: Schedule, needs: Needs) -> None:
    """Let every lane advance as far as it can. If some are stuck, the error names the lanes that
    wait for each other in a circle."""
    lanes = [list(schedule.actions(lane)) for lane in range(len(schedule.lanes))]
    done = {action for _, action in run_order(lanes, needs.of)}
    waiting = {
        lane: next(action for action in actions if action not in done)
        for lane, actions in enumerate(lanes)
        if not done.issuperset(actions)
    }
    if waiting:
        raise ScheduleError(_deadlock(schedule, needs, waiting, done))


def _deadlock(
    schedule: Schedule, needs: Needs, waiting: dict[int, Action], done: set[Action]
) -> str:
    places = _places(schedule)
    lane, met, steps = min(waiting), list[int](), []
    while lane not in met:
        met.append(lane)
        need = next(need for need in needs.of(waiting[lane]) if need not in done)
        steps.append(
            f"lane {lane} waits, at position {places[waiting[lane]][1]} ({waiting[lane]}), "
            f"for {need}, which is {_at(places[need])}"
        )
        lane = places[need][0]
    return "deadlock: " + "; ".join(steps[met.index(lane) :])


# ------------------------------------------------------------------------------ bounds


def _check_bound(
    schedule: Schedule,
    bound: Bound,
    weights: Sequence[float] | None,
    released_by_input: float,
    of: str,
) -> None:
    unit, said = ("bytes", human_bytes) if weights is not None else ("micro-batches", _number)
    named = f" {unit}" if weights is None else ""
    size = schedule.stages if of == "stage" else len(schedule.lanes)
    bounds = spread(bound, size, f"the bound on {unit} of each {of}")
    memory = counting(schedule, weights, released_by_input)
    changes = MemoryChanges(memory, schedule.stages)
    for lane in range(len(schedule.lanes)):
        for position, action, at_stage, in_lane in held_in_order(schedule, lane, changes):
            index, amount = (action.stage, at_stage) if of == "stage" else (lane, in_lane)
            if amount > bounds[index] * (1 + 1e-9):
                raise ScheduleError(
                    f"{of} {index} keeps {said(amount)}{named} alive, {_at((lane, position))} "
                    f"({action}): {said(bounds[index])} are allowed"
                )


def _number(count: float) -> str:
    return f"{count:g}"


def _at(place: _Place) -> str:
    return f"at position {place[1]} of lane {place[0]}"
