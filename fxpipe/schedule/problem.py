"""The scheduling problem: the costs and limits for which a search finds a schedule, and a lower
bound on the length of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fxpipe.ir.text import human_bytes
from fxpipe.schedule.actions import Action, Kind
from fxpipe.schedule.memory import Memory, MemoryChanges, most_held, peaks
from fxpipe.schedule.schedule import Schedule
from fxpipe.schedule.world import World

SLACK = 1 + 1e-9
"""Sums count as equal if they differ by no more than this factor, since rounding depends on the
order in which numbers are added."""


class NoRoom(ValueError):
    """No schedule keeps within the bound on memory, not even one micro-batch at a time."""


@dataclass(frozen=True)
class SchedulingProblem:
    """The stages of a step, their lanes and costs, and how much each lane may keep.

    Attributes:
        world: the lane and the cost of each stage, and the links between lanes.
        lanes, microbatches: how many of them there are.
        memory: the bytes that stages keep of a micro-batch; ``memory.fixed`` does not count here.
        room: the most bytes that each lane may keep, without ``memory.fixed``.
        moves_recomputations: whether recomputations may run anywhere ahead of their backward. That
            is so on lanes whose room has a bound. On others they run right ahead of it: who makes
            checkpoints wants to save memory, and nobody knows how much there is to spare.
    """

    world: World
    lanes: int
    microbatches: int
    memory: Memory
    room: tuple[float, ...]
    moves_recomputations: bool = True

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
        """By how many bytes each action changes what its lane keeps."""
        return MemoryChanges(self.memory, len(self.world.placement))

    @cached_property
    def _again(self) -> list[int]:
        return self.memory.again(len(self.world.placement))

    def is_checkpointed(self, stage: int, microbatch: int) -> bool:
        """Whether a micro-batch keeps only its inputs at a stage until its backward."""
        return microbatch < self._again[stage]

    def kind(self, microbatch: int) -> tuple[bool, ...]:
        """At which stages a micro-batch keeps only its inputs. Micro-batches of one kind need the
        same memory."""
        return tuple(microbatch < count for count in self._again)

    @cached_property
    def kinds(self) -> dict[tuple[bool, ...], int]:
        """The first micro-batch of each kind."""
        found: dict[tuple[bool, ...], int] = {}
        for microbatch in sorted({0, *(n for n in self._again if n < self.microbatches)}):
            found.setdefault(self.kind(microbatch), microbatch)
        return found

    @cached_property
    def recomputed(self) -> tuple[int, ...]:
        """For each stage, how many micro-batches take time to be recomputed: the first ones."""
        return tuple(
            min(cost.checkpointed, self.microbatches) if cost.recompute else 0
            for cost in self.world.costs
        )

    @cached_property
    def movable(self) -> tuple[int, ...]:
        """For each stage, how many recomputations may run anywhere ahead of their backward."""
        return tuple(
            count if self.moves_recomputations and math.isfinite(self.room[lane]) else 0
            for count, lane in zip(self.recomputed, self.world.placement, strict=True)
        )

    @property
    def is_order_free(self) -> bool:
        """Whether one of the best schedules takes the micro-batches in their order at every stage.
        That is so if all micro-batches take the same time, and if they need the same memory or the
        memory of lanes has no bound."""
        is_even = all(count in (0, self.microbatches) for count in self.recomputed)
        return is_even and (len(self.kinds) == 1 or all(map(math.isinf, self.room)))

    def alone(self, stages: Sequence[int], microbatch: int) -> float:
        """The most bytes that a lane keeps while it does nothing but the forwards and backwards of
        one micro-batch at some of its stages."""
        return most_held(there_and_back(stages, microbatch), self.changes)

    def largest(self, stages: Sequence[int]) -> float:
        """The most bytes that a lane keeps for a micro-batch that is alone in the pipeline."""
        return max(self.alone(stages, i) for i in self.kinds.values())

    def misfit(self) -> str | None:
        """A sentence that says why no schedule fits the room of the lanes; None if one fits."""
        for lane, (own, room) in enumerate(zip(self.own, self.room, strict=True)):
            least = self.largest(own)
            if least > room * SLACK:
                return (
                    f"lane {lane} may keep {human_bytes(room)} of activations, and one micro-batch "
                    f"needs {human_bytes(least)} at its stages {', '.join(map(str, own))}: "
                    "raise max_bytes, or make micro-batches smaller"
                )
        return None

    def kept(self, schedule: Schedule) -> tuple[float, ...]:
        """The most bytes that each lane keeps at any time of a step with this schedule."""
        return peaks(schedule, self.memory).lanes

    def fits(self, kept: tuple[float, ...]) -> bool:
        """Whether each lane may keep so many bytes."""
        return all(k <= room * SLACK for k, room in zip(kept, self.room, strict=True))

    def backward(self, stage: int) -> float:
        """The fewest seconds for which a backward occupies its lane, whole or in two halves."""
        return min(self.world.seconds(stage, Kind.BACKWARD), self.world.costs[stage].halves)

    def is_halved(self, stage: int) -> bool:
        """Whether a stage's backward has a second half, which can be put off."""
        return self.world.costs[stage].weight_grad > 0

    @cached_property
    def before_forward(self) -> tuple[float, ...]:
        """For each stage, the least time from the start of the step to the start of a forward."""
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
        """For each stage, the least time from when a backward has computed the gradients of the
        stage's inputs to the end of the step."""
        tails: list[float] = []
        for stage, targets in enumerate(self.world.before):
            ways = [self.world.travel(stage, t) + self._rest(t, tails[t]) for t in targets]
            tails.append(max(ways, default=0.0))
        return tuple(tails)

    @cached_property
    def after_forward(self) -> tuple[float, ...]:
        """For each stage, the least time from the end of a forward to the end of the step."""
        stages = len(self.world.placement)
        tails = [0.0] * stages
        for stage in reversed(range(stages)):
            ways = [
                self.world.travel(stage, t) + self.world.seconds(t, Kind.FORWARD) + tails[t]
                for t in self.world.after[stage]
            ]
            is_again = self.recomputed[stage] == self.microbatches
            again = is_again * self.world.seconds(stage, Kind.RECOMPUTE)
            tails[stage] = max([*ways, again + self.after_recomputation[stage]])
        return tuple(tails)

    @cached_property
    def after_recomputation(self) -> tuple[float, ...]:
        """For each stage, the least time from the end of a recomputation to the end of the step."""
        return tuple(self._rest(stage, after) for stage, after in enumerate(self.after_gradient))

    def _rest(self, stage: int, after: float) -> float:
        """The least time from the start of a backward to the end of the step, if ``after`` is the
        least time from when it has computed the gradients of the inputs."""
        seconds = self.world.seconds
        whole = seconds(stage, Kind.BACKWARD) + after
        if not self.is_halved(stage):
            return whole
        halves = seconds(stage, Kind.BACKWARD_INPUT) + max(seconds(stage, Kind.WEIGHT_GRAD), after)
        return min(whole, halves)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """For each lane, the fewest seconds of work in a step."""
        seconds = self.world.seconds
        return tuple(
            sum(
                self.microbatches * (seconds(s, Kind.FORWARD) + self.backward(s))
                + self.recomputed[s] * seconds(s, Kind.RECOMPUTE)
                for s in own
            )
            for own in self.own
        )

    @cached_property
    def bound(self) -> float:
        """A lower bound, in seconds, on the length of any schedule.

        A lane cannot end before it has done its work, which begins when its first input arrives. A
        step cannot end before one micro-batch has gone through all stages, forward and backward.
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
