"""Step: the pass writes a whole training step, with its forwards, losses and backwards in the order
of a schedule.

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

    flows      finds which stages each value of the stage graph visits
    writer     writes all actions, one by one, in an order in which one thread can run them
    forward, loss, backward    write the nodes of one action
    draft      holds the unfinished step graph, which these four share
    nodes      makes nodes and notes their stages and streams
    caller     writes the inputs of the step graph, and brings their parts to the stages
    traffic    writes what goes from stage to stage
    replicas   brings parameters to other devices, once for all micro-batches
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import fx, nn

from fxpipe.ir.graph import ACTION, STAGE
from fxpipe.runtime.microbatch import InDim
from fxpipe.schedule import Action, Kind, Needs, Schedule, joined
from fxpipe.schedule.order import run_order
from fxpipe.schedule.recomputation import recomputed_cells, with_recomputations
from passes.common.modes import Modes, away, checkpointed, of_segment, of_stages, offloaded
from passes.common.segments import Segments, counts
from passes.to_stages.segments import opened
from passes.to_step.caller import Caller
from passes.to_step.defer import Defer
from passes.to_step.draft import Draft
from passes.to_step.flows import Flows, StepError
from passes.to_step.nodes import Nodes
from passes.to_step.traffic import Traffic
from passes.to_step.writer import write

__all__ = ["Step", "StepError"]


@dataclass(frozen=True)
class Step:
    """Stage graph → step graph, which returns the loss and the losses of the micro-batches.

    Args:
        loss: a module that is called with the output, as the stage graph gives it, and a tuple of
            the target's tensors.
        schedule: the order of the actions. It has as many stages as the stage graph, and says how
            many micro-batches there are.
        devices: one for each stage.
        in_dims: as for pass "microbatch".
        targets: for each tensor of the target, whether it has a batch dimension (the first).
        checkpoint, checkpoint_segments: as for pass "checkpoint".
        summed: the loss is a sum over the rows, so that the loss of the mini-batch is the sum of
            its micro-batches' losses, and not their weighted mean.
        loss_weight: a module that gives the weight of a micro-batch's loss from its parts of the
            target, or of the inputs if ``weighs_inputs``. None: its number of rows.
        halves: makes of a stage one whose backward can be run in two halves.

    Raises :class:`StepError` or :class:`fxpipe.schedule.ScheduleError` if the schedule does not
    fit.
    """

    name: ClassVar[str] = "step"
    loss: nn.Module
    schedule: Schedule
    devices: tuple[str, ...]
    in_dims: tuple[InDim, ...]
    targets: tuple[bool, ...] = ()
    checkpoint: Modes = "never"
    checkpoint_segments: Segments = 1
    summed: bool = False
    loss_weight: nn.Module | None = None
    weighs_inputs: bool = False
    halves: Callable[[fx.GraphModule], fx.GraphModule] = field(default_factory=Defer)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        stages = len(gm.graph.find_nodes(op="call_module"))
        if self.schedule.stages != stages:
            raise StepError(
                f"the schedule {self.schedule.name!r} has {self.schedule.stages} stages, the "
                f"pipeline {stages}: give a schedule of {stages}, or as many devices"
            )
        edges = Flows(gm).edges
        hosts = offloaded(self.checkpoint, stages)
        step = replace(self, schedule=joined(self.schedule, edges).reloading(hosts))
        step._check_recomputations()
        lanes = [list(step.schedule.actions(lane)) for lane in range(len(step.schedule.lanes))]
        actions = [action for _, action in run_order(lanes, Needs(step.schedule, edges).of)]
        if max(self._segments) == 1:
            return step._written(gm, actions, [(stage,) for stage in range(stages)])
        return step._in_segments(gm, actions)

    def _written(
        self, gm: fx.GraphModule, actions: Sequence[Action], labels: Sequence[tuple[int, ...]]
    ) -> fx.GraphModule:
        """The step graph of these actions, with recomputations of all checkpointed cells.
        ``labels``: what stages are called, see ``Nodes``."""
        actions = list(with_recomputations(actions, self._checkpointed))
        nodes = Nodes(gm, self.schedule, self.devices, labels)
        traffic = Traffic(nodes)
        weighing = self.loss_weight, self.weighs_inputs
        caller = Caller(nodes, traffic, self.in_dims, self.targets, self.summed, *weighing)
        return write(
            Draft(nodes, traffic, caller, self.loss, self.checkpoint, self.halves), actions
        )

    @property
    def _checkpointed(self) -> list[int]:
        """For each stage, how many micro-batches are checkpointed."""
        modes, count = of_stages(self.checkpoint, self.schedule.stages), self.schedule.microbatches
        return [checkpointed(mode, count) for mode in modes]

    @property
    def _segments(self) -> list[int]:
        """The number of segments of each stage."""
        return counts(self.checkpoint_segments, self.checkpoint, self.schedule.stages)

    def _check_recomputations(self) -> None:
        """Refuse recomputations that the schedule has, and that the checkpoint modes forbid."""
        lanes = range(len(self.schedule.lanes))
        modes = of_stages(self.checkpoint, self.schedule.stages)
        actions = (action for lane in lanes for action in self.schedule.actions(lane))
        for stage, microbatch in sorted(recomputed_cells(actions)):
            said = f"the schedule {self.schedule.name!r} has {stage}R{microbatch}, and "
            if microbatch >= away(modes[stage], self.schedule.microbatches):
                raise StepError(
                    f"{said}stage {stage} keeps the activations of micro-batch {microbatch}, so "
                    "that there is nothing to recompute: take this action out of the schedule, or "
                    'give checkpoint="always"'
                )
            if self._segments[stage] > 1:
                raise StepError(
                    f"{said}checkpoint_segments={self.checkpoint_segments} recomputes a stage in "
                    "parts, each right ahead of its own backward: take this action out of the "
                    "schedule, or give checkpoint_segments=1"
                )

    def _in_segments(self, gm: fx.GraphModule, actions: Sequence[Action]) -> fx.GraphModule:
        """The step graph of stages that are cut in segments.

        Segments are stages like any other, all in the lane of the stage that they are parts of; an
        action of the stage is that action of each segment, one after the other. A stage that is
        never run again stays whole.
        """
        modes = of_stages(self.checkpoint, self.schedule.stages)
        cut, stage_of = opened(gm, self._segments)
        segments: list[list[int]] = [[] for _ in range(self.schedule.stages)]
        for segment, stage in enumerate(stage_of):
            segments[stage].append(segment)

        def taken_apart(actions: Iterable[Action]) -> list[Action]:
            return [
                replace(action, stage=segment)
                for action in actions
                for segment in segments[action.stage][:: 1 if action.kind is Kind.FORWARD else -1]
            ]

        lanes = range(len(self.schedule.lanes))
        schedule = replace(
            self.schedule,
            stages=len(stage_of),
            lanes=tuple(tuple(taken_apart(self.schedule.actions(lane))) for lane in lanes),
        )
        devices = tuple(self.devices[stage] for stage in stage_of)
        checkpoint = tuple(
            of_segment(modes[stage], segments[stage].index(segment), len(segments[stage]))
            for segment, stage in enumerate(stage_of)
        )
        step = replace(
            self,
            schedule=schedule,
            devices=devices,
            checkpoint=checkpoint,
            checkpoint_segments=1,
        )
        labels = [(stage, i) for stage, own in enumerate(segments) for i in range(len(own))]
        result = step._written(cut, taken_apart(actions), labels)
        for node in result.graph.nodes:  # readers of the graph know stages, but no segments
            if STAGE in node.meta:
                node.meta[STAGE] = stage_of[node.meta[STAGE]]
            if ACTION in node.meta:
                action = node.meta[ACTION]
                node.meta[ACTION] = replace(action, stage=stage_of[action.stage])
        return result
