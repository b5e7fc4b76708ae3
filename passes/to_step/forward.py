"""Writes the forward of a stage for a micro-batch, for pass "step".

::

    (arrive) ── arguments ── forward ──┬── results ──┬── (leave for the stages that use them next)
                                       │  passed on ─┘
                                       └── tape ── (offload)
"""

from __future__ import annotations

from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import SHAPES
from fxpipe.runtime.streams import COMPUTE
from fxpipe.schedule import Action
from passes.common.modes import OFFLOAD, SELECTIVE
from passes.common.shapes import shapes_of
from passes.to_step.draft import Draft
from passes.to_step.flows import StageCall

DEFERRED = "_deferred"  # what the path of a stage whose backward runs in halves ends with


def write_forward(draft: Draft, at: Action) -> None:
    """Write the forward of an action's stage and micro-batch.

    Its arguments arrive from earlier stages, and its results leave for the stages that use them.
    """
    stage = draft.flows.stages[at.stage]
    cell = draft.cell(at.stage, at.microbatch)
    cell.values |= draft.traffic.arrive(range(at.stage), at)
    args = tuple(draft.value(arg, at) for arg in stage.call.args)
    passed = tuple(stage.call.args.index(value) for value in stage.passed)
    call = draft.nodes.call(
        ops.forward,
        (_module(draft, stage, at), args, passed, stage.is_single, _checkpoint(draft, at)),
        "forward",
        at,
    )
    draft.note(call, at)
    results = draft.nodes.item(call, 0, "results", at)
    cell.tape = draft.nodes.item(call, 1, "tape", at)
    leaving: dict[int, dict[fx.Node, fx.Node]] = {}
    for index, value in enumerate(stage.gives):
        made = cell.values[value] = draft.nodes.item(results, index, value.name, at)
        made.meta[SHAPES] = shapes_of(value)
        target = draft.flows.of[value].after(at.stage)
        if target is not None:
            leaving.setdefault(target, {})[value] = made
    for target, values in sorted(leaving.items()):
        draft.traffic.leave(values, target, at)


def write_offload(draft: Draft, at: Action) -> None:
    """Let the activations of an action's stage and micro-batch leave for the host."""
    tape = draft.cell(at.stage, at.microbatch).tape
    args = tape, draft.nodes.stream(at.stage, COMPUTE), draft.moved(at)
    draft.nodes.call(ops.offload, args, "offload", at)


def _checkpoint(draft: Draft, at: Action) -> bool | str:
    if draft.is_offloaded(at):
        return OFFLOAD
    return SELECTIVE if draft.is_selective(at) else draft.is_checkpointed(at)


def _module(draft: Draft, stage: StageCall, at: Action) -> fx.Node:
    """The stage's module. If the schedule cuts the backward in halves, it is the rewritten module
    that can compute the gradients of its parameters later."""
    path = str(stage.call.target)
    if draft.is_halved(at):
        return draft.nodes.module(f"{path}{DEFERRED}", draft.in_halves(stage.module), at)
    return draft.nodes.module(path, stage.module, at)
