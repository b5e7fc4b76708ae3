"""How long the stages and the lanes of a pipeline work, from one source: the predicted step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.ir.cost import Cost
from fxpipe.schedule import Timeline
from fxpipe.schedule.simulator import LOSS, LOSS_BACKWARD


@dataclass(frozen=True)
class StepWork:
    """How long stages and lanes work in a step, in seconds.

    Attributes:
        stages: the seconds of each stage. The loss, which runs in the last one, is part of it.
        busy: the seconds that each lane works, with the step of the optimizer.
        placement: the lane of each stage.
        loss: the seconds of the loss and its backward.
    """

    stages: tuple[float, ...]
    busy: tuple[float, ...]
    placement: Sequence[int]
    loss: float = 0.0

    @staticmethod
    def of(step: Timeline | None, costs: Sequence[Cost], placement: Sequence[int]) -> StepWork:
        """That of a predicted step; or, if there is none, what the costs of the stages say, which
        know nothing of a loss."""
        if step is None:
            times = [cost.seconds for cost in costs]
            work = StepWork(tuple(times), (), placement)
            return StepWork(work.stages, work.of_lanes, placement)
        seconds, loss = [0.0] * len(costs), 0.0
        for span in step.spans:
            if span.action is not None:
                seconds[span.action.stage] += span.seconds
            elif span.name in (LOSS, LOSS_BACKWARD):
                loss += span.seconds
        seconds[-1] += loss
        return StepWork(tuple(seconds), step.busy, placement, loss)

    @property
    def of_lanes(self) -> tuple[float, ...]:
        """For each lane, the seconds that its stages work in a step, added up."""
        lanes = range(1 + max(self.placement))
        return tuple(sum(self.stages[i] for i in self.stages_of(lane)) for lane in lanes)

    def stages_of(self, lane: int) -> list[int]:
        """The numbers of the stages that run on a lane, given by its number."""
        return [i for i, its in enumerate(self.placement) if its == lane]
