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
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxpipe import ops
from fxpipe.graph import (
    ACTION,
    DEVICE,
    FIRST,
    MICROBATCH,
    ONCE,
    SEED,
    STAGE,
    STREAM,
    VALUE,
    WRITTEN,
    OuterModule,
    attribute,
)
from fxpipe.runtime.streams import COMPUTE, COPY, stream_name
from fxpipe.schedule import Action, Kind, Needs, Schedule, validate
from passes.checkpoint import is_checkpointed
from passes.defer import Defer
from passes.segments import checkpointed_by_segments

LOSS = "loss"


class StepError(ValueError):
    """A schedule and a stage graph do not go together."""


@dataclass(frozen=True)
class Step:
    """Stage graph → step graph, which returns the loss and the losses of the micro-batches.

    Args:
        loss: a module that is called with the output, as the stage graph gives it, and a tuple of
            the target's tensors.
        schedule: as many stages as there are, and the number of micro-batches.
        devices: one for each stage.
        in_dims: as for pass "microbatch".
        targets: for each tensor of the target, whether it has a batch dimension (the first).
        checkpoint, checkpoint_segments: as for pass "checkpoint".

    Raises :class:`StepError` or :class:`fxpipe.schedule.ScheduleError` if the schedule does not
    fit.
    """

    name: ClassVar[str] = "step"
    loss: nn.Module
    schedule: Schedule
    devices: tuple[str, ...]
    in_dims: tuple[int | None, ...]
    targets: tuple[bool, ...] = ()
    checkpoint: str = "never"
    checkpoint_segments: int = 1

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        stages = len(gm.graph.find_nodes(op="call_module"))
        if self.schedule.stages != stages:
            raise StepError(
                f"the schedule {self.schedule.name!r} has {self.schedule.stages} stages, the "
                f"pipeline {stages}: give a schedule of {stages}, or as many devices"
            )
        return _Writer(self, gm).write()


@dataclass
class _Flow:
    """A value of the stage graph, and the stages that it visits, from its own on."""

    value: fx.Node
    stages: list[int]

    def before(self, stage: int) -> int:
        """Where it has come from."""
        return self.stages[self.stages.index(stage) - 1]

    def after(self, stage: int) -> int | None:
        """Where it goes from there."""
        later = self.stages[self.stages.index(stage) + 1 :]
        return later[0] if later else None


@dataclass
class _Stage:
    """What a stage takes and gives: nodes of the stage graph."""

    call: fx.Node
    results: list[fx.Node]  # in the order of what it returns
    passed: list[fx.Node] = field(default_factory=list)  # arguments that go on to others

    @property
    def is_single(self) -> bool:
        return self.results == [self.call]


