"""Two halves of a backward that follow each other are joined to a whole one where no other lane
gains by two.

::

    lane 0    0F0 0F1 0I0 0W0 0F2        lane 0    0F0 0F1 0B0 0F2
    lane 1    1F0 1I0 1F1 1I1 1W0   ==>  lane 1    1F0 1I0 1F1 1I1 1W0

A backward has halves so that another lane gets its gradient early. A whole backward takes less time
than its halves, since it needs fewer calls of the autograd engine.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from fxpipe.schedule.actions import Action, Entry, Kind
from fxpipe.schedule.schedule import Edges, Schedule
from fxpipe.schedule.validator import validate

_HALVES = (Kind.BACKWARD_INPUT, Kind.WEIGHT_GRAD)


def joined(schedule: Schedule, edges: Edges) -> Schedule:
    """The schedule with whole backwards where no other lane waits for the first half. It gives the
    same gradients, to the bit. ``edges`` are those of the stage graph.

    Raises :class:`fxpipe.schedule.ScheduleError` for a schedule that cannot run. The schedule is
    checked before halves are joined, so that the message names positions in the given one.
    """
    validate(schedule, edges=edges)
    lane_of = schedule.placement
    awaited = {target for source, target in edges if lane_of[source] != lane_of[target]}
    return joined_at(schedule, set(range(schedule.stages)) - awaited)


def joined_at(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """The schedule with whole backwards at these stages, wherever the two halves of a backward
    follow each other."""
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
