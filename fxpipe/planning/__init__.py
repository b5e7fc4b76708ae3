"""Plan: a prediction of the pipeline that :func:`fxpipe.compile` would make, for devices that need
not be here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from fxpipe.ir.devices import DeviceSpec
from fxpipe.ir.options import options_checked
from fxpipe.ir.text import kind
from fxpipe.planning.inference import check_training
from fxpipe.planning.limits import Memory, limits_of
from fxpipe.planning.optimizer import optimizer_states as count_states
from fxpipe.planning.optimizer import optimizer_update
from fxpipe.planning.question import CostedModel, CostSettings, PlanQuestion, costed, saved_by_loss
from fxpipe.planning.result import Plan, PlannedStage
from fxpipe.planning.search import (
    Choice,
    Left,
    SettingSearch,
    are_given,
    leaves_stages_open,
    number_given,
)
from fxpipe.runtime.ambient import compiling
from fxpipe.schedule import AUTO, Schedule, microbatches_of, placement_of
from fxpipe.trace import CustomTracer
from passes.chain import Chain, chain_of
from passes.common.modes import Modes, modes_of
from passes.common.segments import Segments, segments_of
from passes.cost.analytic import ADAM
from passes.cost.choice import Costs
from passes.partition.automatic import DoesNotFit
from passes.partition.partition import Spec, within

__all__ = ["Plan", "PlannedStage", "plan"]


@options_checked()
def plan(
    model: nn.Module,
    devices: Sequence[DeviceSpec | str],
    *,
    example_inputs: tuple[Any, ...] = (),
    example_kwargs: dict[str, Any] | None = None,
    chunks: int | str | None = None,
    partition: Spec = "auto",
    boundaries: Sequence[str] | None = None,
    checkpoint: Modes = "never",
    checkpoint_segments: Segments = None,
    schedule: str | Schedule = "gpipe",
    stages: int | None = None,
    costs: Costs = "analytic",
    optimizer_states: float = ADAM,
    memory: Memory = None,
    optimizer: str | Optimizer | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    example_target: Any = None,
    in_dims: Any = None,
    tracer: str | CustomTracer = "auto",
    passes: Chain | None = None,
    training: bool = True,
) -> Plan:
    """Predict the pipeline that :func:`fxpipe.compile` would make of a model, without any of its
    devices: the stages, their memory, and the time of a training step.

    The model is traced with fake tensors and does not run, unless ``costs`` is "measured". So the
    model and its inputs may be on the device "meta", where they take no memory.

    Args:
        devices: a description of each lane's device, or the name of a known one, such as "h100".
        schedule, stages: as for :func:`fxpipe.compile`. The schedule decides how many micro-batches
            are alive at once, and so whether the model fits. If a device has several stages, and
            the cut does not fit its memory, a second cut gives each stage an equal part of it.
            With "auto", and with ``chunks="auto"``, the plan is that of the setting which
            :func:`fxpipe.compile` chooses.
        costs: where the times of nodes come from. "analytic": they are estimated from the
            descriptions of the devices. "measured": nodes run on the device that the model is on,
            which is taken to be ``devices[0]``. Or a :class:`Profile`, the path of a saved profile,
            or a dictionary from names of nodes or modules to seconds.
        optimizer_states: how many tensors the optimizer keeps for each parameter: 2 for Adam.
        memory: the bytes that may be taken on each device, in place of those of its description, as
            for :func:`fxpipe.compile`.
        optimizer: the optimizer, or its name, from which ``optimizer_states`` follows.
        loss_fn, example_target: the loss function of output and target, and a target of one
            mini-batch, whose tensors may be on "meta". With them the last stage is planned with
            what the loss saves for its backward, and how long it takes: the function is called once
            on tensors without values and, where costs are measured, on others.
        training: False: plan a call that computes outputs only, as for :func:`fxpipe.compile`.

    The other arguments mean what they do for :func:`fxpipe.compile`. Of the chain in ``passes``,
    only the passes up to the stage graph run. Pass "outputs" does not: no prediction needs it.

    Raises:
        TypeError, ValueError: if an argument makes no sense; the message says what would.
        DoesNotFit: if no cut fits the devices' memory; the message says how many bytes are missing
            and which other options, or how many devices, would do.
        PartitionError, TraceError, BatchError: as :func:`fxpipe.compile`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"plan takes a model, an nn.Module, and is given {kind(model)}")
    if not isinstance(example_inputs, tuple):
        raise TypeError(
            "example_inputs is the tuple of the model's arguments, and is given "
            f"{kind(example_inputs)}: write example_inputs=(x,) for one argument"
        )
    if not (isinstance(optimizer_states, int | float) and optimizer_states >= 0):
        raise ValueError(f"optimizer_states is {optimizer_states!r}: give a number, 0 or more")
    if (loss_fn is None) != (example_target is None):
        raise ValueError(
            "what a loss saves is planned from loss_fn and example_target: give both, or neither"
        )
    searches_chunks = chunks == AUTO and not isinstance(schedule, Schedule)
    number = number_given(chunks)
    partition = within(partition, boundaries)
    checkpoint = modes_of(checkpoint)
    segments = segments_of(checkpoint_segments, checkpoint)
    check_training(
        training,
        schedule=schedule,
        checkpoint=checkpoint,
        partition=partition,
        optimizer=optimizer,
        loss_fn=loss_fn,
    )
    checkpoint = checkpoint if training else "never"
    chain = chain_of(passes)
    specs = _specs(devices)
    limits = limits_of(memory, len(specs))
    if memory is not None:
        specs = tuple(s.with_memory(m) for s, m in zip(specs, limits, strict=True))
    update = optimizer_update(optimizer_states if optimizer is None else optimizer)
    optimizer_states = count_states(optimizer, optimizer_states)
    placement = placement_of(schedule, len(specs), stages)
    is_measured = isinstance(costs, str) and costs == "measured"

    def priced(costs: Costs) -> tuple[CostedModel, int | None]:
        return costed(
            model,
            (example_inputs, example_kwargs or {}),
            CostSettings(costs, specs[0], optimizer_states, training, update),
            in_dims=in_dims,
            tracer=tracer,
            chunks=number,
            chain=chain,
        )

    with compiling():
        if schedule == AUTO or searches_chunks:
            # To choose by measured costs, they would have to be measured for each number.
            prices, batch = priced("analytic" if is_measured else costs)
            loss = saved_by_loss(prices, loss_fn, example_target)
            search = SettingSearch(prices, partition, specs, checkpoint, loss=loss)
            free = leaves_stages_open(partition, checkpoint, segments, stages)
            several = None if free else len(placement)
            left = Left(str(schedule), number, several, segments, are_given(costs))
            trials = search.of_open(left, batch)
            if trials[0].plan is None:
                search.why_none(trials, batch)
            elif not is_measured:
                return trials[0].plan
            else:
                choice = Choice.of(trials, batch)
                schedule, stages, number = choice.schedule, choice.stages, choice.chunks
                placement = placement_of(schedule, len(specs), stages)
        whole = microbatches_of(schedule, number, len(placement))
        prices, batch = priced(costs)
        microbatches = max(1, min(whole, batch or 1))
        question = PlanQuestion(
            prices,
            partition,
            specs,
            schedule.first(microbatches) if isinstance(schedule, Schedule) else schedule,
            stages,
            microbatches,
            checkpoint,
            segments,
            loss=saved_by_loss(
                prices,
                loss_fn,
                example_target,
                (batch, batch // microbatches) if is_measured and batch else None,
            ),
        )
        try:
            return question.answer()
        except DoesNotFit as error:
            raise DoesNotFit(f"{error}; {question.ways_out(batch)}") from None


def _specs(devices: Sequence[DeviceSpec | str]) -> tuple[DeviceSpec, ...]:
    if not isinstance(devices, Sequence) or isinstance(devices, str) or not devices:
        raise ValueError(
            f"devices is {devices!r}: give a list of DeviceSpec, or of names of known devices, "
            'one for each lane, such as ["h100"] * 4'
        )
    return tuple(map(DeviceSpec.of, devices))
