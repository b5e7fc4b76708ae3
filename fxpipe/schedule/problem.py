"""The scheduling problem: what a search is given, and a lower bound on the length of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fxpipe.schedule.actions import Action, Kind
from fxpipe.schedule.memory import Memory, MemoryChanges, most_held, peaks
from fxpipe.schedule.schedule import Schedule
from fxpipe.schedule.world import World

SLACK = 1 + 1e-9
"""Sums that differ by no more than this factor are equal: they were added in different orders."""


class NoRoom(ValueError):
    """No schedule keeps within the bound on memory: not even one micro-batch at a time fits."""


@dataclass(frozen=True)
class SchedulingProblem:
    """Stages on lanes, and how much each lane may keep.

    Attributes:
        memory: what stages keep of a micro-batch. What is held all the time does not count here.
        room: the most that each lane may keep, in the same unit.
    """

    world: World
    lanes: int
    microbatches: int
    memory: Memory
    room: tuple[float, ...]

    @cached_property
    def own(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each lane."""
        placement = self.world.placement
        return tuple(
            tuple(stage for stage, at in enumerate(placement) if at == lane)
            for lane in range(self.lanes)
        )

    @cached_property
    def changes(self) -> MemoryChanges:
        """The changes, by each action, of what its lane keeps."""
        return MemoryChanges(self.memory, len(self.world.placement))

    def is_checkpointed(self, microbatch: int) -> bool:
        """Whether a micro-batch keeps only its inputs until its backward."""
        return microbatch < self.memory.checkpointed

    @property
    def is_order_free(self) -> bool:
        """Whether some best schedule takes the micro-batches in their order at every stage, as they
        are alike in all that matters."""
        is_mixed = 0 < self.memory.checkpointed < self.microbatches
        return not is_mixed or all(map(math.isinf, self.room))

    def alone(self, stages: Sequence[int], microbatch: int) -> float:
        """The most that a lane keeps while it takes one micro-batch through some of its stages, and
        back, and does nothing else."""
        return most_held(there_and_back(stages, microbatch), self.changes)

    def largest(self, stages: Sequence[int]) -> float:
        """The most that a lane keeps of a micro-batch that goes alone: the first or the last, only
        one of which may be checkpointed."""
        return max(self.alone(stages, i) for i in (0, self.microbatches - 1))

    def misfit(self) -> str | None:
        """Why nothing can run in this room; None if something can."""
        for lane, (own, room) in enumerate(zip(self.own, self.room, strict=True)):
            least = self.largest(own)
            if least > room * SLACK:
                return (
                    f"lane {lane} may keep {room:g} bytes of activations, and one micro-batch "
                    f"needs {least:g} at its stages {', '.join(map(str, own))}: "
                    "raise max_bytes, or make micro-batches smaller"
                )
        return None

    def kept(self, schedule: Schedule) -> tuple[float, ...]:
        """The most that each lane keeps at any time of a step in this order."""
        return peaks(schedule, self.memory).lanes

    def fits(self, kept: tuple[float, ...]) -> bool:
        """Whether each lane may keep this much."""
        return all(k <= room * SLACK for k, room in zip(kept, self.room, strict=True))

    def backward(self, stage: int) -> float:
        """The fewest seconds for which a backward occupies its lane, whole or in two halves."""
        seconds = self.world.seconds
        halves = seconds(stage, Kind.BACKWARD_INPUT) + seconds(stage, Kind.WEIGHT_GRAD)
        return min(seconds(stage, Kind.BACKWARD), halves)

    def is_halved(self, stage: int) -> bool:
        """Whether a stage's backward has a second half, which can be put off."""
        return self.world.costs[stage].weight_grad > 0

    @cached_property
    def before_forward(self) -> tuple[float, ...]:
        """For each stage, the least time from the beginning to a micro-batch's forward."""
        heads: list[float] = []
        for stage, sources in enumerate(self.world.before):
            ways = [
                heads[s] + self.world.seconds(s, Kind.FORWARD) + self.world.travel(s, stage)
                for s in sources
            ]
            heads.append(max(ways, default=0.0))
        return tuple(heads)

    @cached_property
    def after_gradient(self) -> tuple[float, ...]:
        """For each stage, the least time from a gradient of its inputs to the end."""
        tails: list[float] = []
        for stage, targets in enumerate(self.world.before):
            ways = [self.world.travel(stage, t) + self._rest(t, tails[t]) for t in targets]
            tails.append(max(ways, default=0.0))
        return tuple(tails)

    @cached_property
    def after_forward(self) -> tuple[float, ...]:
        """For each stage, the least time from the end of a forward to the end."""
        stages = len(self.world.placement)
        tails = [0.0] * stages
        for stage in reversed(range(stages)):
            ways = [
                self.world.travel(stage, t) + self.world.seconds(t, Kind.FORWARD) + tails[t]
                for t in self.world.after[stage]
            ]
            tails[stage] = max([*ways, self._rest(stage, self.after_gradient[stage])])
        return tuple(tails)

    def _rest(self, stage: int, after: float) -> float:
        """The least time from the start of a backward to the end, with so much after its
        gradient."""
        seconds = self.world.seconds
        whole = seconds(stage, Kind.BACKWARD) + after
        if not self.is_halved(stage):
            return whole
        halves = seconds(stage, Kind.BACKWARD_INPUT) + max(seconds(stage, Kind.WEIGHT_GRAD), after)
        return min(whole, halves)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """For each lane, the fewest seconds for which a step occupies it."""
        return tuple(
            self.microbatches
            * sum(self.world.seconds(s, Kind.FORWARD) + self.backward(s) for s in own)
            for own in self.own
        )

    @cached_property
    def bound(self) -> float:
        """A lower bound, in seconds, on the length of any schedule.

        A lane cannot end before it has done its work, which begins when its first input arrives;
        and a step cannot end before one micro-batch has gone all its way forth and back.
        """
        first = [min(self.before_forward[stage] for stage in own) for own in self.own]
        lanes = [head + work for head, work in zip(first, self.work, strict=True)]
        ways = [
            self.before_forward[stage] + self.world.seconds(stage, Kind.FORWARD) + after
            for stage, after in enumerate(self.after_forward)
        ]
        return max(*lanes, *ways)


def there_and_back(stages: Sequence[int], microbatch: int) -> list[Action]:
    """The forwards of a micro-batch at these stages, and its backwards, from the last to the
    first."""
    forwards = [Action(stage, Kind.FORWARD, microbatch) for stage in stages]
    return forwards + [Action(stage, Kind.BACKWARD, microbatch) for stage in reversed(stages)]
