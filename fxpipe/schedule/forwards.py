"""Forwards: the order in which a call without a backward runs, and the time that it takes.

::

    lane 0 | 0F0 0F1 0F2
    lane 1 |  .  1F0 1F1 1F2

This is no :class:`.Schedule` that a training step could follow: every action is a forward.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.schedule.actions import Action, Kind
from fxpipe.schedule.memory import Memory
from fxpipe.schedule.schedule import Schedule
from fxpipe.schedule.simulator import play
from fxpipe.schedule.timeline import Timeline
from fxpipe.schedule.world import Links, StageCost, World


def forwards(placement: Sequence[int], microbatches: int) -> Schedule:
    """The forwards of all micro-batches, in the order of clock cycles: stage j runs micro-batch i
    in cycle i + j. ``placement`` has the lane of each stage."""
    cycles: list[list[tuple[int, int, int]]] = [[] for _ in range(1 + max(placement))]
    for stage, lane in enumerate(placement):
        cycles[lane] += [(i + stage, stage, i) for i in range(microbatches)]
    lanes = (
        tuple(Action(stage, Kind.FORWARD, i) for _, stage, i in sorted(actions))
        for actions in cycles
    )
    return Schedule("forward", len(placement), microbatches, tuple(lanes))


def simulate_forwards(
    order: Schedule, costs: Sequence[StageCost], links: Links, memory: Memory | None = None
) -> Timeline:
    """The timeline of a call that runs these forwards; see :func:`.simulate` for the arguments."""
    return play(order, World(order.placement, costs, links), memory)
