"""Writes the loss of a micro-batch, and its backward, for pass "step".

::

    (arrive) ── output ──┬── loss ──┬── value
    (caller) ── target ──┘          └── tape ── loss_backward ── gradients of the output ─ (leave)
                                weight, scale ──┘

The loss counts as one more stage, and runs in the lane of the last one.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxpipe import ops
from fxpipe.ir._torch import pytree
from fxpipe.ir.graph import SHAPES
from fxpipe.schedule import Action, Kind
from passes.common.shapes import shapes_of_gradient
from passes.to_step.backward import send_back
from passes.to_step.draft import Draft

LOSS = "loss"


def write_loss(draft: Draft, microbatch: int) -> None:
    """Write the loss of a micro-batch, which is computed from the output and the target."""
    at = Action(draft.flows.loss_stage, Kind.FORWARD, microbatch)
    cell = draft.cell(at.stage, microbatch)
    cell.values |= draft.traffic.arrive(range(at.stage), at)
    output = fx.map_arg(_output(draft), lambda value: draft.value(value, at))
    targets = draft.caller.targets(at)
    tapes = tuple(draft.cell(stage, microbatch).tape for stage in range(at.stage))
    module = draft.nodes.module(LOSS, draft.loss, at)
    call = draft.nodes.call(ops.loss, (module, output, targets, microbatch, tapes), "loss", at)
    draft.losses[microbatch] = draft.nodes.item(call, 0, "loss_value", at)
    cell.tape = draft.nodes.item(call, 1, "tape", at)


def write_loss_backward(draft: Draft, microbatch: int) -> None:
    """Write the backward of the loss, and let its gradients leave for the stages of the output."""
    at = Action(draft.flows.loss_stage, Kind.BACKWARD, microbatch)
    cell = draft.cell(at.stage, microbatch)
    weight = draft.nodes.part(draft.caller.weights, microbatch, "weight")
    args = cell.tape, weight, draft.caller.scale
    cell.backward = draft.nodes.call(ops.loss_backward, args, "loss_backward", at)
    _take_apart(draft, _output(draft), cell.backward, at)
    send_back(draft, draft.flows.outputs, at)


def _output(draft: Draft) -> Any:
    return draft.gm.graph.output_node().args[0]


def _take_apart(draft: Draft, output: Any, grads: fx.Node, at: Action) -> None:
    """Note the gradient of each value in the output; ``grads`` gives a structure like the output's.

    A value that is in the output twice gets the sum of its two gradients.
    """
    found = draft.cell(at.stage, at.microbatch).grads
    if isinstance(output, fx.Node):
        if output in draft.flows.of:
            if output in found:
                grads = draft.nodes.call(ops.added, (found[output], grads), "sum", at)
            found[output] = grads
            grads.meta[SHAPES] = shapes_of_gradient(output)
    elif isinstance(output, dict | list | tuple):
        for index, part in output.items() if isinstance(output, dict) else enumerate(output):
            if any(isinstance(leaf, fx.Node) for leaf in pytree.tree_leaves(part)):
                _take_apart(draft, part, draft.nodes.item(grads, index, "grad", at), at)
