"""Tune: the fastest of many ways to run a model on some devices, by prediction and, if asked for,
by measuring the best few.

::

    chunks      4, 8, 16 ...      ┐
    schedule    1f1b, zbv ...     ├─ a plan for each ── the fastest that fit ── measured
    stages      as it takes       │  (the cut, and the checkpoint mode of each stage)
    checkpoint  "auto"            ┘

All plans share one trace of the model, and those of one number of micro-batches share its costs.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn
from torch.optim.optimizer import Optimizer

from fxpipe.api import compile
from fxpipe.ir.counts import count
from fxpipe.ir.devices import KNOWN, DeviceSpec, spec_of
from fxpipe.ir.progress import report_progress
from fxpipe.ir.text import kind
from fxpipe.planning.limits import Memory, free_memory, limits_of
from fxpipe.planning.loss import SavedByLoss
from fxpipe.planning.optimizer import optimizer_states
from fxpipe.planning.question import (
    CostedModel,
    CostSettings,
    PlanQuestion,
    costed,
    saved_by_loss,
)
from fxpipe.planning.result import Plan
from fxpipe.runtime.ambient import compiling
from fxpipe.schedule import AUTO as SEARCHED
from fxpipe.schedule import NAMES, named, placement_of
from fxpipe.trace import CustomTracer
from fxpipe.tuning.results import Tuning, TuningTrial, said
from passes.chain import Chain, chain_of
from passes.common.modes import AUTO, Modes, modes_of
from passes.cost.analytic import ADAM
from passes.cost.choice import Costs
from passes.partition.automatic import DoesNotFit
from passes.partition.partition import Spec, within

MOST = 8  # at most this many micro-batches for each lane are tried, if the user does not say which


@dataclass(frozen=True)
class _TunedModel:
    """The model, the cut and the devices that all trials of a tuning have in common."""

    prices: CostedModel
    partition: Spec
    specs: tuple[DeviceSpec, ...]
    names: tuple[str, ...] | None
    checkpoint: Modes
    loss: SavedByLoss | None

    def trial(self, schedule: str, stages: int | None, chunks: int) -> TuningTrial:
        """The plan for one schedule and number of micro-batches, as a trial."""
        options: dict[str, Any] = {"chunks": chunks, "schedule": schedule}
        if stages is not None:
            options["stages"] = stages
        question = PlanQuestion(
            self.prices,
            self.partition,
            self.specs,
            schedule,
            stages,
            chunks,
            self.checkpoint,
            names=self.names,
            loss=self.loss,
        )
        try:
            plan = question.answer()
        except DoesNotFit as error:
            return TuningTrial(options | {"checkpoint": self.checkpoint}, math.inf, why=str(error))
        return _planned(options, plan)


def _planned(options: dict[str, Any], plan: Plan) -> TuningTrial:
    modes = plan.checkpoint
    chosen = {
        "checkpoint": modes if isinstance(modes, str) else list(modes),
        "partition": plan.partition,
    }
    if not plan.fits:
        return TuningTrial(options | chosen, math.inf, plan.memory, why="a given cut does not fit")
    return TuningTrial(options | chosen, plan.seconds, plan.memory, plan.bubble)


def tune(
    model: nn.Module,
    devices: Sequence[str | torch.device | DeviceSpec],
    example_inputs: tuple[Any, ...] = (),
    *,
    example_kwargs: dict[str, Any] | None = None,
    chunks: Sequence[int] | None = None,
    schedules: Sequence[str] | None = None,
    stages: Sequence[int | None] = (None,),
    checkpoint: Modes = AUTO,
    partition: Spec = "auto",
    boundaries: Sequence[str] | None = None,
    memory: Memory = None,
    optimizer: str | Optimizer | None = None,
    costs: Costs = "analytic",
    measure: int = 0,
    rounds: int = 5,
    target: Any = None,
    progress: bool = True,
    in_dims: Any = None,
    tracer: str | CustomTracer = "auto",
    passes: Chain | None = None,
    **options: Any,
) -> Tuning:
    """Find the fastest way to train a model on some devices.

    Args:
        model, example_inputs, example_kwargs: the model, and a mini-batch for it. Nothing runs
            unless something is to be measured, so that both may be on "meta".
        devices: as for :func:`fxpipe.compile`; or, as for :func:`fxpipe.plan`, descriptions of
            devices or the names of known ones, for which nothing can be measured.
        chunks: the numbers of micro-batches to try. None: one for each lane, and twice as many as
            long as the mini-batch has so many rows, up to eight for each lane.
        schedules: the schedules to try. None: all of :data:`fxpipe.schedule.NAMES`.
        stages: the numbers of stages to try. None among them stands for as many as a schedule
            takes.
        checkpoint: as for :func:`fxpipe.compile`; by default the mode of each stage is chosen.
        partition, boundaries, memory, optimizer, costs, in_dims, tracer, passes: as for
            :func:`fxpipe.compile`.
        measure: how many of the best trials are compiled and measured, each on a copy of the model.
        rounds, target: as for :meth:`Pipeline.measure`. With a target, what ``loss_fn`` saves is
            part of the memory (see ``example_target`` of :func:`fxpipe.compile`).
        progress: whether a bar shows how far the search is, where standard error is a terminal.
        options: further arguments of :func:`fxpipe.compile`, such as ``loss_fn``, for what is
            measured.

    Returns what has been tried; ``fxpipe.compile(model, devices, **tuning.best.options)`` makes the
    pipeline.

    Raises:
        TypeError, ValueError: if an argument makes no sense; the message says what would.
        TraceError: as :func:`fxpipe.compile`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"tune takes a model, an nn.Module, and is given {kind(model)}")
    if not isinstance(example_inputs, tuple):
        raise TypeError(
            "example_inputs is the tuple of the model's arguments, and is given "
            f"{kind(example_inputs)}: write example_inputs=(x,) for one argument"
        )
    if unknown := options.keys() - inspect.signature(compile).parameters.keys():
        raise TypeError(
            f"tune is given {min(unknown)}, which neither it nor fxpipe.compile takes: its own "
            f"arguments are {', '.join(list(inspect.signature(tune).parameters)[2:-1])}"
        )
    if options.get("training") is False:
        raise ValueError(
            "tune finds the fastest way to train a model, and is given training=False: give "
            "fxpipe.plan(model, devices, training=False, chunks=...) numbers of micro-batches to "
            "compare"
        )
    specs, names, are_here = _lanes(devices, model)
    if measure and not are_here:
        raise ValueError(
            f"measure is {measure}, and devices are descriptions: give devices that are here, such "
            'as "cuda:0", to measure on them'
        )
    if memory is not None:
        limits = limits_of(memory, len(specs))
        specs = tuple(s.with_memory(m) for s, m in zip(specs, limits, strict=True))
    given = (example_inputs, example_kwargs or {})
    settings = CostSettings(costs, specs[0], optimizer_states(optimizer, ADAM))
    tried = [count("chunks", each, "the number of micro-batches") for each in chunks or ()]
    with compiling():
        prices, batch = costed(
            model,
            given,
            settings,
            in_dims=in_dims,
            tracer=tracer,
            chunks=max(tried, default=None),
            chain=chain_of(passes),
        )
        tuned = _TunedModel(
            prices,
            within(partition, boundaries),
            specs,
            names,
            modes_of(checkpoint),
            saved_by_loss(prices, options.get("loss_fn"), options.get("example_target", target)),
        )
        asked = list(_settings(len(specs), tried or None, schedules, stages, batch))
        with Progress(transient=True, disable=not progress, console=_console()) as bar:
            task = bar.add_task("planning", total=len(asked))
            trials = []
            for schedule, number, each in asked:
                report_progress(f"{schedule}, {each} chunks")
                trials.append(tuned.trial(schedule, number, each))
                bar.advance(task)
    trials.sort(key=lambda trial: trial.seconds)
    kwargs = {"memory": memory, "optimizer": optimizer, "in_dims": in_dims, "tracer": tracer}
    kwargs |= {"passes": passes, **options}
    for i, trial in enumerate(trials[:measure]):
        if trial.fits:
            report_progress(f"measuring {said(trial)}")
            trials[i] = _measured(trial, model, devices, given, target, rounds, kwargs)
    return Tuning(tuple(sorted(trials, key=lambda trial: trial.key)))


