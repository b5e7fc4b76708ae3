"""Tune: the fastest of many ways to run a model on some devices, by prediction and, if asked for,
by measuring the best few.

::

    chunks      4, 8, 16 ...      ┐
    schedule    1f1b, zbv ...     ├─ a plan for each ── the fastest that fit ── measured
    stages      as it takes       ┘  (the cut, the checkpoint mode of each stage and its segments)

Each plan is a trial of the search that ``schedule="auto"`` makes (:mod:`fxpipe.planning.search`),
which leaves out what cannot be the fastest; here all are made, as all are shown.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn
from torch.optim.optimizer import Optimizer

from fxpipe.api import compile
from fxpipe.ir.counts import count
from fxpipe.ir.devices import KNOWN, DeviceSpec, spec_of
from fxpipe.ir.options import options_checked
from fxpipe.ir.progress import report_progress
from fxpipe.ir.tensors import no_scalar
from fxpipe.ir.text import kind
from fxpipe.planning.limits import Memory, free_memory, limits_of
from fxpipe.planning.loss import ExpectedLoss, no_loss
from fxpipe.planning.optimizer import optimizer_states, optimizer_update
from fxpipe.planning.question import CostedModel, CostSettings, costed, saved_by_loss
from fxpipe.planning.search import (
    SettingSearch,
    SettingTrial,
    numbers_of_microbatches,
    settings_of,
)
from fxpipe.runtime.ambient import compiling
from fxpipe.schedule import NAMES
from fxpipe.trace import CustomTracer
from fxpipe.tuning.plain import plain_step
from fxpipe.tuning.results import Tuning, TuningTrial, said
from passes.chain import Chain, chain_of
from passes.common.modes import AUTO, Modes, modes_of
from passes.common.segments import Segments, segments_of
from passes.cost.analytic import ADAM
from passes.cost.choice import Costs
from passes.partition.by_name import shortest_mapping
from passes.partition.partition import Spec, within


def _shown(
    trial: SettingTrial, checkpoint: Modes, costs: Costs, prices: CostedModel
) -> TuningTrial:
    """A trial of the search as one of a tuning. Its options have the costs by which it was cut, so
    that a pipeline with these options is explained by them, too."""
    setting, plan = trial.setting, trial.plan
    options: dict[str, Any] = {"chunks": setting.chunks, "schedule": setting.schedule}
    if isinstance(costs, str) and costs != "analytic":
        options["costs"] = costs
    if setting.stages is not None:
        options["stages"] = setting.stages
    segments = setting.segments if plan is None else plan.checkpoint_segments
    if segments not in (None, 1):
        options["checkpoint_segments"] = list(segments) if isinstance(segments, tuple) else segments
    if plan is None:
        needed = () if trial.nearest is None else trial.nearest.memory
        return TuningTrial(options | {"checkpoint": checkpoint}, math.inf, needed, why=trial.why)
    modes = plan.checkpoint
    options["checkpoint"] = modes if isinstance(modes, str) else list(modes)
    options["partition"] = shortest_mapping(
        prices.with_costs(setting.chunks).graph, plan.partition, len(plan.stages)
    )
    return TuningTrial(options, plan.seconds, plan.memory, plan.bubble)


@options_checked(compile)
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
    checkpoint_segments: Sequence[Segments] = (None,),
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
        chunks: the numbers of micro-batches to try. None: those that cut the mini-batch into equal
            parts, up to eight for each lane.
        schedules: the schedules to try. None: all of :data:`fxpipe.schedule.NAMES`, and an order of
            its own, as ``schedule="auto"`` does.
        stages: the numbers of stages to try. None among them stands for as many as a schedule
            takes.
        checkpoint: as for :func:`fxpipe.compile`; by default the mode of each stage is chosen.
        checkpoint_segments: in how many segments stages are recomputed: values to try, each as for
            :func:`fxpipe.compile`, which chooses the numbers together with the modes for None.
        partition, boundaries, memory, optimizer, costs, in_dims, tracer, passes: as for
            :func:`fxpipe.compile`.
        measure: how many trials are compiled and measured, each on a copy of the model; and with
            these the model by itself on the first device (``Tuning.plain``). The first is the best
            by prediction, the others are the best with other numbers of micro-batches, as far as
            there are such: predictions know least what small micro-batches cost.
        rounds, target: as for :meth:`Pipeline.measure`. With a target, what ``loss_fn`` saves is
            part of the memory (see ``example_target`` of :func:`fxpipe.compile`).
        progress: whether a bar shows how far the search is, where standard error is a terminal.
        options: further arguments of :func:`fxpipe.compile`, such as ``loss_fn``, for what is
            measured.

    Returns what has been tried; ``fxpipe.compile(model, devices, **tuning.best.options)`` makes the
    pipeline.

    Raises:
        TypeError, ValueError: if an argument makes no sense, or if steps are to be measured that
            have no scalar loss; the message says what would do.
        TraceError: as :func:`fxpipe.compile`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"tune takes a model, an nn.Module, and is given {kind(model)}")
    if not isinstance(example_inputs, tuple):
        raise TypeError(
            "example_inputs is the tuple of the model's arguments, and is given "
            f"{kind(example_inputs)}: write example_inputs=(x,) for one argument"
        )
    if options.get("training") is False:
        raise ValueError(
            "tune finds the fastest way to train a model, and is given training=False: of calls "
            'only the number of micro-batches is open, which fxpipe.compile(chunks="auto") and '
            "fxpipe.plan find"
        )
    target = options.get("example_target") if target is None else target
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
    update = optimizer_update(optimizer)
    settings = CostSettings(
        costs, specs[0], optimizer_states(optimizer, ADAM), optimizer_update=update
    )
    modes = modes_of(checkpoint)
    segments = [segments_of(each, modes) for each in checkpoint_segments]
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
        if measure:
            _check_loss(prices, options.get("loss_fn"), target)
        loss = saved_by_loss(prices, options.get("loss_fn"), target)
        search = SettingSearch(prices, within(partition, boundaries), specs, modes, names, loss)
        numbers = tried or numbers_of_microbatches(len(specs), batch)
        asked = settings_of(
            len(specs),
            numbers,
            NAMES if schedules is None else schedules,
            stages,
            segments,
            is_strict=schedules is not None and None in stages,
        )
        with Progress(transient=True, disable=not progress, console=_console()) as bar:
            task = bar.add_task("planning", total=len(asked))
            done = partial(bar.advance, task)
            planned = search.all_of(asked, has_own=schedules is None, done=done)
        shown = [_shown(trial, modes, costs, prices) for trial in planned]
        trials = [trial for i, trial in enumerate(shown) if trial not in shown[:i]]
        advice = "" if trials[0].fits else search.advice(planned[0], batch)
    kwargs = {"memory": memory, "optimizer": optimizer, "in_dims": in_dims, "tracer": tracer}
    kwargs |= {"passes": passes, **options}
    for i in to_measure(trials)[:measure]:
        report_progress(f"measuring {said(trials[i])}")
        trials[i] = _measured(trials[i], model, devices, given, target, rounds, kwargs)
    plain = None
    if measure and trials and trials[0].fits:
        report_progress("measuring the model by itself")
        loss_fn = options.get("loss_fn")
        plain = plain_step(model, torch.device(devices[0]), given, target, loss_fn, rounds)  # type: ignore[arg-type]
    return Tuning(tuple(sorted(trials, key=lambda trial: trial.key)), plain, advice)


def to_measure(trials: Sequence[TuningTrial]) -> list[int]:
    """The places of the trials that fit, in the order in which they are measured: the best one for
    each number of micro-batches, then the second best one for each, and so on."""
    before: Counter[int] = Counter()
    order = []
    for place, trial in enumerate(trials):
        if trial.fits:
            order.append((before[trial.options["chunks"]], place))
            before[trial.options["chunks"]] += 1
    return [place for _, place in sorted(order)]


def _check_loss(
    prices: CostedModel, loss_fn: Callable[[Any, Any], Any] | None, target: Any
) -> None:
    """Raise, ahead of the search, if the steps that are to be measured will have no scalar loss, or
    if ``loss_fn`` needs a target and none is given. The function is called on tensors without
    values: what it raises for these says nothing, but a wrong type is wrong for all values."""
    graph = prices.sketched.graph
    if loss_fn is None:
        found, whose = no_loss(graph, prices.rebuild), "the model returns"
    else:
        whose = "loss_fn returns"
        try:
            found = no_scalar(ExpectedLoss(loss_fn, target, prices.rebuild).computed(graph)[0])
        except Exception as error:  # it is the user's function, which may raise anything
            if target is None and isinstance(error, TypeError | AttributeError):
                error.add_note(
                    "tune was given no target=, so that loss_fn was called with None for it: give "
                    "tune(..., target=y)"
                )
                raise
            return
    if found:
        raise ValueError(
            f"steps are to be measured, and what {whose} is {found}: a scalar tensor is needed as "
            "the loss; give loss_fn(output, target) that returns one"
        )


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
