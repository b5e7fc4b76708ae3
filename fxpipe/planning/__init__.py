"""Plan: what a pipeline would be like, without any of its devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from fxpipe.ir.counts import count
from fxpipe.ir.devices import DeviceSpec
from fxpipe.ir.progress import report_progress
from fxpipe.meaning.call import Asked, meaning_of
from fxpipe.meaning.sample import batch_size, out_of_inference_mode
from fxpipe.planning.question import CostedModel, PlanQuestion, sketch
from fxpipe.planning.result import Plan, PlannedStage
from fxpipe.runtime.ambient import compiling
from fxpipe.runtime.microbatch import LISTED
from fxpipe.schedule import Schedule, microbatches_of, placement_of
from fxpipe.trace import CustomTracer, canonical
from passes.chain import Chain, chain_of
from passes.cost.analytic import ADAM
from passes.cost.choice import Costs
from passes.partition.automatic import DoesNotFit
from passes.partition.partition import Spec
from passes.to_pipeline.checkpoint import Checkpoint

__all__ = ["Plan", "PlannedStage", "plan"]


def plan(
    model: nn.Module,
    devices: Sequence[DeviceSpec | str],
    *,
    example_inputs: tuple[Any, ...] = (),
    example_kwargs: dict[str, Any] | None = None,
    chunks: int | None = None,
    partition: Spec = "auto",
    checkpoint: str = "never",
    schedule: str | Schedule = "gpipe",
    stages: int | None = None,
    costs: Costs = "analytic",
    optimizer_states: float = ADAM,
    in_dims: Any = None,
    tracer: str | CustomTracer = "auto",
    passes: Chain | None = None,
) -> Plan:
    """What :func:`fxpipe.compile` would make of a model, without any of the devices.

    Nothing is computed: the model and its inputs may be on "meta", and take no memory then.

    Args:
        devices: descriptions, or names of known ones ("h100"), one for each lane.
        schedule, stages: of the training step, as for :func:`fxpipe.compile`. Which micro-batches
            are alive at once depends on it, and so whether the model fits. Where a device has
            several stages that do not fit as they are, each is given an equal part of its memory.
        costs: "analytic": by the descriptions; "measured": on the device that the model is on,
            which stands for ``devices[0]``; a :class:`Profile` or the path of a saved one; or
            seconds by name of node or module.
        optimizer_states: tensors that the optimizer keeps for each parameter: 2 for Adam.

    The others are those of :func:`fxpipe.compile`. Of the chain in ``passes`` those are run that
    lead to the stage graph, other than pass "outputs", which nothing here depends on.

    Raises:
        TypeError, ValueError: for arguments that make no sense, saying which would.
        DoesNotFit: if no cut fits the devices' memory, saying how much is short, and what helps.
        PartitionError, TraceError, BatchError: as :func:`fxpipe.compile`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"plan takes an nn.Module, got a {type(model).__name__}")
    if not isinstance(example_inputs, tuple):
        raise TypeError(
            "example_inputs is the tuple of the model's arguments, got a "
            f"{type(example_inputs).__name__}; write example_inputs=(x,) for one"
        )
    if not (isinstance(optimizer_states, int | float) and optimizer_states >= 0):
        raise ValueError(f"optimizer_states is {optimizer_states!r}: give a number, 0 or more")
    if chunks is not None:
        chunks = count("chunks", chunks, "the number of micro-batches")
    Checkpoint(checkpoint)  # which checks it
    chain = chain_of(passes)
    specs = _specs(devices)
    placement = placement_of(schedule, len(specs), stages)
    whole = microbatches_of(schedule, chunks, len(placement))
    args, kwargs = canonical(model, example_inputs, example_kwargs or {})
    with compiling():
        args, kwargs = out_of_inference_mode((args, kwargs))
        found = meaning_of(model, args, kwargs, Asked(in_dims, check=False)).in_dims
        if LISTED in found:
            raise ValueError(
                "a plan cannot be made for lists with one element for each row: stack them to one "
                "tensor, or say their batch dimensions in in_dims"
            )
        dims = [dim if isinstance(dim, int) else None for dim in found]
        report_progress("trace")
        gm, known = sketch(model, args, kwargs, dims, tracer, chunks, chain)
        known = replace(known, costs=costs, spec=specs[0], optimizer_states=optimizer_states)
        batch = batch_size(known.inputs, dims)
        microbatches = max(1, min(whole, batch or 1))
        question = PlanQuestion(
            CostedModel(model, gm, known, chain),
            partition,
            specs,
            schedule.first(microbatches) if isinstance(schedule, Schedule) else schedule,
            stages,
            microbatches,
            checkpoint,
        )
        try:
            return question.answer()
        except DoesNotFit:
            report_progress("what would fit")
            short = question.shortage()
            raise DoesNotFit(f"{short}; {question.ways_out(batch)}") from None


def _specs(devices: Sequence[DeviceSpec | str]) -> tuple[DeviceSpec, ...]:
    if not isinstance(devices, Sequence) or isinstance(devices, str) or not devices:
        raise ValueError(
            f"devices is {devices!r}: give a list of DeviceSpec, or of names of known devices, "
            'one for each lane, such as ["h100"] * 4'
        )
    return tuple(map(DeviceSpec.of, devices))
