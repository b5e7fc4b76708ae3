"""Plan: what a pipeline would be like, without any of its devices."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.table import Table
from torch import fx, nn

import passes as default
from fxpipe.batch import input_dims
from fxpipe.devices import DeviceSpec
from fxpipe.graph import COST, GAP, STAGE, batch_bytes
from fxpipe.inspect.text import human_bytes, human_time, optimality
from fxpipe.mode import batch_size, usual
from fxpipe.progress import began
from fxpipe.runtime.ambient import compiling
from fxpipe.schedule import (
    Edge,
    Link,
    Links,
    Memory,
    Schedule,
    StageCost,
    Timeline,
    live,
    named,
    placement_of,
    schedule_of,
    simulate,
)
from fxpipe.schedule.choice import AUTO
from fxpipe.trace import CustomTracer, Traced, TraceError, canonical, trace, untouched
from passes.cost import ADAM, relative_time
from passes.costs import Costs, cost_pass
from passes.cut.bounds import gap, lower_bound
from passes.cut.dag import Floats, prices
from passes.partition import Auto, DoesNotFit, Spec, milder
from passes.problem import Problem, machine, problem, recomputed
from passes.skips import SkipLayout, skip_layout
from passes.ways import Change, ways_out

ROUNDING = 1e-9  # bytes are sums of fractions


@dataclass(frozen=True)
class PlannedStage:
    """A stage, and what it is expected to take for one mini-batch.

    ``lane`` says on which of the devices it is; ``seconds`` are those of computing, and of what its
    links cannot hide; ``state_bytes`` are parameters, gradients, optimizer and buffers, and what
    other stages share with this one; ``activation_bytes`` what is kept for the backward of as many
    micro-batches as are under way.
    """

    index: int
    lane: int
    device: DeviceSpec
    nodes: tuple[str, ...]
    compute_s: float
    link_s: float
    seconds: float
    state_bytes: int
    activation_bytes: int

    @property
    def memory(self) -> int:
        """Bytes in all."""
        return self.state_bytes + self.activation_bytes


@dataclass(frozen=True)
class Plan:
    """The prediction for one mini-batch. ``str`` of it is a table.

    Args:
        devices: one for each lane.
        stages: what each stage does, and where.
        layout: which values travel; bytes are a mini-batch's, one way.
        schedule: the order of a training step; its ``microbatches`` are the chunks.
        timeline: that step, as the simulator plays it.
        gap: the slowest stage is at most this fraction slower than that of any cut that fits.
    """

    devices: tuple[DeviceSpec, ...]
    stages: tuple[PlannedStage, ...]
    layout: SkipLayout
    schedule: Schedule
    timeline: Timeline
    checkpoint: str
    gap: float

    @property
    def chunks(self) -> int:
        """Micro-batches."""
        return self.schedule.microbatches

    @property
    def seconds(self) -> float:
        """Of a training step, forward and backward."""
        return self.timeline.makespan

    @property
    def bubble(self) -> float:
        """The idle part of all devices' time."""
        return self.timeline.bubble

    @property
    def memory(self) -> tuple[float, ...]:
        """The most bytes that each device holds at once."""
        return self.timeline.peak_memory

    @property
    def headroom(self) -> tuple[float, ...]:
        """Bytes of each device that are left."""
        limits = (float("inf") if d.memory is None else d.memory for d in self.devices)
        return tuple(limit - held for limit, held in zip(limits, self.memory, strict=True))

    @property
    def links(self) -> dict[tuple[int, int], int]:
        """Bytes from stage to stage, one way."""
        found: dict[tuple[int, int], int] = {}
        for hop in self.layout.hops:
            if hop.source is not None:
                ends = hop.source, hop.target
                found[ends] = found.get(ends, 0) + hop.bytes
        return dict(sorted(found.items()))

    @property
    def partition(self) -> dict[str, int]:
        """The stage of each node: what ``compile(partition=...)`` takes, to cut so."""
        return {name: stage.index for stage in self.stages for name in stage.nodes}

    @property
    def fits(self) -> bool:
        """Whether every device has the memory that it needs."""
        return all(
            device.memory is None or held <= device.memory * (1 + ROUNDING)
            for device, held in zip(self.devices, self.memory, strict=True)
        )

    def __rich__(self) -> Group:
        table = Table(title="plan", title_justify="left")
        for column in ("stage", "device", "first node"):
            table.add_column(column)
        for column in ("time", "links", "state", "activations", "memory left"):
            table.add_column(column, justify="right")
        has_several = len(self.stages) > len(self.devices)
        for stage in self.stages:
            left = self.headroom[stage.lane]
            table.add_row(
                str(stage.index),
                f"{stage.lane} {stage.device.name}" if has_several else stage.device.name,
                stage.nodes[0],
                human_time(stage.seconds),
                human_time(stage.link_s),
                human_bytes(stage.state_bytes),
                human_bytes(stage.activation_bytes),
                "" if left == float("inf") else _signed_bytes(left),
            )
        return Group(table, *self._lines())

    def _lines(self) -> list[str]:
        lines = [
            f"a step of {self.chunks} micro-batches takes {human_time(self.seconds)} "
            f"({self.schedule.name}), of which {self.bubble:.0%} bubble",
            optimality(self.gap),
            "links: "
            + (
                ", ".join(f"{a} -> {b} {human_bytes(n)}" for (a, b), n in self.links.items())
                or "nothing travels"
            ),
        ]
        if self.checkpoint != "never":
            lines.append(f"checkpoint: {self.checkpoint}")
        return lines

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=100, color_system=None, force_jupyter=False)
        console.print(self, soft_wrap=True, highlight=False)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return text


