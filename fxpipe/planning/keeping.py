"""Keeping: which micro-batches each stage keeps, and in how many segments it recomputes the others,
where the compiler chooses it (``checkpoint="auto"``, ``checkpoint_segments="auto"``).

::

    cut       chooses a way for each stage, by the memory that stages have room for
    stricter  as long as the simulated step does not fit: one stage more is recomputed, or a larger
              part of it, or in more segments, or one has its activations on the host
    milder    then: each stage that need not be recomputed is not, and none in more segments than it
              has to be, if the step takes no longer; and each goes another way that takes less time

A way is a mode and a number of segments. The cut and the ways are chosen together, since a stage
that has room keeps more and recomputes less, and so can take more layers (Sun et al., "AdaPipe",
ASPLOS 2024, search stage by stage; here it is part of the search over all cuts, see
:mod:`passes.partition.cut`). But the cut knows neither what a stage needs while it runs, nor how
large its segments are, nor where lanes are idle, so that recomputing costs no time there. The
simulation knows all of this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from fxpipe.planning.lanes import CutModel, PlannedLanes, PlannedStep
from fxpipe.planning.result import ROUNDING
from passes.common.modes import of_stages, recomputing_less
from passes.common.segments import counts

KEEPS_ALL = "never", 1
"""The way of a stage that keeps everything."""
NEARLY = 1.02
"""What a stage needs differs by less than this with the ways of the other stages."""


@dataclass(frozen=True)
class Keeping:
    """The search for the ways of the stages of a cut."""

    lanes: PlannedLanes
    cut: CutModel

    def settled(self, step: PlannedStep) -> PlannedStep:
        """The step that fits and takes least time, as far as changing the way of one stage after
        the other leads; of steps that take equally long, the one that recomputes less, and that in
        fewer segments. It begins at a given step. If none is found that fits, it is the one that is
        short of fewest bytes."""
        return self._milder(self._stricter(step))

    def _stricter(self, step: PlannedStep) -> PlannedStep:
        while (short := self.short(step)) > 0:
            missing = self._missing(step)
            fullest = missing.index(max(missing))
            others = [
                self._with(step, stage, way)
                for stage, lane in enumerate(self.lanes.placement)
                if lane == fullest
                for way in self._stricter_ways(step, stage)
            ]
            least = min(others, key=self.short, default=step)
            if self.short(least) >= short:
                return step
            step = least
        return step

    def _milder(self, step: PlannedStep) -> PlannedStep:
        if self.short(step) > 0:
            return step
        for stage in self._by_recomputation(step):
            step = next(self._milder_at(step, stage), step)
        return step

    def _milder_at(self, step: PlannedStep, stage: int) -> Iterator[PlannedStep]:
        """The steps that are taken in place of this one, in which one stage goes another way: first
        those that recompute less and take no longer, then those that take less time."""
        ways, seconds = self.lanes.ways(self.cut, stage), step.timeline.makespan
        now = ways.index(self._ways(step)[stage])
        yield from self._fitting(step, stage, ways[:now], seconds * (1 + ROUNDING))
        # No way takes less time than the one that keeps all, whatever memory that needs.
        less = seconds * (1 - ROUNDING)
        if now and self._with(step, stage, KEEPS_ALL).timeline.makespan <= less:
            yield from self._fitting(step, stage, ways[now + 1 :], less)

    def _fitting(
        self, step: PlannedStep, stage: int, ways: Sequence[tuple[str, int]], seconds: float
    ) -> Iterator[PlannedStep]:
        """The steps in which one stage goes one of these ways, of those that fit and take at most
        so many seconds."""
        for way in ways:
            if self._may_fit(stage, way):
                other = self._with(step, stage, way)
                if other.timeline.makespan <= seconds and self.short(other) <= 0:
                    yield other

    def _may_fit(self, stage: int, way: tuple[str, int]) -> bool:
        """Whether the step might fit with a stage that goes this way, by what the stage has needed
        where all stages went it."""
        limit = self.lanes.specs[self.lanes.placement[stage]].memory
        return limit is None or self._needs[stage].get(way, 0.0) <= limit * NEARLY

    @cached_property
    def _needs(self) -> list[dict[tuple[str, int], float]]:
        return self.lanes.needs(self.cut)

    def _by_recomputation(self, step: PlannedStep) -> list[int]:
        """The stages, the one first that recomputes longest."""
        forward = [0.0] * len(self.cut.devices)
        for cost, stage in zip(self.cut.problem.whole.forward[0], self.cut.stage, strict=True):
            forward[stage] += float(cost)
        return sorted(range(len(forward)), key=lambda stage: -forward[stage])

    def _ways(self, step: PlannedStep) -> list[tuple[str, int]]:
        stages = len(self.cut.devices)
        parts = counts(step.segments, step.modes, stages)
        return list(zip(of_stages(step.modes, stages), parts, strict=True))

    def _stricter_ways(self, step: PlannedStep, stage: int) -> list[tuple[str, int]]:
        """The ways in which a stage could need less memory: it recomputes more, or as much in other
        segments, or has its activations on the host. More segments have smaller activations, but
        more inputs, so that which number needs least is for the simulation to say."""
        now = self._ways(step)[stage]
        less = recomputing_less(now[0])
        return [
            way for way in self.lanes.ways(self.cut, stage) if way != now and way[0] not in less
        ]

    def _with(self, step: PlannedStep, stage: int, way: tuple[str, int]) -> PlannedStep:
        """The step in which one stage goes another way."""
        ways = self._ways(step)
        ways[stage] = way
        return self.lanes.step(self.cut, ways, step.order)

    def short(self, step: PlannedStep) -> float:
        """The bytes that are missing for a step on all devices together; 0 if it fits."""
        return sum(self._missing(step))

    def _missing(self, step: PlannedStep) -> list[float]:
        """The bytes that are missing for a step on each lane's device."""
        return [max(0.0, -left) for left in self.room(step)]

    def room(self, step: PlannedStep) -> list[float]:
        """The bytes that a step leaves free on each lane's device; less than none: those that are
        missing."""
        limits = (math.inf if spec.memory is None else spec.memory for spec in self.lanes.specs)
        return [
            limit * (1 + ROUNDING) - held
            for held, limit in zip(step.timeline.peak_memory, limits, strict=True)
        ]
