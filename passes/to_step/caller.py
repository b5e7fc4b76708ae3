"""Writes the inputs of a step graph, which the caller of the step gives, for pass "step".

::

    x ──────── scatter ─┬─ part of mb 0 ─ send ─ stage 0
                        └─ part of mb 1 ─ send ─ stage 0
    target ─── scatter ─┬─ part of mb 0 ─ send ─ loss
                        └─ part of mb 1 ─ send ─ loss
    scale      the factor of a gradient scaler, or None
    optimizer  steps the parameters of a stage when their gradients are done, or None
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from fxpipe import ops
from fxpipe.ir.graph import OF_THE_STEP, SEED, WRITTEN, add_input
from fxpipe.runtime.microbatch import InDim
from fxpipe.schedule import Action, Kind
from passes.to_step.nodes import Nodes
from passes.to_step.traffic import Place, Traffic

LOSS_WEIGHT = "loss_weight"  # the path of the module that gives the weights of losses
CALLER = "caller"  # the name of the stream on which the caller has made inputs and targets


class Caller:
    """Writes the inputs of the step graph, and brings their parts to the stages that use them.

    Args:
        in_dims: the batch dimension of each input of the stage graph, None for one that all
            micro-batches share.
        targets: for each tensor of the target, whether it has a batch dimension (the first).
        summed: whether the loss is a sum over the rows, so that each micro-batch counts in full.
        loss_weight: gives the weight of a micro-batch's loss from its parts of the target, or of
            the inputs; None: its number of rows.
        weighs_inputs: whether ``loss_weight`` is called with the inputs, in place of the target.
    """

    def __init__(
        self,
        nodes: Nodes,
        traffic: Traffic,
        in_dims: Sequence[InDim],
        targets: Sequence[bool],
        summed: bool,
        loss_weight: nn.Module | None = None,
        weighs_inputs: bool = False,
    ) -> None:
        self.nodes, self.traffic = nodes, traffic
        self.count = nodes.schedule.microbatches
        # For each input of the stage graph that of the step graph, and the node of all its parts.
        self.inputs: dict[fx.Node, fx.Node] = {}
        self._parts: dict[fx.Node, fx.Node] = {}
        # The parts, each of one micro-batch, that have been brought to a stage already.
        self._brought: dict[Place, fx.Node] = {}
        self._loss_weight, self._weighs_inputs = loss_weight, weighs_inputs
        sizes = self._scatter_inputs(in_dims)
        self._targets = [
            self._scatter(add_input(nodes.graph, f"target_{i}"), 0 if has_batch else None)
            for i, has_batch in enumerate(targets)
        ]
        self.scale = add_input(nodes.graph, "scale", None)
        self.optimizer = add_input(nodes.graph, "optimizer", None)
        for node in self.scale, self.optimizer:
            node.meta[OF_THE_STEP] = True
        self.weights = self._weights(sizes, summed)

    def _weights(self, sizes: tuple[Any, int | None], summed: bool) -> fx.Node:
        """The factors of the micro-batches' losses."""
        if self._loss_weight is None:
            args = (*sizes, True) if summed else sizes
            return self.nodes.whole(ops.weights, args, "weights")
        function = self.nodes.given(LOSS_WEIGHT, self._loss_weight)
        inputs = (self._parts[node] for node in self.inputs)
        parts = tuple(inputs if self._weighs_inputs else self._targets)
        return self.nodes.whole(ops.loss_weights, (function, parts), "weights")

    def _scatter_inputs(self, in_dims: Sequence[InDim]) -> tuple[Any, int | None]:
        """Scatter all inputs. Returns the parts of the first input that has a batch dimension,
        which give the sizes of the micro-batches, and that dimension."""
        dims = iter(in_dims)
        # Where no input has a batch dimension, all micro-batches weigh the same.
        sizes: tuple[Any, int | None] = (None,) * self.count, None
        for node in self.nodes.gm.graph.find_nodes(op="placeholder"):
            if SEED in node.meta:
                if node.users:
                    self._parts[node] = self.nodes.whole(ops.seeds, (self.count,), "seeds")
                continue
            dim = next(dims)
            self.inputs[node] = self.nodes.graph.node_copy(node)
            if not node.users and not self._weighs_inputs:
                continue
            copied = (True,) if WRITTEN in node.meta else ()
            self._parts[node] = self._scatter(self.inputs[node], dim, *copied)
            if sizes[1] is None and isinstance(dim, int):
                sizes = self._parts[node], dim
        return sizes

    def _scatter(self, tensor: fx.Node, dim: InDim, *copied: bool) -> fx.Node:
        args = tensor, dim, self.count, *copied
        return self.nodes.whole(ops.scatter, args, f"{tensor.name}_parts")

    def part(self, value: fx.Node, stage: int, microbatch: int) -> fx.Node:
        """A micro-batch's part of an input, brought to a stage once for all segments of it."""
        key = value, self.nodes.whole_stage(stage), microbatch
        if key not in self._brought:
            part = self.nodes.part(self._parts[value], microbatch, value.name)
            if SEED not in value.meta:
                part = self._bring(part, Action(stage, Kind.FORWARD, microbatch), value.name)
            self._brought[key] = part
        return self._brought[key]

    def targets(self, at: Action) -> tuple[fx.Node, ...]:
        """A micro-batch's part of the target, brought to where the loss is computed."""
        return tuple(
            self._bring(self.nodes.part(parts, at.microbatch, name), at, name)
            for name, parts in ((f"target_{i}", p) for i, p in enumerate(self._targets))
        )

    def _bring(self, part: fx.Node, at: Action, name: str) -> fx.Node:
        (brought,) = self.traffic.bring((part,), CALLER, at, [name])
        return brought
