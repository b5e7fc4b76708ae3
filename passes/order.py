"""The order of the passes: the entries of the default chain.

::

    model graph ─ alias ─ ... ─ partition ─ ... ─ split ─ stage graph ─┬─ microbatch ─ ... ─ verify
                                                                       │         pipeline graph
                                                                       └─ step
                                                                             step graph

The order is written here and nowhere else: the compiler, plans, the command line, the tests and the
documentation read it, as :func:`passes.chain.default_chain`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from passes.cost.all_microbatches import AllMicrobatches
from passes.cost.analytic import AnalyticCost
from passes.cost.choice import cost_pass
from passes.entry import Entry, Level, Pass, ToPipeline, ToStages, ToStep
from passes.partition.partition import Partition
from passes.to_pipeline.checkpoint import Checkpoint
from passes.to_pipeline.compiled import Compiled
from passes.to_pipeline.copies import Copies
from passes.to_pipeline.dependencies import Dependencies
from passes.to_pipeline.lend import Lend
from passes.to_pipeline.microbatch import Microbatch
from passes.to_pipeline.portals import Portals
from passes.to_pipeline.streams import Streams
from passes.to_stages.alias import Alias
from passes.to_stages.batch_norm import DeferredBatchNorm
from passes.to_stages.borders import Borders
from passes.to_stages.checks import EarlyChecks
from passes.to_stages.constants import CopiedConstants
from passes.to_stages.devices import Devices
from passes.to_stages.free import Free
from passes.to_stages.inputs import WrittenInputs
from passes.to_stages.random import Random
from passes.to_stages.rows import Rows
from passes.to_stages.shared import Shared
from passes.to_stages.split import Split
from passes.to_stages.tied import Tied
from passes.to_step.defer import Defer
from passes.to_step.step import Step
from passes.verify.verify import Verify

_OUTPUTS = (
    "The pass finds the batch dimension of each output, along which the outputs of micro-batches "
    "are put together."
)


def _to_stages() -> tuple[Entry[ToStages], ...]:
    model, stage = Level.MODEL, Level.STAGE
    return (
        Entry(
            "batch_norm",
            lambda c: DeferredBatchNorm(c.inputs),
            *(model, model, DeferredBatchNorm),
            applies=lambda c: c.deferred_batch_norm,
            when="with deferred_batch_norm=True",
        ),
        Entry("alias", lambda c: Alias(c.inputs, c.training), model, model, Alias),
        Entry(
            "inputs",
            lambda c: WrittenInputs(c.inputs, c.in_dims, c.chunks_asked_for),
            *(model, model, WrittenInputs),
            needs=("alias",),
        ),
        Entry(
            "constants",
            lambda c: CopiedConstants(c.inputs, c.training),
            *(model, model, CopiedConstants),
            needs=("alias",),
        ),
        Entry(
            "rows",
            lambda c: Rows(c.inputs, c.in_dims, c.chunks),
            *(model, model, Rows),
            needs=("alias",),
            applies=lambda c: c.traced_chunks is None,
            when="for graphs that take any batch size",
        ),
        Entry(
            "outputs",
            _outputs,
            *(model, model, _OUTPUTS),
            needs=("alias",),
            applies=lambda c: c.outputs is not None,
            when="where the graph is going to run",
        ),
        Entry("cost", _cost, model, model, AnalyticCost, needs=("alias",)),
        Entry(
            "all_microbatches",
            lambda c: AllMicrobatches(c.traced_chunks or 1),
            *(model, model, AllMicrobatches),
            needs=("cost",),
            applies=lambda c: c.traced_chunks is not None,
            when="for graphs that take one batch size",
        ),
        Entry("shared", lambda c: Shared(c.training), model, model, Shared, needs=("alias",)),
        Entry("random", lambda c: Random(), model, model, Random, needs=("alias",)),
        Entry("partition", _partition, model, model, Partition, needs=("alias", "cost")),
        Entry("checks", lambda c: EarlyChecks(), model, model, EarlyChecks, needs=("partition",)),
        Entry("free", lambda c: Free(), model, model, Free, needs=("partition",)),
        Entry(
            "tied",
            lambda c: Tied(c.devices, c.places),
            *(model, model, Tied),
            needs=("shared", "partition"),
        ),
        Entry("split", lambda c: Split(), model, stage, Split, needs=("partition",)),
        Entry(
            "borders",
            lambda c: Borders(c.devices, c.places, c.chunks, c.traced_chunks or 1, c.training),
            *(stage, stage, Borders),
            needs=("cost", "split"),
            applies=lambda c: c.training,
            when="where there are backwards",
        ),
        Entry(
            "devices",
            lambda c: Devices(c.inputs[0].device, tuple(map(torch.device, c.devices))),
            *(stage, stage, Devices),
            needs=("split",),
            applies=lambda c: bool(c.inputs),
        ),
    )


def _outputs(context: ToStages) -> Pass:
    assert context.outputs is not None
    return context.outputs


def _partition(context: ToStages) -> Pass:
    assert context.partition is not None
    return context.partition


def _cost(context: ToStages) -> Pass:
    return cost_pass(
        context.costs,
        context.inputs,
        device=context.measured_on,
        spec=context.spec,
        optimizer_states=context.optimizer_states,
        chunks=context.chunks,
        training=context.training,
        in_dims=context.in_dims,
        threads=context.measured_with,
    )


def _to_pipeline() -> tuple[Entry[ToPipeline], ...]:
    stage, pipeline = Level.STAGE, Level.PIPELINE

    def entry(name: str, make: Callable[[ToPipeline], Pass], kind: type) -> Entry[ToPipeline]:
        return Entry(name, make, pipeline, pipeline, kind, ("microbatch",), leads_to=pipeline)

    return (
        Entry(
            "microbatch",
            lambda c: Microbatch(c.chunks, c.in_dims, c.out_dims, c.loss_weight, c.apart),
            *(stage, pipeline, Microbatch),
            needs=("split", "outputs"),
            leads_to=pipeline,
        ),
        replace(
            entry("lend", lambda c: Lend(c.devices), Lend),
            applies=lambda c: c.training,
            when="where there are backwards",
        ),
        entry("portals", lambda c: Portals(c.devices), Portals),
        entry("copies", lambda c: Copies(c.devices), Copies),
        entry("streams", lambda c: Streams(c.devices), Streams),
        entry("checkpoint", lambda c: Checkpoint(c.checkpoint, c.checkpoint_segments), Checkpoint),
        replace(
            entry("dependencies", lambda c: Dependencies(), Dependencies),
            applies=lambda c: c.training,
            when="where there are backwards",
        ),
        entry("verify", lambda c: Verify(training=c.training), Verify),
        replace(
            entry("compiled", _compiled, Compiled),
            applies=lambda c: c.compiled is not None,
            when="with stage_backend",
        ),
    )


def _compiled(context: ToPipeline | ToStep) -> Pass:
    assert context.compiled is not None
    return Compiled(
        context.compiled, "compiled" if isinstance(context, ToPipeline) else "compiled_step"
    )


def _to_step() -> tuple[Entry[ToStep], ...]:
    return (
        Entry("step", _step, Level.STAGE, Level.STEP, Step, ("split",), leads_to=Level.STEP),
        Entry(
            "verify_step",
            lambda c: Verify("verify_step"),
            *(Level.STEP, Level.STEP, Verify),
            leads_to=Level.STEP,
        ),
        Entry(
            "compiled_step",
            _compiled,
            *(Level.STEP, Level.STEP, Compiled),
            applies=lambda c: c.compiled is not None,
            when="with stage_backend",
            leads_to=Level.STEP,
        ),
    )


def _step(context: ToStep) -> Pass:
    return Step(
        loss=context.loss,
        schedule=context.schedule,
        devices=context.devices,
        in_dims=context.in_dims,
        targets=context.targets,
        checkpoint=context.checkpoint,
        checkpoint_segments=context.checkpoint_segments,
        summed=context.summed,
        loss_weight=context.loss_weight,
        weighs_inputs=context.weighs_inputs,
        halves=Defer() if context.compiled is None else context.compiled.in_halves,
    )


ENTRIES: tuple[Entry[Any], ...] = (*_to_stages(), *_to_pipeline(), *_to_step())
"""The entries of the default chain."""
