"""Placing: recomputations run in idle time ahead of their backward, and so do forwards.

::

    as it is   lane 0   0F0 0F1 0R0  .   .  0B0 0B0 0R1 0B1 0B1      the lane waits for 1B0's
               lane 1    .  1F0 1F1 1B0 1B0 1B1 1B1                  gradient, and has time for 0R1

    placed     lane 0   0F0 0F1 0R0 0R1  .  0B0 0B0 0B1 0B1
               lane 1    .  1F0 1F1 1B0 1B0 1B1 1B1

A recomputation needs no gradient, so that it may be long ahead of its backward. It costs memory,
since its activations are held from there on. So a lane that would wait does the first action behind
in its order that is a recomputation or a forward, that is ready, and for which there is room. The
other actions keep their order, and may begin later if an idle time is shorter than what fills it:
whoever places says whether a step gains by it. What a lane holds follows from the order of its
actions alone, so that there is room if there is enough at each action that is overtaken.

These are two passes of Liu et al., "Mario: Near Zero-cost Activation Checkpointing in Pipeline
Parallelism", PPoPP 2025: to overlap recomputations with idle time, and to do forwards ahead in the
room that checkpoints free.
"""

from __future__ import annotations

from dataclasses import replace

from fxpipe.schedule.actions import Action, Kind
from fxpipe.schedule.memory import MemoryChanges
from fxpipe.schedule.problem import SLACK, SchedulingProblem
from fxpipe.schedule.recomputation import recomputed_cells, with_recomputations, without_needless
from fxpipe.schedule.schedule import Schedule
from fxpipe.schedule.simulator import Run

_FILLING = Kind.RECOMPUTE, Kind.FORWARD  # the kinds of actions that may be done ahead


def filled(problem: SchedulingProblem, schedule: Schedule) -> Schedule:
    """The schedule with all recomputations that may be moved, those that it lacks right ahead of
    their backward."""
    lanes = (schedule.actions(lane) for lane in range(problem.lanes))
    lines = (tuple(with_recomputations(line, problem.movable)) for line in lanes)
    return replace(schedule, lanes=tuple(lines))


def placed(problem: SchedulingProblem, schedule: Schedule) -> Schedule:
    """The schedule with recomputations and forwards further ahead, in idle time, as far as the room
    of lanes allows. The schedule keeps within it if the given one does."""
    placer = _Placer(problem, schedule)
    Run(problem.world, problem.lanes, problem.microbatches, placer.choose).to_the_end()
    return replace(schedule, lanes=tuple(tuple(without_needless(line)) for line in placer.lines))


class _Placer:
    """The order of each lane, which changes while the step is simulated."""

    def __init__(self, problem: SchedulingProblem, schedule: Schedule) -> None:
        self.problem = problem
        all_of = filled(problem, schedule)
        self.lines = [list(all_of.actions(lane)) for lane in range(problem.lanes)]
        cells = recomputed_cells(action for line in self.lines for action in line)
        self.changes = MemoryChanges(problem.memory, len(problem.world.placement), cells)
        self.reached = [0] * problem.lanes  # the position of each lane's next action
        self.held = [0.0] * problem.lanes

    def choose(self, run: Run, lane: int) -> Action | None:
        line, here = self.lines[lane], self.reached[lane]
        if here == len(line):
            return None
        if not run.is_ready(line[here]):
            found = self._filling(run, lane)
            if found is None:
                return None
            line.insert(here, line.pop(found))
        self.reached[lane] += 1
        self.held[lane] += sum(self.changes.of(line[here]))
        return line[here]

    def _filling(self, run: Run, lane: int) -> int | None:
        """The position of the action that a lane can do while it waits. A stage takes micro-batches
        in the order of the lane, so that only the next of each kind is asked."""
        line, room = self.lines[lane], self.problem.room[lane] * SLACK
        most = held = self.held[lane]
        asked: set[tuple[int, Kind]] = set()
        for position in range(self.reached[lane], len(line)):
            action = line[position]
            begin, end = self.changes.of(action)
            what = action.stage, action.kind
            if action.kind in _FILLING and what not in asked:
                asked.add(what)
                if run.is_ready(action) and most + begin <= room:
                    return position
                if len(asked) == len(_FILLING) * len(self.problem.own[lane]):
                    return None
            most = max(most, held + begin)
            held += begin + end
        return None
