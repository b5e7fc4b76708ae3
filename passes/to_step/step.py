"""Step: from the stage graph to a whole training step, in the order of a schedule.

::

    stage graph     x ─ stage_0 ─ stage_1 ─ y

    step graph      x_mb0 ─ forward ── send ── forward ─ loss ─┐
                               :                  :            │
                     (tape)    :         (tape)   :            │
                            backward ─ send ─ backward ─ loss_backward

A value that several stages use visits them in order (0 → 1 → 3), as in the pipeline graph: each
passes it on with its results, and its gradient comes back the same way, so that the sums are those
of the model's own backward. The loss is one stage more, in the lane of the last.

::

    flows     which value visits which stages      writer     the actions, one by one, in order
    nodes     the graph that is written            traffic    what goes from stage to stage
                                                   replicas   what is brought once for all
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from fxpipe.ir.graph import ACTION, STAGE
from fxpipe.schedule import Action, Kind, joined
from passes.to_stages.segments import opened
from passes.to_step.flows import Flows, StepError
from passes.to_step.options import StepOptions
from passes.to_step.writer import Writer

__all__ = ["Step", "StepError"]


@dataclass(frozen=True)
class Step(StepOptions):
    """Stage graph → step graph, which returns the loss and the losses of the micro-batches.

    Args:
        loss: a module that is called with the output, as the stage graph gives it, and a tuple of
            the target's tensors.
        schedule: as many stages as there are, and the number of micro-batches.
        devices: one for each stage.
        in_dims: as for pass "microbatch".
        targets: for each tensor of the target, whether it has a batch dimension (the first).
        checkpoint, checkpoint_segments: as for pass "checkpoint".
        summed: the loss is a sum over the rows, and that of the mini-batch the sum of all.

    Raises :class:`StepError` or :class:`fxpipe.schedule.ScheduleError` if the schedule does not
    fit.
    """

    name: ClassVar[str] = "step"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        stages = len(gm.graph.find_nodes(op="call_module"))
        if self.schedule.stages != stages:
            raise StepError(
                f"the schedule {self.schedule.name!r} has {self.schedule.stages} stages, the "
                f"pipeline {stages}: give a schedule of {stages}, or as many devices"
            )
        step = replace(self, schedule=joined(self.schedule, Flows(gm).edges))
        writer = Writer(step, gm)
        actions = writer.actions()
        if self.checkpoint == "never" or self.checkpoint_segments == 1:
            return writer.write(actions)
        return _in_segments(step, gm, actions)


def _in_segments(step: Step, gm: fx.GraphModule, actions: Sequence[Action]) -> fx.GraphModule:
    """The step of a pipeline whose stages are cut in segments: these are stages like any other, all
    in the lane of the one that they are parts of, and what it does they do one after the other."""
    cut, stage_of = opened(gm, step.checkpoint_segments)
    segments: list[list[int]] = [[] for _ in range(step.schedule.stages)]
    for segment, stage in enumerate(stage_of):
        segments[stage].append(segment)

    def taken_apart(actions: Iterable[Action]) -> list[Action]:
        return [
            replace(action, stage=segment)
            for action in actions
            for segment in segments[action.stage][:: 1 if action.kind is Kind.FORWARD else -1]
        ]

    lanes = range(len(step.schedule.lanes))
    schedule = replace(
        step.schedule,
        stages=len(stage_of),
        lanes=tuple(tuple(taken_apart(step.schedule.actions(lane))) for lane in lanes),
    )
    devices = tuple(step.devices[stage] for stage in stage_of)
    labels = [(stage, i) for stage, own in enumerate(segments) for i in range(len(own))]
    writer = Writer(replace(step, schedule=schedule, devices=devices), cut, labels)
    result = writer.write(taken_apart(actions))
    for node in result.graph.nodes:  # to whoever looks it is the stage that does it
        if STAGE in node.meta:
            node.meta[STAGE] = stage_of[node.meta[STAGE]]
        if ACTION in node.meta:
            action = node.meta[ACTION]
            node.meta[ACTION] = replace(action, stage=stage_of[action.stage])
    return result
