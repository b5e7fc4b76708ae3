"""Moves: the changes of a schedule that the search tries, to make a step shorter.

::

    lane 0    0F0 0F1 0F2  .   .  0B0 0B1          a later action moves into the idle time,
    lane 1     .  1F0 1F1 1B0 1B1                  or 1B0, for which the lane waits, moves ahead
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from fxpipe.schedule.actions import Action
from fxpipe.schedule.recomputation import without_needless
from fxpipe.schedule.schedule import Needs, Schedule
from fxpipe.schedule.timeline import Timeline


@dataclass(frozen=True)
class Move:
    """A lane, the position of an action in it, and the position that the action moves to."""

    lane: int
    source: int
    target: int


def moves(schedule: Schedule, timeline: Timeline, needs: Needs) -> Iterator[Move]:
    """Moves that may shorten an idle time of a lane: a later action of the lane moves into it, or
    the action for which the lane waits moves to an earlier position."""
    lines = [list(schedule.actions(lane)) for lane in range(len(schedule.lanes))]
    places = {action: (lane, i) for lane, line in enumerate(lines) for i, action in enumerate(line)}
    ends = {span.action: span.end for span in timeline.spans}
    gaps = _gaps(timeline, {action: position for action, (_, position) in places.items()})
    for _, lane, position in sorted(gaps, key=lambda gap: (-gap[0], *gap[1:])):
        line = lines[lane]
        seen = {(line[position].stage, line[position].kind)}
        for later in range(position + 1, len(line)):
            action = line[later]
            if (action.stage, action.kind) not in seen:
                seen.add((action.stage, action.kind))
                yield Move(lane, later, position)
        late = max(needs.of(line[position]), key=lambda need: ends[need], default=None)
        if late is not None:
            other, i = places[late]
            for earlier in range(i - 1, max(i - 4, -1), -1):
                yield Move(other, i, earlier)


def moved(schedule: Schedule, move: Move) -> Schedule:
    """The schedule after a move. A backward that overtakes its recomputation takes it along."""
    line = list(schedule.actions(move.lane))
    line.insert(move.target, line.pop(move.source))
    lanes = list(schedule.lanes)
    lanes[move.lane] = tuple(without_needless(line))
    return replace(schedule, lanes=tuple(lanes))


def _gaps(timeline: Timeline, positions: Mapping[Action, int]) -> Iterator[tuple[float, int, int]]:
    """The idle times of lanes: their seconds, the lane, and the position of the action that follows
    the idle time. If that is a recomputation that the schedule does not have, it is the position of
    the backward behind it."""
    for lane in range(len(timeline.lanes)):
        own = timeline.of_lane(lane)
        for i in range(1, len(own)):
            idle = own[i].start - own[i - 1].end
            if idle > 1e-9 * timeline.makespan:
                behind = (span.action for span in own[i:] if span.action is not None)
                yield idle, lane, next(positions[a] for a in behind if a in positions)
