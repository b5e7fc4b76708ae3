"""Buffers to which a model's own checkpoint writes in the forward, and again in the backward,
where a schedule does not keep the order of a loop over the micro-batches.

::

    loop                F0 B0 F1 B1 F2 B2          running_mean: 0 0 1 1 2 2
    stage 0 of 1f1b     F0 F1 B0 F2 B1 B2          running_mean: 0 1 0 2 1 2

``torch.utils.checkpoint`` runs a batch norm again in the backward, with its update of the running
statistics. An exponential average depends on the order of its updates.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fxpipe.ir.graph import ACTION, AGAIN, stages_of
from fxpipe.schedule.actions import Action, Kind


def out_of_order(stage_graph: fx.GraphModule, step_graph: fx.GraphModule) -> dict[int, list[str]]:
    """By stage, the buffers to which it writes in the forward and in the backward of a micro-batch,
    where its backwards do not each follow their forward, as in a loop over the micro-batches."""
    found: dict[int, list[str]] = {}
    for stage, module in enumerate(stages_of(stage_graph)):
        names = dict.fromkeys(
            name for node in module.graph.nodes for name in node.meta.get(AGAIN, ())
        )
        if names and not _is_in_order(_actions(step_graph, stage)):
            found[stage] = list(names)
    return found


def _actions(step_graph: fx.GraphModule, stage: int) -> list[tuple[int, bool]]:
    """The forwards and backwards of a stage in their order: each as the number of the micro-batch,
    and whether it is a backward."""

    def done() -> Iterator[Action]:
        for node in step_graph.graph.nodes:
            action = node.meta.get(ACTION)
            if action is not None and action.stage == stage:
                yield action

    return list(
        dict.fromkeys(
            (action.microbatch, action.kind.begins_backward)
            for action in done()
            if action.kind is Kind.FORWARD or action.kind.begins_backward
        )
    )


def _is_in_order(actions: list[tuple[int, bool]]) -> bool:
    return actions == sorted(actions)


def said(found: dict[int, list[str]]) -> str:
    """The warning for these buffers, by their stages."""
    names = list(dict.fromkeys(name for each in found.values() for name in each))
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    stages = f"stage{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"
    return (
        f"a checkpoint of the model's own (torch.utils.checkpoint) writes to {listed} in its "
        "forward, and once more in the backward, which runs that forward again, so that PyTorch "
        "counts each micro-batch twice. A loop over the micro-batches does both before it begins "
        f"with the next one; in a step of this schedule {stages} may begin with others in between. "
        "So what these buffers hold after a step, and what is computed from them, differs from "
        "that loop, by the schedule and the number of stages. To have each micro-batch counted "
        "once, in order, in every schedule, take that checkpoint out of the model and give "
        'checkpoint="always" to fxpipe.compile, or call fxpipe.checkpoint in its place; batch '
        "norms alone are also updated once for each mini-batch with deferred_batch_norm=True"
    )
