"""Writes a step graph for pass "step", action by action, in an order that one thread can run.

::

    inputs ─ forward ─ ... ─ loss ─ ... ─ backward ─ ... ─ optimize ─ ... ─ the mini-batch's loss
             └────────── the actions of the schedule ───┘

The parameters of a stage are optimized right after the stage's last action or, if replicas of them
in other stages have gradients for them, after the last action of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import ONCE, STAGE, UPDATES
from fxpipe.schedule import Action, Kind
from passes.to_step.backward import (
    write_backward,
    write_recomputation,
    write_reload,
    write_weight_grad,
)
from passes.to_step.draft import Draft
from passes.to_step.forward import write_forward, write_offload
from passes.to_step.loss import write_loss, write_loss_backward


def write(draft: Draft, actions: Sequence[Action]) -> fx.GraphModule:
    """The step graph of a schedule; ``actions`` are all its actions, in an order to run them in,
    with a recomputation of each checkpointed cell."""
    last = {action.stage: action for action in actions}
    homes = draft.replicas.homes  # their parameters get gradients from replicas in other stages
    for i, action in enumerate(actions):
        if draft.is_offloaded(action) and action.kind is Kind.RECOMPUTE:
            _bring_inputs(draft, action, actions[i:])
        _write_action(draft, action)
        if last[action.stage] == action and action.stage not in homes:
            _write_optimize(draft, action)
    draft.replicas.gather(last)
    for stage in sorted(homes):
        _write_optimize(draft, last[stage])
    _write_once(draft)
    losses = tuple(draft.losses[i] for i in range(draft.schedule.microbatches))
    total = draft.nodes.whole(ops.average, (losses, draft.caller.weights), "loss_all")
    return draft.nodes.done((total, losses))


def _write_action(draft: Draft, action: Action) -> None:
    is_last_stage = action.stage == draft.flows.loss_stage - 1
    if action.kind is Kind.FORWARD:
        write_forward(draft, action)
        if is_last_stage:
            write_loss(draft, action.microbatch)
        if draft.is_offloaded(action):
            write_offload(draft, action)
    elif action.kind is Kind.WEIGHT_GRAD:
        write_weight_grad(draft, action)
    elif draft.is_offloaded(action) and action.kind is Kind.RECOMPUTE:
        write_reload(draft, action)
    elif action.kind is Kind.RECOMPUTE:
        if is_last_stage:  # ahead of it, since it frees what the loss has saved
            write_loss_backward(draft, action.microbatch)
        write_recomputation(draft, action)
    else:
        if is_last_stage and not draft.is_checkpointed(action):
            write_loss_backward(draft, action.microbatch)
        write_backward(draft, action)


def _bring_inputs(draft: Draft, reload: Action, behind: Sequence[Action]) -> None:
    """Bring what the lane's next forward takes from the caller of the step, ahead of a reload: it
    may come over the same link from the host, and would wait there for all that is reloaded."""
    lane = draft.nodes.lane(reload.stage)
    forwards = (each for each in behind if each.kind is Kind.FORWARD)
    following = next((each for each in forwards if draft.nodes.lane(each.stage) == lane), None)
    if following is not None:
        for value in draft.flows.stages[following.stage].call.args:
            if isinstance(value, fx.Node) and value.op == "placeholder":
                draft.value(value, following)


def _write_optimize(draft: Draft, at: Action) -> None:
    """Write the optimizer's step of a stage's parameters, whose gradients are done.

    A parameter that several stages use (pass "shared") is stepped in the stage that it lives in,
    and one whose memory another stage reads as another tensor at the end, by the caller.
    """
    flows, stage = draft.flows, draft.flows.stages[at.stage]
    module = draft.nodes.module(str(stage.call.target), stage.module, at)
    args: tuple[Any, ...] = draft.caller.optimizer, module, flows.foreign(stage)
    if later := flows.read_elsewhere(stage):
        args = *args, later
    draft.nodes.call(ops.optimize, args, "optimize", at)


def _write_once(draft: Draft) -> None:
    """Write the nodes that run once, after all micro-batches: running statistics are updated, and
    inputs that the model writes to are written back."""
    for node in draft.gm.graph.nodes:
        if ONCE in node.meta:
            *first, parts = node.args
            args: Any = fx.map_arg(first, partial(_for_all, draft))
            every = tuple(
                fx.map_arg(part, partial(_made, draft, node.meta[STAGE], i))
                for i in range(draft.schedule.microbatches)
                for part in parts
            )
            made = draft.nodes.whole(node.target, (*args, every), node.name)
            draft.nodes.place(made, node.meta[STAGE], draft.schedule.microbatches - 1)
            made.meta[UPDATES] = node.meta[UPDATES]


def _for_all(draft: Draft, value: fx.Node) -> fx.Node:
    """The node of the step graph for a buffer, or for an input of the whole mini-batch."""
    if value.op == "get_attr":
        return draft.nodes.attribute(str(value.target))
    return draft.caller.inputs[value]


def _made(draft: Draft, stage: int, microbatch: int, value: fx.Node) -> fx.Node:
    """The node of a micro-batch's value in the stage that makes it; for an input, the node of the
    part that has been brought to ``stage``."""
    home = draft.flows.of[value].stages[0] if value in draft.flows.of else stage
    return draft.cell(home, microbatch).values[value]
