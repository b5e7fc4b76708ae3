"""Writes the backward of a stage for a micro-batch, whole or in two halves, for pass "step".

::

    (arrive) ── gradients of the results ──── backward ── gradients of the arguments ── (leave)
                                               tape ┘

    in halves   ... ── backward_input ── gradients of the arguments ── (leave)
                           tape ─────── weight_grad, whenever the schedule has time for it

    checkpointed           tape ─────── replay, ahead of the backward: it waits for no gradient

    on the host            tape ─────── reload, an action ahead of the backward
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import SHAPES
from fxpipe.schedule import Action, Kind
from passes.common.shapes import shapes_of_gradient
from passes.to_step.draft import Draft
from passes.to_step.flows import is_differentiable


def write_backward(draft: Draft, at: Action) -> None:
    """Write the backward of an action's stage and micro-batch: the whole of it or, if the action is
    a BACKWARD_INPUT, its first half."""
    is_halved = at.kind is Kind.BACKWARD_INPUT
    stage = draft.flows.stages[at.stage]
    cell = draft.cell(at.stage, at.microbatch)
    loss_stage = draft.flows.loss_stage
    whole = Action(at.stage, Kind.BACKWARD, at.microbatch)
    arrived = draft.traffic.arrive(range(at.stage + 1, loss_stage + 1), whole)
    grads = tuple(arrived.get(value) for value in stage.gives)
    function = ops.backward_input if is_halved else ops.backward
    args: tuple[Any, ...] = cell.tape, grads
    # If no gradient arrives from a later stage, no data dependency makes this backward come after
    # the loss's. The loss may still have gradients for parameters of this stage, so that the loss's
    # backward is made an input.
    if not any(grads):
        args = *args, draft.cell(loss_stage, at.microbatch).backward
    cell.backward = draft.nodes.call(function, args, function.__name__, at)
    draft.note(cell.backward, at)
    for i, arg in enumerate(stage.call.args):
        if isinstance(arg, fx.Node) and arg in draft.flows.of:
            made = cell.grads[arg] = draft.nodes.item(cell.backward, i, f"grad_{arg}", at)
            made.meta[SHAPES] = shapes_of_gradient(arg)
    send_back(draft, stage.call.args, at)


def write_recomputation(draft: Draft, at: Action) -> None:
    """Write the second run of a forward that has kept no activations."""
    tape = draft.cell(at.stage, at.microbatch).tape
    draft.note(draft.nodes.call(ops.replay, (tape,), "replay", at), at)


def write_reload(draft: Draft, at: Action) -> None:
    """Let activations come back from the host."""
    tape = draft.cell(at.stage, at.microbatch).tape
    draft.note(draft.nodes.call(ops.reload, (tape,), "reload", at), at)


def write_weight_grad(draft: Draft, at: Action) -> None:
    """Write the second half of a backward, which computes the gradients of the parameters."""
    tape = draft.cell(at.stage, at.microbatch).tape
    draft.note(draft.nodes.call(ops.weight_grad, (tape,), "weight_grad", at), at)


def send_back(draft: Draft, values: Sequence[Any], at: Action) -> None:
    """Let the gradients of values leave the action's stage for the stages that sent the values."""
    grads = draft.cell(at.stage, at.microbatch).grads
    leaving: dict[int, dict[fx.Node, fx.Node]] = {}
    for value in dict.fromkeys(values):
        if value in grads and is_differentiable(value):
            target = draft.flows.of[value].before(at.stage)
            leaving.setdefault(target, {})[value] = grads[value]
    for target, own in sorted(leaving.items()):
        draft.traffic.leave(own, target, at)
