"""Makes the nodes of a step graph, and notes their stages and streams, for pass "step"."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from fxpipe.ir._torch import OuterModule
from fxpipe.ir.graph import DEVICE, LANE, MICROBATCH, STAGE, STREAM, attribute
from fxpipe.runtime.streams import COMPUTE, stream_name
from fxpipe.schedule import Action, Schedule


class Nodes:
    """Makes nodes, and gives them stage, micro-batch, device and stream.

    Args:
        gm: the stage graph, whose modules and parameters the step graph uses.
        devices: one for each stage.
        labels: for each stage the numbers that stand for it in the names of nodes: ``(stage,)``, or
            ``(stage, i)`` for segment ``i`` of that stage.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        schedule: Schedule,
        devices: tuple[str, ...],
        labels: Sequence[tuple[int, ...]],
    ) -> None:
        self.graph = fx.Graph()
        self.gm, self.schedule, self.devices, self.labels = gm, schedule, devices, labels
        self.attributes: dict[str, Any] = {}

    def _runs_in(self, stage: int) -> int:
        """The number of a stage; for the loss that of the last stage, where the loss runs."""
        return min(stage, self.schedule.stages - 1)

    def whole_stage(self, stage: int) -> int:
        """The stage that a segment is part of. The loss is a stage of its own."""
        return stage if stage == len(self.labels) else self.labels[stage][0]

    def lane(self, stage: int) -> int:
        """The lane that a stage runs in."""
        return self.schedule.placement[self._runs_in(stage)]

    def stream(self, stage: int, role: str) -> str:
        """The name of a stream of the stage's device; the role is COMPUTE or COPY."""
        return stream_name(self.devices[self._runs_in(stage)], role)

    def place(self, node: fx.Node, stage: int, microbatch: int, role: str = COMPUTE) -> None:
        """Note a node's stage, micro-batch, lane, device and stream in its metadata."""
        own = self._runs_in(stage)
        node.meta |= {
            STAGE: own,
            MICROBATCH: microbatch,
            LANE: self.lane(stage),
            DEVICE: torch.device(self.devices[own]),
            STREAM: self.stream(stage, role),
        }

    def call(
        self, function: Any, args: tuple[Any, ...], name: str, at: Action, role: str = COMPUTE
    ) -> fx.Node:
        """A call that is part of an action, and belongs to the action's stage and micro-batch."""
        label = "_".join(map(str, self.labels[self._runs_in(at.stage)]))
        node = self.whole(function, args, f"{name}_s{label}_mb{at.microbatch}")
        self.place(node, at.stage, at.microbatch, role)
        return node

    def whole(self, function: Any, args: tuple[Any, ...], name: str) -> fx.Node:
        """A call for the whole mini-batch, which belongs to no action."""
        return self.graph.create_node("call_function", function, args, name=name)

    def item(self, values: fx.Node, index: int | str, name: str, at: Action) -> fx.Node:
        """One element of the tuple, list or dict that a call gives."""
        return self.call(operator.getitem, (values, index), name, at)

    def part(self, values: fx.Node, microbatch: int, name: str) -> fx.Node:
        """One micro-batch's element of a tuple that has an element for each micro-batch."""
        return self.whole(operator.getitem, (values, microbatch), f"{name}_mb{microbatch}")

    def module(self, path: str, module: nn.Module, at: Action) -> fx.Node:
        """A module, as an argument of calls; the step graph has it under this path."""
        self.attributes[path] = module
        node = self.graph.create_node("get_attr", path, name=f"{path}_mb{at.microbatch}_module")
        self.place(node, at.stage, at.microbatch)
        return node

    def given(self, path: str, module: nn.Module) -> fx.Node:
        """A module, as an argument of calls for the whole mini-batch."""
        self.attributes[path] = module
        return self.graph.create_node("get_attr", path)

    def attribute(self, path: str) -> fx.Node:
        """A parameter or buffer of the stage graph, under the same path."""
        self.attributes[path] = attribute(self.gm, path)
        return self.graph.create_node("get_attr", path)

    def done(self, output: Any) -> fx.GraphModule:
        """The graph module, once all nodes but the output are written."""
        self.graph.output(output)
        return OuterModule(self.attributes, self.graph)
