"""Halves of a backward that follow each other are one, where nothing is gained by two.

::

    lane 0    0F0 0F1 0I0 0W0 0F2        lane 0    0F0 0F1 0B0 0F2
    lane 1    1F0 1I0 1F1 1I1 1W0   ==>  lane 1    1F0 1I0 1F1 1I1 1W0

The first half is there so that another lane has its gradient early. The whole takes less than its
halves, which are more calls of more code.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from fxpipe.schedule.actions import Action, Entry, Kind
from fxpipe.schedule.schedule import Edges, Schedule
from fxpipe.schedule.validator import validate

_HALVES = (Kind.BACKWARD_INPUT, Kind.WEIGHT_GRAD)


def joined(schedule: Schedule, edges: Edges) -> Schedule:
    """The schedule with whole backwards where no other lane waits for the first half.

    It gives the same gradients, to the bit. ``edges``: of the stage graph.

    Raises :class:`fxpipe.schedule.ScheduleError` for a schedule that cannot run, whose places are
    still those that were given.
    """
    validate(schedule, edges=edges)
    lane_of = schedule.placement
    awaited = {target for source, target in edges if lane_of[source] != lane_of[target]}
    return joined_at(schedule, set(range(schedule.stages)) - awaited)


def joined_at(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """The schedule with halves of these stages joined, where they follow each other."""
    lanes = []
    for lane in schedule.lanes:
        line: list[Entry] = []
        for entry in lane:
            first, *others = entry.parts
            halves = [Action(first.stage, kind, first.microbatch) for kind in _HALVES]
            if not others and first.stage in stages and [*line[-1:], first] == halves:
                line[-1] = Action(first.stage, Kind.BACKWARD, first.microbatch)
            else:
                line.append(entry)
        lanes.append(tuple(line))
    return replace(schedule, lanes=tuple(lanes))