def _signed_bytes(count: float) -> str:
    return ("-" if count < 0 else "") + human_bytes(abs(round(count)))


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

    The others are those of :func:`fxpipe.compile`.

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
    default.Checkpoint(checkpoint)  # which checks it
    specs = _specs(devices)
    placement = placement_of(schedule, len(specs), stages)
    args, kwargs = canonical(model, example_inputs, example_kwargs or {})
    with compiling():
        args, kwargs = usual((args, kwargs))
        dims = input_dims(model, args, kwargs, in_dims)
        began("trace")
        gm, values = sketch(model, args, kwargs, dims, tracer)
        batch = batch_size(values, dims)
        question = _Question(
            _Prices(model, gm, tuple(values), tuple(dims), costs, specs[0], optimizer_states),
            partition,
            specs,
            schedule,
            stages,
            _chunks(chunks, len(placement), batch),
            checkpoint,
        )
        try:
            return question.answer()
        except DoesNotFit:
            began("what would fit")
            short = question.shortage()
            raise DoesNotFit(f"{short}; {question.ways_out(batch)}") from None


@dataclass(frozen=True)
class _Prices:
    """The model graph, with what its nodes cost in so many micro-batches."""

    model: nn.Module
    sketched: fx.GraphModule
    inputs: tuple[Any, ...]
    in_dims: tuple[int | None, ...]
    costs: Costs
    spec: DeviceSpec
    optimizer_states: float
    known: dict[int, fx.GraphModule] = field(default_factory=dict)

    def of(self, chunks: int) -> fx.GraphModule:
        """The graph, which may be changed."""
        if chunks not in self.known:
            began("cost")
            rows = default.Rows(self.inputs, self.in_dims, chunks)
            price = cost_pass(
                self.costs,
                self.inputs,
                spec=self.spec,
                optimizer_states=self.optimizer_states,
                chunks=chunks,
            )
            with untouched(self.model):
                gm = price(rows(copied(self.sketched)))
                self.known[chunks] = default.Random()(default.Shared()(gm))
        return copied(self.known[chunks])


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph once more, with the same tensors and metadata."""
    return fx.GraphModule(gm, copy.deepcopy(gm.graph))


@dataclass(frozen=True)
class _Question:
    """All that a plan depends on."""

    prices: _Prices
    partition: Spec
    specs: tuple[DeviceSpec, ...]
    schedule: str | Schedule
    stages: int | None
    chunks: int
    checkpoint: str

    @cached_property
    def _lanes(self) -> _Lanes:
        placement = placement_of(self.schedule, len(self.specs), self.stages)
        return _Lanes(self.specs, placement, self.schedule, self.chunks, self.checkpoint)

    @property
    def _several(self) -> int:
        """Stages on each device."""
        return len(self._lanes.placement) // len(self.specs)

    def answer(self) -> Plan:
        """The plan; raises a bare :class:`DoesNotFit`."""
        try:
            found = self._lanes.planned(self.prices.of(self.chunks), self.partition, 1)
        except DoesNotFit:
            if self._several == 1:
                raise
            found = None
        if self._several > 1 and (found is None or not found.fits):
            found = self._lanes.planned(self.prices.of(self.chunks), self.partition, self._several)
        assert found is not None
        planned = (replace(s, device=self.specs[s.lane]) for s in found.stages)
        return replace(found, stages=tuple(planned))

    def shortage(self) -> str:
        """How much memory is missing where."""
        several, gm = self._several, self.prices.of(self.chunks)
        spec = self._automatic(gm)
        said = self._lanes.cut(spec, several).shortage(gm.graph, spec)
        if several == 1:
            return said
        return (
            f"{said} (there are {several} stages on each device: what is said of device i here is "
            f"said of stage i, with 1/{several} of its device's memory)"
        )

    def ways_out(self, batch: int | None) -> str:
        """What would make the model fit."""
        several = [2**i * self.chunks for i in range(1, 40) if 2**i * self.chunks < (batch or 0)]
        is_measured = isinstance(self.prices.costs, str) and self.prices.costs == "measured"
        more = [*several, *([batch] if batch and batch > self.chunks else [])]
        is_named = isinstance(self.schedule, str)
        frugal = ["1f1b"] if is_named and self.schedule not in ("1f1b", "zb_h1", AUTO) else []
        settings: dict[str, list[Any]] = {
            "schedule": frugal if len(self.specs) > 1 and self.stages is None else [],
            "chunks": [] if is_measured else more,  # nothing is measured for a mere question
            "checkpoint": milder(self.checkpoint),
        }
        return ways_out(self._fits, {k: v for k, v in settings.items() if v}, len(self.specs))

    def _fits(self, change: Change) -> bool:
        count = len(self.specs) if change.devices is None else change.devices
        specs = (*self.specs, *self.specs[-1:] * (count - len(self.specs)))
        other = replace(self, specs=specs, **change.settings)
        gm = other.prices.of(other.chunks)
        try:
            spec = other._automatic(gm)
            return other._lanes.cut(spec, other._several).can_fit(gm.graph, spec)
        except ValueError:  # there is no such schedule, or no room for the pins
            return False

    def _automatic(self, gm: fx.GraphModule) -> Auto:
        """The partition that is asked for, which is an automatic one: others need not fit."""
        spec = self.partition(gm) if callable(self.partition) else self.partition
        spec = Auto() if isinstance(spec, str) else spec
        assert isinstance(spec, Auto)
        return spec


@dataclass(frozen=True)
class _Lanes:
    """What stages run on, and in which order. ``specs``: of the lanes."""

    specs: tuple[DeviceSpec, ...]
    placement: tuple[int, ...]
    schedule: str | Schedule
    chunks: int
    checkpoint: str

    def planned(self, gm: fx.GraphModule, partition: Spec, part: int) -> Plan:
        """The plan, each stage given one of so many parts of its device's memory."""
        devices = self._devices(part)
        stages = len(devices)
        began("partition")
        gm = self.cut(partition, part)(gm)
        again = recomputed(self.checkpoint, self.chunks)
        found = problem(gm.graph, devices=devices, recomputed=again)
        stage = [node.meta[STAGE] for node in found.work]
        lanes = tuple(f"lane {lane}" for lane in self.placement)
        layout = skip_layout(default.Split()(default.Tied(lanes)(default.Free()(gm))))
        fixed, saved, received = self._held(found, stage, devices)
        began("schedule")
        order, timeline = self._played(found, stage, devices, layout, (fixed, saved, received))
        target = machine(
            devices,
            chunks=self.chunks,
            checkpoint=self.checkpoint,
            live=live(order).stages,
            placement=self.placement,
        )
        priced = prices(found.whole, target, stage)
        return Plan(
            self.specs,
            tuple(
                PlannedStage(
                    i,
                    self.placement[i],
                    devices[i],
                    tuple(n.name for n, s in zip(found.work, stage, strict=True) if s == i),
                    float(priced.compute[i]),
                    float(priced.link[i]),
                    float(priced.times[i]),
                    round(float(fixed[i])),
                    round(float(priced.memory[i] - fixed[i])),
                )
                for i in range(stages)
            ),
            layout,
            order,
            timeline,
            self.checkpoint,
            gm.meta.get(GAP, gap(priced.slowest, lower_bound(found.dag, target))),
        )

    def _devices(self, part: int) -> tuple[DeviceSpec, ...]:
        """Of the stages, each with one of so many parts of the memory."""
        return tuple(
            spec if spec.memory is None else spec.with_memory(spec.memory / part)
            for spec in (self.specs[lane] for lane in self.placement)
        )

    def cut(self, partition: Spec, part: int) -> default.Partition:
        """The pass that cuts, each stage given one of so many parts of its device's memory."""
        return default.Partition(
            len(self.placement),
            partition,
            self._devices(part),
            self.chunks,
            self.checkpoint,
            live=self._alive,
            placement=self.placement,
            explains=False,
        )

    def _alive(self, stages: int) -> Sequence[float] | None:
        """How many micro-batches are alive at once at each of so many stages; None: all."""
        schedule, lanes = self.schedule, len(self.specs)
        if isinstance(schedule, Schedule):
            return live(schedule).stages if schedule.stages == stages else None
        if lanes == len(self.placement):  # a stage a device, and as many devices as asked about
            lanes = stages
            schedule = "1f1b" if schedule == AUTO else schedule  # which it keeps the bound of
        elif schedule == AUTO or stages != len(self.placement):
            return None
        return live(named(schedule, lanes=lanes, stages=stages, microbatches=self.chunks)).stages

    def _held(
        self, found: Problem, stage: Sequence[int], devices: Sequence[DeviceSpec]
    ) -> tuple[Floats, Floats, Floats]:
        """Bytes of each stage: those that are there all the time, and what it saves, and what it
        receives, of a mini-batch."""
        target = machine(devices, placement=self.placement)
        one, none = np.ones(len(devices)), np.zeros(len(devices))
        fixed, and_saved, and_received = (
            prices(found.whole, replace(target, held=held, received=received), stage).memory
            for held, received in ((none, none), (one, none), (none, one))
        )
        return fixed, and_saved - fixed, and_received - fixed

    def _played(
        self,
        found: Problem,
        stage: Sequence[int],
        devices: Sequence[DeviceSpec],
        layout: SkipLayout,
        held: tuple[Floats, Floats, Floats],
    ) -> tuple[Schedule, Timeline]:
        """The order of a step, and the step in that order."""
        chunks, stages = self.chunks, len(devices)
        fixed, saved, received = held
        costs = self._costs(found, stage, devices)
        edges, once = self._edges(found, layout)
        links = Links(edges, between=self._between(), once=once)
        kept = saved if self.checkpoint == "never" else received
        always = [0.0] * len(self.specs)
        for s, lane in enumerate(self.placement):
            always[lane] += float(fixed[s])
        if self.checkpoint != "never":  # one micro-batch at a time is computed again
            for lane in range(len(always)):
                own = [s for s in range(stages) if self.placement[s] == lane]
                always[lane] += max(float(saved[s]) for s in own) / chunks
        memory = Memory([float(size) / chunks for size in kept], always)
        order = self._ordered(costs, links, memory)
        return order, simulate(order, costs, links, memory)

    def _ordered(self, costs: Sequence[StageCost], links: Links, memory: Memory) -> Schedule:
        """The schedule; one that is searched for fits the devices' memory, if any does."""
        limits = [float("inf") if s.memory is None else s.memory for s in self.specs]
        search = partial(
            schedule_of,
            self.schedule,
            self.placement,
            self.chunks,
            lambda: costs,
            links=links,
            memory=memory,
        )
        if self.schedule == AUTO and min(limits) < float("inf"):
            with suppress(ValueError):  # nothing fits
                return search(max_bytes=[limit * (1 + ROUNDING) for limit in limits])
        return search()

    def _costs(
        self, found: Problem, stage: Sequence[int], devices: Sequence[DeviceSpec]
    ) -> list[StageCost]:
        """Of a micro-batch at each stage. Half a backward is for the inputs, as in a product of
        matrices; where a stage is run again for it, it is done at once."""
        forward, backward = [0.0] * len(devices), [0.0] * len(devices)
        for node, s in zip(found.work, stage, strict=True):
            is_another = devices[s] != devices[0]
            times = relative_time(node, devices[s], devices[0]) if is_another else 1.0
            forward[s] += times * node.meta[COST].forward_s / self.chunks
            backward[s] += times * node.meta[COST].backward_s / self.chunks
        if self.checkpoint == "never":
            return [StageCost(f, b / 2, b / 2) for f, b in zip(forward, backward, strict=True)]
        again = recomputed(self.checkpoint, self.chunks)
        return [StageCost(f, b + again * f) for f, b in zip(forward, backward, strict=True)]

    def _edges(self, found: Problem, layout: SkipLayout) -> tuple[list[Edge], list[Edge]]:
        """What travels from stage to stage, and the gradients back: for one micro-batch; once."""
        nodes = found.work[0].graph.nodes
        values = {str(node.target) if node.op == "get_attr" else node.name: node for node in nodes}
        sizes: dict[tuple[int, int], tuple[float, float]] = {}
        once = []
        for hop in layout.hops:
            if hop.source is None:
                continue
            trained = batch_bytes(values[hop.value], trained=True)
            if hop.once:
                once.append(Edge(hop.source, hop.target, hop.bytes, trained))
            else:
                there, back = sizes.get((hop.source, hop.target), (0.0, 0.0))
                sizes[hop.source, hop.target] = there + hop.bytes, back + trained
        return [
            Edge(*ends, there / self.chunks, back / self.chunks)
            for ends, (there, back) in sizes.items()
        ], once

    def _between(self) -> dict[tuple[int, int], Link]:
        """The slower of two devices' links is the one between them."""
        return {
            (a, b): Link(
                max(one.link_latency_s, other.link_latency_s),
                min(one.link_bytes_per_s, other.link_bytes_per_s),
            )
            for a, one in enumerate(self.specs)
            for b, other in enumerate(self.specs)
            if a != b
        }