def _console() -> Console:
    return Console(stderr=True)


def _lanes(
    devices: Sequence[str | torch.device | DeviceSpec], model: nn.Module
) -> tuple[tuple[DeviceSpec, ...], tuple[str, ...] | None, bool]:
    """The description of each lane's device; the names of the devices, if they are here, else None;
    and whether they are here."""
    if not isinstance(devices, Sequence) or isinstance(devices, str) or not devices:
        raise ValueError(
            f"devices is {devices!r}: give a list with one device for each lane, such as "
            '["cuda:0", "cuda:1"], or ["h100"] * 4'
        )
    described = [isinstance(each, DeviceSpec) or str(each) in KNOWN for each in devices]
    if all(described):
        return tuple(map(DeviceSpec.of, devices)), None, False  # type: ignore[arg-type]
    if any(described):
        raise ValueError(
            f"devices is {devices!r}: give devices that are here, or descriptions, and not both"
        )
    here = [torch.device(each) for each in devices]  # type: ignore[arg-type]
    limits = free_memory(here, model)
    specs = (spec_of(device).with_memory(m) for device, m in zip(here, limits, strict=True))
    return tuple(specs), tuple(map(str, here)), True


def _settings(
    lanes: int,
    chunks: Sequence[int] | None,
    schedules: Sequence[str] | None,
    stages: Sequence[int | None],
    batch: int | None,
) -> Iterator[tuple[str, int | None, int]]:
    """The settings to try: schedules, numbers of stages and of micro-batches that go together."""
    if chunks is None:
        most = min(MOST * lanes, batch or 1)
        powers = (lanes * 2**i for i in range(MOST))
        chunks = [n for n in powers if n <= most] or [max(1, most)]
    for schedule in NAMES if schedules is None else schedules:
        for number in stages:
            for each in chunks:
                try:
                    _possible(schedule, lanes, number, each)
                except ValueError:
                    if schedules is None or None not in stages:
                        continue
                    raise
                yield schedule, number, each


def _possible(schedule: str, lanes: int, stages: int | None, chunks: int) -> None:
    """Raise ValueError if there is no such schedule."""
    placement = placement_of(schedule, lanes, stages)
    if schedule != SEARCHED:
        named(schedule, lanes=lanes, stages=len(placement), microbatches=chunks)


def _measured(
    trial: TuningTrial,
    model: nn.Module,
    devices: Sequence[Any],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    target: Any,
    rounds: int,
    options: dict[str, Any],
) -> TuningTrial:
    """The trial with its measured time, or with what kept it from being measured."""
    args, kwargs = inputs
    own = copy.deepcopy(model)
    try:
        with compile(own, devices, **{**options, **trial.options}) as pipe:
            timeline = pipe.measure(*args, target=target, rounds=rounds, **kwargs)
    except torch.OutOfMemoryError as error:
        return replace(trial, why=str(error))
    return replace(trial, measured=timeline.makespan)