class _Writer:
    """Writes a step graph, action by action."""

    def __init__(self, step: Step, gm: fx.GraphModule) -> None:
        self.step, self.gm, self.schedule = step, gm, step.schedule
        self.new = fx.Graph()
        self.attributes: dict[str, Any] = {LOSS: step.loss}
        self.stages = [_stage(call) for call in gm.graph.find_nodes(op="call_module")]
        self.loss_stage = len(self.stages)
        modules = (attribute(gm, str(stage.call.target)) for stage in self.stages)
        self.shared = {
            id(attribute(module, str(node.args[0].target)))
            for module in modules
            for node in module.graph.find_nodes(op="call_function", target=ops.share)
            if node.args[0].op == "get_attr"
        }
        self.outputs = gm.graph.output_node().all_input_nodes
        self.flows = self._flows()
        self.halved = {  # stages
            action.stage
            for lane in range(len(self.schedule.lanes))
            for action in self.schedule.actions(lane)
            if action.kind is Kind.WEIGHT_GRAD
        }
        self.parts: dict[fx.Node, fx.Node] = {}  # of inputs
        self.here: dict[tuple[fx.Node, int, int], Any] = {}  # value, stage, micro-batch
        self.grads: dict[tuple[fx.Node, int, int], fx.Node] = {}  # of what has left a stage
        self.tapes: dict[tuple[int, int], fx.Node] = {}
        self.going: dict[tuple[int, int, int], tuple[list[fx.Node], Any]] = {}  # from, to, mb
        self.losses: dict[int, fx.Node] = {}
        self.replicas: dict[fx.Node, fx.Node] = {}  # of what is brought once

    # ------------------------------------------------------------------------------ what goes where

    def _flows(self) -> dict[fx.Node, _Flow]:
        flows = {}
        for j, stage in enumerate(self.stages):
            for value in stage.results:
                users = {self._stage_of(user) for user in value.users if ONCE not in user.meta}
                later = sorted(user for user in users if user is not None and user != j)
                flows[value] = _Flow(value, [j, *later])
        for value, flow in flows.items():
            for j in flow.stages[1:-1]:
                self.stages[j].passed.append(value)
        return flows

    def _stage_of(self, user: fx.Node) -> int | None:
        return self.loss_stage if user.op == "output" else user.meta.get(STAGE)

    def lane(self, stage: int) -> int:
        return self.schedule.placement[min(stage, self.loss_stage - 1)]

    def device(self, stage: int) -> str:
        return self.step.devices[min(stage, self.loss_stage - 1)]

    # -------------------------------------------------------------------------------------- writing

    def write(self) -> fx.GraphModule:
        last_stage = self.loss_stage - 1  # which the loss is computed with
        edges = sorted(
            {
                (a, min(b, last_stage))
                for flow in self.flows.values()
                for a, b in zip(flow.stages, flow.stages[1:], strict=False)
                if a != last_stage
            }
        )
        validate(self.schedule, edges=edges)
        self._inputs()
        actions = _in_order(self.schedule, edges)
        last = {action.stage: action for action in actions}
        homes = {self._owner(brought) for brought in self._brought()}
        for action in actions:
            if action.kind is Kind.FORWARD:
                self._forward(action.stage, action.microbatch)
                if action.stage == self.loss_stage - 1:
                    self._loss(action.microbatch)
            elif action.kind is Kind.WEIGHT_GRAD:
                tape = self.tapes[action.stage, action.microbatch]
                self._call(ops.weight_grad, (tape,), "weight_grad", action).meta[ACTION] = action
            else:
                if action.stage == self.loss_stage - 1:
                    self._loss_backward(action.microbatch)
                self._backward(action)
            if last[action.stage] == action and action.stage not in homes:
                self._optimize(action)
        self._gather(last)
        for stage in sorted(homes):
            self._optimize(last[stage])
        self._once()
        count = self.schedule.microbatches
        losses = tuple(self.losses[i] for i in range(count))
        total = self.new.create_node(
            "call_function", ops.average, (losses, self.weights), name="loss_all"
        )
        self.new.output((total, losses))
        return OuterModule(self.attributes, self.new)

    def _inputs(self) -> None:
        count = self.schedule.microbatches
        placeholders = self.gm.graph.find_nodes(op="placeholder")
        dims = iter(self.step.in_dims)
        size: tuple[Any, ...] | None = None
        for node in placeholders:
            if SEED in node.meta:
                if node.users:
                    self.parts[node] = self.new.create_node(
                        "call_function", ops.seeds, (count,), name="seeds"
                    )
                continue
            dim = next(dims)
            own = self.new.node_copy(node)
            self.here[node, -1, -1] = own
            args: tuple[Any, ...] = (own, dim, count)
            if WRITTEN in node.meta:
                args = (*args, True)
            if node.users:
                parts = self.new.create_node(
                    "call_function", ops.scatter, args, name=f"{node.name}_parts"
                )
                self.parts[node] = parts
                if size is None and dim is not None:
                    size = (parts, dim)
        self.targets = []
        for i, has_batch in enumerate(self.step.targets):
            own = self.new.placeholder(f"target_{i}")
            args = (own, 0 if has_batch else None, count)
            self.targets.append(
                self.new.create_node("call_function", ops.scatter, args, name=f"target_{i}_parts")
            )
        self.scale = self.new.placeholder("scale", default_value=None)
        self.optimizer = self.new.placeholder("optimizer", default_value=None)
        if size is None:
            size = (((None,) * count), None)
        weights = self.new.create_node("call_function", ops.weights, size, name="weights")
        self.weights = weights

    def _call(
        self, function: Any, args: tuple[Any, ...], name: str, at: Action, role: str = COMPUTE
    ) -> fx.Node:
        stage = min(at.stage, self.loss_stage - 1)
        name = f"{name}_s{stage}_mb{at.microbatch}"
        node = self.new.create_node("call_function", function, args, name=name)
        self._place(node, at.stage, at.microbatch, role)
        return node

    def _part(self, values: fx.Node, microbatch: int, name: str) -> fx.Node:
        """A micro-batch's part of what the caller has given for all."""
        name = f"{name}_mb{microbatch}"
        args = values, microbatch
        return self.new.create_node("call_function", operator.getitem, args, name=name)

    def _place(self, node: fx.Node, stage: int, microbatch: int, role: str = COMPUTE) -> None:
        own = min(stage, self.loss_stage - 1)
        device = self.device(own)
        node.meta |= {
            STAGE: own,
            MICROBATCH: microbatch,
            DEVICE: torch.device(device),
            STREAM: stream_name(device, role),
        }

    def _item(self, values: fx.Node, index: int, name: str, at: Action) -> fx.Node:
        return self._call(operator.getitem, (values, index), name, at)

    def _module(self, path: str, at: Action) -> fx.Node:
        name = f"{path}_mb{at.microbatch}_module"
        node = self.new.create_node("get_attr", path, name=name)
        self._place(node, at.stage, at.microbatch)
        return node

    # ----------------------------------------------------------------------------------- one action

    def _forward(self, stage: int, microbatch: int) -> None:
        at = Action(stage, Kind.FORWARD, microbatch)
        own = self.stages[stage]
        self._arrive(stage, microbatch)
        args = tuple(self._value(arg, stage, microbatch) for arg in own.call.args)
        passed = tuple(own.call.args.index(value) for value in own.passed)
        checkpoint = self._is_checkpointed(microbatch) and self.step.checkpoint_segments == 1
        path = self._stage_path(own, microbatch)
        pair = self._call(
            ops.forward,
            (self._module(path, at), args, passed, own.is_single, checkpoint),
            "forward",
            at,
        )
        pair.meta[ACTION] = at
        results = self._item(pair, 0, "results", at)
        self.tapes[stage, microbatch] = self._item(pair, 1, "tape", at)
        for index, value in enumerate((*own.results, *own.passed)):
            self.here[value, stage, microbatch] = self._item(results, index, value.name, at)
        following: dict[int, list[fx.Node]] = {}
        for value in (*own.results, *own.passed):
            target = self.flows[value].after(stage)
            if target is not None:
                following.setdefault(target, []).append(value)
        for target, values in sorted(following.items()):
            made = [self.here[value, stage, microbatch] for value in values]
            self.going[stage, target, microbatch] = values, self._left(made, target, at)

    def _stage_path(self, own: _Stage, microbatch: int) -> str:
        """The module to run: one whose gradients can be deferred, if the schedule does, or one
        that checkpoints its segments. Not one for some micro-batches and the other for others:
        what is deferred is summed later."""
        path = str(own.call.target)
        stage = attribute(self.gm, path)
        if self.step.checkpoint != "never" and self.step.checkpoint_segments > 1:
            if self._is_checkpointed(microbatch):
                path = f"{path}_segments"
                if path not in self.attributes:
                    count = self.step.checkpoint_segments
                    self.attributes[path] = checkpointed_by_segments(stage, count)
        elif own.call.meta[STAGE] in self.halved:
            path = f"{path}_deferred"
            if path not in self.attributes:
                self.attributes[path] = Defer()(stage)
        self.attributes.setdefault(path, stage)
        self.attributes.setdefault(str(own.call.target), stage)
        return path

    def _is_checkpointed(self, microbatch: int) -> bool:
        return is_checkpointed(self.step.checkpoint, microbatch, self.schedule.microbatches)

    def _value(self, value: Any, stage: int, microbatch: int) -> Any:
        """A value of the stage graph, as it has arrived at a stage."""
        if not isinstance(value, fx.Node):
            return value
        key = (value, stage, microbatch)
        if key not in self.here:  # an input: straight from the caller
            if FIRST in value.meta:
                return self._replica(value)
            if value.op == "get_attr":  # given out as it is
                self.attributes[str(value.target)] = attribute(self.gm, str(value.target))
                self.here[key] = self.new.node_copy(value)
                return self.here[key]
            at = Action(stage, Kind.FORWARD, microbatch)
            part = self._part(self.parts[value], microbatch, value.name)
            self.here[key] = part
            if SEED not in value.meta:
                self.here[key] = self._arrived((part,), "caller", at, [value.name])[0]
        return self.here[key]

    def _arrive(self, stage: int, microbatch: int) -> None:
        """Bring what other stages have made for this one."""
        at = Action(stage, Kind.FORWARD, microbatch)
        for source in range(stage):
            if (source, stage, microbatch) in self.going:
                values, made = self.going.pop((source, stage, microbatch))
                self._bring(values, made, source, at, self.here)

    def _left(self, values: list[fx.Node], target: int, at: Action) -> Any:
        """Let values leave for another stage: its copy stream waits for them."""
        if self.lane(at.stage) == self.lane(target):
            return tuple(values)
        device = self.device(at.stage)
        streams = stream_name(device, COMPUTE), stream_name(device, COPY)
        return self._call(ops.wait, (tuple(values), *streams), "wait", at)

    def _bring(
        self,
        values: list[fx.Node],
        made: Any,
        source: int,
        at: Action,
        where: dict[tuple[fx.Node, int, int], Any],
    ) -> None:
        """Note, by value, what has come from another stage."""
        if isinstance(made, fx.Node):
            start = stream_name(self.device(source), COPY)
            kind = "" if at.kind is Kind.FORWARD else "grad_"
            made = self._arrived(made, start, at, [f"{kind}{value}" for value in values])
        for value, node in zip(values, made, strict=True):
            where[value, at.stage, at.microbatch] = node

    def _arrived(
        self, together: Any, start: str, at: Action, names: Sequence[str]
    ) -> list[fx.Node]:
        """Send values to a stage's device, and let it wait for them."""
        device = self.device(at.stage)
        streams = stream_name(device, COPY), stream_name(device, COMPUTE)
        sent = self._call(ops.send, (together, start, streams[0]), "send", at, COPY)
        waited = self._call(ops.wait, (sent, *streams), "wait", at)
        return [self._item(waited, i, name, at) for i, name in enumerate(names)]

    def _loss(self, microbatch: int) -> None:
        at = Action(self.loss_stage, Kind.FORWARD, microbatch)
        self._arrive(self.loss_stage, microbatch)
        output = fx.map_arg(
            self.gm.graph.output_node().args[0],
            lambda value: self._value(value, self.loss_stage, microbatch),
        )
        targets = []
        for i, parts in enumerate(self.targets):
            part = self._part(parts, microbatch, f"target_{i}")
            targets += self._arrived((part,), "caller", at, [f"target_{i}"])
        module = self._module(LOSS, at)
        pair = self._call(ops.loss, (module, output, tuple(targets), microbatch), "loss", at)
        self.losses[microbatch] = self._item(pair, 0, "loss_value", at)
        self.tapes[self.loss_stage, microbatch] = self._item(pair, 1, "tape", at)

    def _loss_backward(self, microbatch: int) -> None:
        at = Action(self.loss_stage, Kind.BACKWARD, microbatch)
        weight = self._part(self.weights, microbatch, "weight")
        tape = self.tapes[self.loss_stage, microbatch]
        grads = self._call(ops.loss_backward, (tape, weight, self.scale), "loss_backward", at)
        structure = self.gm.graph.output_node().args[0]
        self._taken_apart(structure, grads, at)
        self._send_back(self.outputs, at)

    def _taken_apart(self, structure: Any, grads: fx.Node, at: Action) -> None:
        """The gradients of the output, built like it, by the values that it is made of."""
        if isinstance(structure, fx.Node):
            if structure in self.flows:
                key = (structure, at.stage, at.microbatch)
                if key in self.grads:  # one value twice in the output
                    grads = self._call(ops.added, (self.grads[key], grads), "sum", at)
                self.grads[key] = grads
            return
        pairs = structure.items() if isinstance(structure, dict) else enumerate(structure)
        if isinstance(structure, dict | list | tuple):
            for index, part in pairs:
                if any(isinstance(leaf, fx.Node) for leaf in pytree.tree_leaves(part)):
                    self._taken_apart(part, self._item(grads, index, "grad", at), at)

    def _backward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        own = self.stages[stage]
        tape = self.tapes[stage, microbatch]
        is_halved = action.kind is Kind.BACKWARD_INPUT
        if self._is_checkpointed(microbatch) and self.step.checkpoint_segments == 1:
            args = (tape, True) if is_halved else (tape,)
            self._call(ops.replay, args, "replay", action)
        grads = self._gradients(own, stage, microbatch)
        function = ops.backward_input if is_halved else ops.backward
        found = self._call(function, (tape, grads), function.__name__, action)
        found.meta[ACTION] = action
        for i, arg in enumerate(own.call.args):
            if isinstance(arg, fx.Node) and arg in self.flows:
                self.grads[arg, stage, microbatch] = self._item(found, i, f"grad_{arg}", action)
        self._send_back(own.call.args, action)

    def _send_back(self, values: Sequence[Any], at: Action) -> None:
        """Let the gradients of values leave for the stages that they have come from."""
        previous: dict[int, list[fx.Node]] = {}
        for value in dict.fromkeys(values):
            if (value, at.stage, at.microbatch) in self.grads and _is_differentiable(value):
                previous.setdefault(self.flows[value].before(at.stage), []).append(value)
        for target, each in sorted(previous.items()):
            made = [self.grads[value, at.stage, at.microbatch] for value in each]
            self.going[at.stage, target, at.microbatch] = each, self._left(made, target, at)

    def _gradients(self, own: _Stage, stage: int, microbatch: int) -> tuple[Any, ...]:
        """Those of all that the stage has given, brought here from where each went next."""
        at = Action(stage, Kind.BACKWARD, microbatch)
        arrived: dict[tuple[fx.Node, int, int], Any] = {}
        for source in range(stage + 1, self.loss_stage + 1):
            if (source, stage, microbatch) in self.going:
                values, made = self.going.pop((source, stage, microbatch))
                self._bring(values, made, source, at, arrived)
        return tuple(
            arrived.get((value, stage, microbatch)) for value in (*own.results, *own.passed)
        )

    def _optimize(self, at: Action) -> None:
        """The stage's gradients are done. Those of a shared parameter meet where its value is
        from."""
        path = str(self.stages[at.stage].call.target)
        stage = attribute(self.gm, path)
        own = stage.graph.find_nodes(op="call_function", target=ops.share)
        owned = {
            id(attribute(stage, str(node.args[0].target)))
            for node in own
            if node.args[0].op == "get_attr"
        }
        shared = tuple(
            name
            for name, parameter in stage.named_parameters()
            if id(parameter) in self.shared and id(parameter) not in owned
        )
        args = self.optimizer, self._module(path, at), shared
        self._call(ops.optimize, args, "optimize", at)

    # -------------------------------------------------------------------------------- tied weights

    def _brought(self) -> list[fx.Node]:
        """What other stages than its own are brought once (pass "tied")."""
        return list(self.gm.graph.find_nodes(op="call_function", target=ops.bring))

    def _owner(self, brought: fx.Node) -> int:
        """The stage where a parameter lives."""
        parameter = attribute(self.gm, str(brought.args[0].target))  # type: ignore[union-attr]
        for j, stage in enumerate(self.stages):
            module = attribute(self.gm, str(stage.call.target))
            for node in module.graph.find_nodes(op="call_function", target=ops.share):
                source = node.args[0]
                if source.op == "get_attr" and attribute(module, source.target) is parameter:
                    return j
        raise StepError(f"{brought.name} is of no stage's parameters")

    def _replica(self, brought: fx.Node) -> fx.Node:
        """A replica of a parameter, for all micro-batches of a stage."""
        if brought not in self.replicas:
            source, *streams = brought.args
            path = str(source.target)  # type: ignore[union-attr]
            self.attributes[path] = attribute(self.gm, path)
            parameter = self.new.create_node("get_attr", path)
            replica = self.new.create_node(
                "call_function", ops.replicate, (parameter, *streams), name=f"{brought}_replica"
            )
            self._place(replica, brought.meta[STAGE], 0)
            self.replicas[brought] = replica
        return self.replicas[brought]

    def _gather(self, last: dict[int, Action]) -> None:
        """Bring the gradients of replicas home, once their stages' backwards are done."""
        for brought, replica in self.replicas.items():
            stage, home = brought.meta[STAGE], self._owner(brought)
            at = last[stage]
            grad = self._call(ops.gathered, (replica,), f"{brought}_gathered", at)
            made = self._left([grad], home, at)
            start = stream_name(self.device(stage), COPY)
            (arrived,) = self._arrived(made, start, last[home], [f"{brought}_grad"])
            args = replica.args[0], arrived
            self._call(ops.accumulate, args, f"{brought}_accumulate", last[home])

    def _once(self) -> None:
        """What comes after all micro-batches: running statistics, inputs written back."""
        for node in self.gm.graph.nodes:
            if ONCE not in node.meta:
                continue
            stage = node.meta[STAGE]
            *first, parts = node.args

            def top(value: fx.Node) -> fx.Node:
                if value.op == "get_attr":
                    self.attributes[str(value.target)] = attribute(self.gm, str(value.target))
                    return self.new.node_copy(value)
                made: fx.Node = self.here[value, -1, -1]
                return made

            args = fx.map_arg(first, top)
            every = tuple(
                fx.map_arg(part, partial(self._made, stage, i))
                for i in range(self.schedule.microbatches)
                for part in parts
            )
            made = self.new.create_node(
                "call_function", node.target, (*args, every), name=node.name
            )
            self._place(made, stage, self.schedule.microbatches - 1)

    def _made(self, stage: int, microbatch: int, value: fx.Node) -> Any:
        return self.here[value, stage, microbatch]


def _stage(call: fx.Node) -> _Stage:
    items = [user for user in call.users if user.target is operator.getitem]
    if not items:
        return _Stage(call, [call])
    return _Stage(call, sorted(items, key=lambda item: item.args[1]))  # type: ignore[arg-type, return-value]


def _in_order(schedule: Schedule, edges: Sequence[tuple[int, int]]) -> list[Action]:
    """All actions of a valid schedule: what another needs before it, each lane's in its order."""
    needs = Needs(schedule, edges)
    lanes = [list(schedule.actions(lane)) for lane in range(len(schedule.lanes))]
    at = [0] * len(lanes)
    done: set[Action] = set()
    order: list[Action] = []
    while len(order) < sum(map(len, lanes)):
        ready = [
            (lane, actions[at[lane]])
            for lane, actions in enumerate(lanes)
            if at[lane] < len(actions) and done.issuperset(needs.of(actions[at[lane]]))
        ]
        for lane, action in ready:
            at[lane] += 1
            done.add(action)
            order.append(action)
    return order


def _is_differentiable(value: fx.Node) -> bool:
    """Whether gradients can come back for a value of the stage graph: not for integers, say."""
    leaves = pytree.tree_leaves(value.meta.get(VALUE))
    return any(isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) for x in leaves)