def _specs(devices: Sequence[DeviceSpec | str]) -> tuple[DeviceSpec, ...]:
    if not isinstance(devices, Sequence) or isinstance(devices, str) or not devices:
        raise ValueError(
            f"devices is {devices!r}: give a list of DeviceSpec, or of names of known devices, "
            'one for each lane, such as ["h100"] * 4'
        )
    return tuple(map(DeviceSpec.of, devices))


def sketch(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dims: list[int | None],
    tracer: str | CustomTracer,
) -> tuple[fx.GraphModule, list[Any]]:
    """The model graph with fake values, and the inputs; nothing of the model is run or compared."""
    tracers = ["symbolic", "export"] if tracer == "auto" else [tracer]
    for one in tracers:
        try:
            traced: Traced = trace(model, args, kwargs, tracer=one, batch_dims=dims, check=False)
            values = traced.bind(args, kwargs)
            with untouched(model):
                return default.Alias(tuple(values))(traced.graph_module), values
        except Exception:
            if one == tracers[-1]:
                raise
    raise TraceError("no tracer")  # for mypy: the loop returns or raises


def _chunks(chunks: int | None, stages: int, batch: int | None) -> int:
    if chunks is not None and (not isinstance(chunks, int) or chunks < 1):
        raise ValueError(f"chunks is {chunks!r}: give the number of micro-batches, 1 or more")
    wanted = chunks or (4 * stages if stages > 1 else 1)
    return max(1, min(wanted, 1 if batch is None else batch))
