"""Keeping: which micro-batches each stage keeps, where the compiler chooses it
(``checkpoint="auto"``).

::

    cut       chooses a mode for each stage, by the memory that stages have room for
    stricter  as long as the simulated step does not fit: one stage more is recomputed
    milder    then: each stage that need not be recomputed is not, if the step takes no longer

The cut and the modes are chosen together, since a stage that has room keeps more and recomputes
less, and so can take more layers (Sun et al., "AdaPipe", ASPLOS 2024, search stage by stage; here
it is part of the search over all cuts, see :mod:`passes.partition.cut`). But the cut knows neither
what a stage needs while it runs, nor where lanes are idle, so that recomputing costs no time there.
The simulation knows both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fxpipe.planning.lanes import CutModel, PlannedLanes, PlannedStep
from fxpipe.planning.result import ROUNDING
from passes.common.modes import MODES, of_stages


@dataclass(frozen=True)
class Keeping:
    """The search for the modes of the stages of a cut."""

    lanes: PlannedLanes
    cut: CutModel

    def settled(self, step: PlannedStep) -> PlannedStep:
        """The step that fits and takes least time, as far as changing the mode of one stage after
        the other leads; of steps that take equally long, the one that recomputes less. It begins at
        a given step. If none is found that fits, it is the one that is short of fewest bytes."""
        return self._milder(self._stricter(step))

    def _stricter(self, step: PlannedStep) -> PlannedStep:
        while (short := self.short(step)) > 0:
            others = [self._with(step, *change) for change in self._stricter_modes(step)]
            least = min(others, key=self.short, default=step)
            if self.short(least) >= short:
                return step
            step = least
        return step

    def _milder(self, step: PlannedStep) -> PlannedStep:
        if self.short(step) > 0:
            return step
        for stage in self._by_recomputation(step):
            now = MODES.index(of_stages(step.modes, len(self.cut.devices))[stage])
            for mode in MODES[:now]:
                other = self._with(step, stage, mode)
                is_slower = other.timeline.makespan > step.timeline.makespan * (1 + ROUNDING)
                if not is_slower and self.short(other) <= 0:
                    step = other
                    break
        return step

    def _by_recomputation(self, step: PlannedStep) -> list[int]:
        """The stages, the one first that recomputes longest."""
        forward = [0.0] * len(self.cut.devices)
        for cost, stage in zip(self.cut.problem.whole.forward[0], self.cut.stage, strict=True):
            forward[stage] += float(cost)
        return sorted(range(len(forward)), key=lambda stage: -forward[stage])

    def _stricter_modes(self, step: PlannedStep) -> Iterator[tuple[int, str]]:
        """The stages that could keep less, and the modes by which they would."""
        for stage, mode in enumerate(of_stages(step.modes, len(self.cut.devices))):
            yield from ((stage, other) for other in MODES[MODES.index(mode) + 1 :])

    def _with(self, step: PlannedStep, stage: int, mode: str) -> PlannedStep:
        """The step in which one stage has another mode."""
        modes = of_stages(step.modes, len(self.cut.devices))
        modes[stage] = mode
        return self.lanes.step(self.cut, modes, step.order)

    def short(self, step: PlannedStep) -> float:
        """The bytes that are missing for a step on all devices together; 0 if it fits."""
        return sum(
            max(0.0, held - spec.memory * (1 + ROUNDING))
            for held, spec in zip(step.timeline.peak_memory, self.lanes.specs, strict=True)
            if spec.memory is not None
        )
