"""Not a pass: writes a step graph, action by action."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from fxpipe import ops
from fxpipe.ir.graph import ACTION, FIRST, ONCE, SEED, STAGE, WRITTEN, add_input
from fxpipe.schedule import Action, Kind, Needs
from fxpipe.schedule.order import run_order
from passes.common.modes import is_checkpointed
from passes.to_step.defer import Defer
from passes.to_step.flows import Flows, Stage, is_differentiable
from passes.to_step.nodes import Nodes
from passes.to_step.options import StepOptions
from passes.to_step.replicas import Replicas
from passes.to_step.traffic import Place, Traffic

LOSS = "loss"
CALLER = "caller"  # where inputs and targets come from


class Writer:
    """Writes the actions of a schedule, in an order in which one thread can run them.

    ``labels`` are those of :class:`Nodes`, by default the stages' numbers.
    """

    def __init__(
        self, step: StepOptions, gm: fx.GraphModule, labels: Sequence[tuple[int, ...]] | None = None
    ) -> None:
        self.step, self.gm, self.schedule = step, gm, step.schedule
        self.flows = Flows(gm)
        self.stages, self.loss_stage = self.flows.stages, self.flows.loss_stage
        self.labels = labels or [(stage,) for stage in range(self.loss_stage)]
        self.nodes = Nodes(gm, step.schedule, step.devices, self.labels)
        self.nodes.attributes[LOSS] = step.loss
        self.traffic = Traffic(self.nodes)
        self.replicas = Replicas(gm, self.nodes, self.traffic)
        self.halved = {  # stages and micro-batches
            (action.stage, action.microbatch)
            for lane in range(len(self.schedule.lanes))
            for action in self.schedule.actions(lane)
            if action.kind is Kind.WEIGHT_GRAD
        }
        self.inputs: dict[fx.Node, fx.Node] = {}  # by those of the stage graph
        self.parts: dict[fx.Node, fx.Node] = {}  # of inputs
        self.given: dict[Place, fx.Node] = {}  # parts of inputs, where they have been brought
        self.here: dict[Place, Any] = {}
        self.grads: dict[Place, fx.Node] = {}  # of what has left a stage
        self.tapes: dict[tuple[int, int], fx.Node] = {}  # by stage and micro-batch
        self.losses: dict[int, fx.Node] = {}
        self.backs: dict[int, fx.Node] = {}  # of losses

    def actions(self) -> list[Action]:
        """All that there is to do, in an order in which it can be done."""
        lanes = [list(self.schedule.actions(lane)) for lane in range(len(self.schedule.lanes))]
        order = run_order(lanes, Needs(self.schedule, self.flows.edges).of)
        return [action for _, action in order]

    def write(self, actions: Sequence[Action]) -> fx.GraphModule:
        """The step graph."""
        self._inputs()
        last = {action.stage: action for action in actions}
        homes = self.replicas.homes  # whose gradients are done later
        for action in actions:
            self._act(action)
            if last[action.stage] == action and action.stage not in homes:
                self._optimize(action)
        self.replicas.gather(last)
        for stage in sorted(homes):
            self._optimize(last[stage])
        self._once()
        losses = tuple(self.losses[i] for i in range(self.schedule.microbatches))
        total = self.nodes.whole(ops.average, (losses, self.weights), "loss_all")
        return self.nodes.done((total, losses))

    # --------------------------------------------------------------------------- from the caller

    def _inputs(self) -> None:
        count, graph = self.schedule.microbatches, self.nodes.graph
        dims = iter(self.step.in_dims)
        size: tuple[Any, ...] = (((None,) * count), None)  # all micro-batches alike
        for node in self.gm.graph.find_nodes(op="placeholder"):
            if SEED in node.meta:
                if node.users:
                    self.parts[node] = self.nodes.whole(ops.seeds, (count,), "seeds")
                continue
            dim = next(dims)
            own = self.inputs[node] = graph.node_copy(node)
            if node.users:
                args: tuple[Any, ...] = (own, dim, count)
                if WRITTEN in node.meta:
                    args = (*args, True)
                parts = self.nodes.whole(ops.scatter, args, f"{node.name}_parts")
                self.parts[node] = parts
                if size[1] is None and dim is not None:
                    size = (parts, dim)
        self.targets = []
        for i, has_batch in enumerate(self.step.targets):
            args = add_input(graph, f"target_{i}"), 0 if has_batch else None, count
            self.targets.append(self.nodes.whole(ops.scatter, args, f"target_{i}_parts"))
        self.scale = add_input(graph, "scale", None)
        self.optimizer = add_input(graph, "optimizer", None)
        size = (*size, True) if self.step.summed else size
        self.weights = self.nodes.whole(ops.weights, size, "weights")

    def _value(self, value: Any, stage: int, microbatch: int) -> Any:
        """A value of the stage graph, as it has arrived at a stage."""
        if not isinstance(value, fx.Node):
            return value
        if FIRST in value.meta:
            return self.replicas.of(value)
        key = (value, stage, microbatch)
        if key not in self.here:  # straight from the caller
            self.here[key] = self._given(value, stage, microbatch)
        return self.here[key]

    def _given(self, value: fx.Node, stage: int, microbatch: int) -> fx.Node:
        """What the caller gives, brought to a stage: once for all its segments."""
        if value.op == "get_attr":  # given out as it is
            return self.nodes.attribute(str(value.target))
        whole = stage if stage == self.loss_stage else self.labels[stage][0]
        key = (value, whole, microbatch)
        if key not in self.given:
            part = self.nodes.part(self.parts[value], microbatch, value.name)
            if SEED not in value.meta:
                at = Action(stage, Kind.FORWARD, microbatch)
                (part,) = self.traffic.bring((part,), CALLER, at, [value.name])
            self.given[key] = part
        return self.given[key]

    # ----------------------------------------------------------------------------------- one action

    def _act(self, action: Action) -> None:
        is_last = action.stage == self.loss_stage - 1
        if action.kind is Kind.FORWARD:
            self._forward(action)
            if is_last:
                self._loss(Action(self.loss_stage, action.kind, action.microbatch))
        elif action.kind is Kind.WEIGHT_GRAD:
            tape = self.tapes[action.stage, action.microbatch]
            self.nodes.call(ops.weight_grad, (tape,), "weight_grad", action).meta[ACTION] = action
        else:
            if is_last:
                self._loss_backward(Action(self.loss_stage, Kind.BACKWARD, action.microbatch))
            self._backward(action)

    def _forward(self, at: Action) -> None:
        stage, microbatch = at.stage, at.microbatch
        own = self.stages[stage]
        self.here |= self.traffic.arrive(range(stage), at)
        args = tuple(self._value(arg, stage, microbatch) for arg in own.call.args)
        passed = tuple(own.call.args.index(value) for value in own.passed)
        module = self.nodes.module(self._stage_path(own, microbatch), at)
        replays = self._is_checkpointed(microbatch)
        args = module, args, passed, own.is_single, replays
        pair = self.nodes.call(ops.forward, args, "forward", at)
        pair.meta[ACTION] = at
        results = self.nodes.item(pair, 0, "results", at)
        self.tapes[stage, microbatch] = self.nodes.item(pair, 1, "tape", at)
        following: dict[int, dict[fx.Node, fx.Node]] = {}
        for index, value in enumerate(own.gives):
            made = self.nodes.item(results, index, value.name, at)
            self.here[value, stage, microbatch] = made
            target = self.flows.of[value].after(stage)
            if target is not None:
                following.setdefault(target, {})[value] = made
        for target, values in sorted(following.items()):
            self.traffic.leave(values, target, at)

    def _stage_path(self, own: Stage, microbatch: int) -> str:
        """The module to run: one whose gradients can be deferred, if the schedule does."""
        path, attributes = str(own.call.target), self.nodes.attributes
        attributes.setdefault(path, own.module)
        if (own.call.meta[STAGE], microbatch) in self.halved:
            path = f"{path}_deferred"
            if path not in attributes:
                attributes[path] = Defer()(own.module)
        return path

    def _is_checkpointed(self, microbatch: int) -> bool:
        return is_checkpointed(self.step.checkpoint, microbatch, self.schedule.microbatches)

    def _loss(self, at: Action) -> None:
        microbatch = at.microbatch
        self.here |= self.traffic.arrive(range(self.loss_stage), at)
        output = fx.map_arg(
            self.gm.graph.output_node().args[0],
            lambda value: self._value(value, self.loss_stage, microbatch),
        )
        targets = []
        for i, parts in enumerate(self.targets):
            part = self.nodes.part(parts, microbatch, f"target_{i}")
            targets += self.traffic.bring((part,), CALLER, at, [f"target_{i}"])
        tapes = tuple(self.tapes[stage, microbatch] for stage in range(self.loss_stage))
        args = self.nodes.module(LOSS, at), output, tuple(targets), microbatch, tapes
        pair = self.nodes.call(ops.loss, args, "loss", at)
        self.losses[microbatch] = self.nodes.item(pair, 0, "loss_value", at)
        self.tapes[self.loss_stage, microbatch] = self.nodes.item(pair, 1, "tape", at)

    def _loss_backward(self, at: Action) -> None:
        weight = self.nodes.part(self.weights, at.microbatch, "weight")
        args = self.tapes[self.loss_stage, at.microbatch], weight, self.scale
        grads = self.nodes.call(ops.loss_backward, args, "loss_backward", at)
        self.backs[at.microbatch] = grads
        self._taken_apart(self.gm.graph.output_node().args[0], grads, at)
        self._send_back(self.flows.outputs, at)

    def _taken_apart(self, structure: Any, grads: fx.Node, at: Action) -> None:
        """The gradients of the output, built like it, by the values that it is made of."""
        if isinstance(structure, fx.Node):
            if structure in self.flows.of:
                key = (structure, at.stage, at.microbatch)
                if key in self.grads:  # one value twice in the output
                    grads = self.nodes.call(ops.added, (self.grads[key], grads), "sum", at)
                self.grads[key] = grads
            return
        pairs = structure.items() if isinstance(structure, dict) else enumerate(structure)
        if isinstance(structure, dict | list | tuple):
            for index, part in pairs:
                if any(isinstance(leaf, fx.Node) for leaf in pytree.tree_leaves(part)):
                    self._taken_apart(part, self.nodes.item(grads, index, "grad", at), at)

    def _backward(self, at: Action) -> None:
        stage, microbatch = at.stage, at.microbatch
        own, tape = self.stages[stage], self.tapes[stage, microbatch]
        is_halved = at.kind is Kind.BACKWARD_INPUT
        if self._is_checkpointed(microbatch):
            args: tuple[Any, ...] = (tape, True) if is_halved else (tape,)
            self.nodes.call(ops.replay, args, "replay", at)
        whole = Action(stage, Kind.BACKWARD, microbatch)
        arrived = self.traffic.arrive(range(stage + 1, self.loss_stage + 1), whole)
        grads = tuple(arrived.get((value, stage, microbatch)) for value in own.gives)
        function = ops.backward_input if is_halved else ops.backward
        args = tape, grads
        if not any(grads):  # the loss may have some for the parameters
            args = *args, self.backs[microbatch]
        found = self.nodes.call(function, args, function.__name__, at)
        found.meta[ACTION] = at
        for i, arg in enumerate(own.call.args):
            if isinstance(arg, fx.Node) and arg in self.flows.of:
                self.grads[arg, stage, microbatch] = self.nodes.item(found, i, f"grad_{arg}", at)
        self._send_back(own.call.args, at)

    def _send_back(self, values: Sequence[Any], at: Action) -> None:
        """Let the gradients of values leave for the stages that they have come from."""
        previous: dict[int, dict[fx.Node, fx.Node]] = {}
        for value in dict.fromkeys(values):
            grad = self.grads.get((value, at.stage, at.microbatch))
            if grad is not None and is_differentiable(value):
                target = self.flows.of[value].before(at.stage)
                previous.setdefault(target, {})[value] = grad
        for target, grads in sorted(previous.items()):
            self.traffic.leave(grads, target, at)

    # ---------------------------------------------------------------------------- after the actions

    def _optimize(self, at: Action) -> None:
        """The stage's gradients are done. Those of a shared parameter meet where its value is
        from."""
        own = self.stages[at.stage]
        module = self.nodes.module(str(own.call.target), at)
        args = self.optimizer, module, self.flows.foreign(own)
        self.nodes.call(ops.optimize, args, "optimize", at)

    def _once(self) -> None:
        """What comes after all micro-batches: running statistics, inputs written back."""
        count = self.schedule.microbatches
        for node in self.gm.graph.nodes:
            if ONCE not in node.meta:
                continue
            *first, parts = node.args
            args = fx.map_arg(first, self._whole)
            every = tuple(
                fx.map_arg(part, partial(self._made, node.meta[STAGE], i))
                for i in range(count)
                for part in parts
            )
            made = self.nodes.whole(node.target, (*args, every), node.name)
            self.nodes.place(made, node.meta[STAGE], count - 1)

    def _whole(self, value: fx.Node) -> fx.Node:
        is_state = value.op == "get_attr"
        return self.nodes.attribute(str(value.target)) if is_state else self.inputs[value]

    def _made(self, stage: int, microbatch: int, value: fx.Node) -> Any:
        home = self.flows.of[value].stages[0] if value in self.flows.of else stage
        return self.here[value, home, microbatch]
