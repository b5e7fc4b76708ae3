"""The draft: a step graph that pass "step" has not yet written to its end.

::

               stage 0          stage 1          loss
    mb 0       values           values           values
               tape             tape             tape
               gradients        gradients        gradients
    mb 1       values ...

A cell of this table is the work of one stage for one micro-batch. The forward of a cell leaves its
values there, and a tape, which is the autograd graph that it has recorded. The loss and the
backward read these, and leave gradients. The files "forward", "loss" and "backward" share this
table, the graph and the traffic between stages, and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx, nn

from fxpipe.ir.graph import ACTION, FIRST, TURN
from fxpipe.schedule import Action, Kind
from fxpipe.schedule.recomputation import recomputed_cells
from passes.common.modes import SELECTIVE, Modes, is_checkpointed, moved, of_stages
from passes.to_step.caller import Caller
from passes.to_step.flows import Flows
from passes.to_step.nodes import Nodes
from passes.to_step.replicas import Replicas
from passes.to_step.traffic import Traffic


@dataclass
class CellNodes:
    """The nodes of one cell that nodes of other cells, or of its own backward, refer to.

    Both dicts have values of the stage graph as keys, and nodes of the step graph as values.
    """

    values: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """The values that have arrived at the stage, and those that it has computed."""
    grads: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """The gradients that the cell's backward gives, by the value that each is the gradient of."""
    tape: fx.Node = field(init=False)
    """The autograd graph that the forward has recorded."""
    backward: fx.Node = field(init=False)
    """The call of the backward."""


class Draft:
    """A step graph while it is written.

    Args:
        nodes: makes the nodes, and knows the stage graph, the schedule and the devices.
        traffic: what travels between stages.
        caller: the inputs of the step graph.
        loss: the module that computes the loss of a micro-batch.
        checkpoint: the checkpoint mode of all stages, or the mode of each.
        halves: makes of a stage one whose backward can be run in two halves.
    """

    def __init__(
        self,
        nodes: Nodes,
        traffic: Traffic,
        caller: Caller,
        loss: nn.Module,
        checkpoint: Modes,
        halves: Callable[[fx.GraphModule], fx.GraphModule],
    ) -> None:
        self.nodes, self.traffic, self.caller = nodes, traffic, caller
        self.loss, self.checkpoint, self._make_halves = loss, checkpoint, halves
        self._in_halves: dict[fx.GraphModule, fx.GraphModule] = {}
        self.gm, self.schedule = nodes.gm, nodes.schedule
        self.flows = Flows(self.gm)
        self.replicas = Replicas(self.gm, nodes, traffic)
        self.losses: dict[int, fx.Node] = {}  # by micro-batch
        self._cells: dict[tuple[int, int], CellNodes] = {}  # by stage and micro-batch
        self._turns: Counter[int] = Counter()  # by lane: how many actions have been written

    def cell(self, stage: int, microbatch: int) -> CellNodes:
        """The nodes that have been written so far for a stage's work on a micro-batch."""
        return self._cells.setdefault((stage, microbatch), CellNodes())

    def note(self, node: fx.Node, at: Action) -> None:
        """Note that a node does an action, and how many actions its lane runs ahead of that."""
        lane = self.nodes.lane(at.stage)
        node.meta |= {ACTION: at, TURN: self._turns[lane]}
        self._turns[lane] += 1

    def value(self, value: Any, at: Action) -> Any:
        """The node of the step graph for a value of the stage graph, as the stage of this action
        has it. A constant, which is no node, is returned as it is."""
        if not isinstance(value, fx.Node):
            return value
        if FIRST in value.meta:
            return self.replicas.of(value)
        values = self.cell(at.stage, at.microbatch).values
        if value not in values:  # an input, a parameter or a buffer: it comes from no other stage
            is_state = value.op == "get_attr"
            values[value] = (
                self.nodes.attribute(str(value.target))
                if is_state
                else self.caller.part(value, at.stage, at.microbatch)
            )
        return values[value]

    def in_halves(self, stage: fx.GraphModule) -> fx.GraphModule:
        """The stage rewritten so that its backward can be run in halves. It is rewritten once, for
        all micro-batches."""
        if stage not in self._in_halves:
            self._in_halves[stage] = self._make_halves(stage)
        return self._in_halves[stage]

    def is_checkpointed(self, at: Action) -> bool:
        """Whether the forward of an action's stage and micro-batch keeps no activations."""
        return is_checkpointed(self._modes[at.stage], at.microbatch, self.schedule.microbatches)

    def is_selective(self, at: Action) -> bool:
        """Whether it keeps the results of products for the second run."""
        return self._modes[at.stage] == SELECTIVE

    def is_offloaded(self, at: Action) -> bool:
        """Whether the activations of an action's stage and micro-batch go to the host: those that
        the schedule brings back. The others stay, as their backward follows at once."""
        return bool(self.moved(at)) and (at.stage, at.microbatch) in self._brought_back

    def moved(self, at: Action) -> float:
        """The part of the activations of an action's stage that goes to the host."""
        return moved(self._modes[at.stage])

    @cached_property
    def _brought_back(self) -> frozenset[tuple[int, int]]:
        lanes = range(len(self.schedule.lanes))
        return recomputed_cells(each for lane in lanes for each in self.schedule.actions(lane))

    @cached_property
    def _modes(self) -> list[str]:
        return of_stages(self.checkpoint, len(self.flows.stages))

    def is_halved(self, at: Action) -> bool:
        """Whether the schedule cuts the backward of this action's cell into two halves."""
        return (at.stage, at.microbatch) in self._halved

    @cached_property
    def _halved(self) -> set[tuple[int, int]]:
        return {
            (action.stage, action.microbatch)
            for lane in range(len(self.schedule.lanes))
            for action in self.schedule.actions(lane)
            if action.kind is Kind.WEIGHT_GRAD
        }
