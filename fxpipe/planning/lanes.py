"""The lanes of a plan: how a model is cut for them, and how long a step takes in the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import fx

from fxpipe.ir.cost import Cost, batch_bytes, stage_costs
from fxpipe.ir.devices import DeviceSpec
from fxpipe.ir.graph import COST, GAP, STAGE
from fxpipe.ir.progress import report_progress
from fxpipe.planning.estimates import (
    estimated_costs,
    in_segments,
    stage_memory,
    step_memory,
    traffic,
)
from fxpipe.planning.result import ROUNDING, Plan, PlannedStage
from fxpipe.schedule import (
    Link,
    Links,
    Memory,
    NoRoom,
    Schedule,
    StageCost,
    Timeline,
    named,
    peaks,
    schedule_of,
    simulate,
)
from fxpipe.schedule.choice import AUTO
from passes.chain import Chain, ToStages, run
from passes.common.modes import Modes, recomputed_by
from passes.common.skips import Hop, SkipLayout, skip_layout
from passes.common.stage_names import stage_names
from passes.cost.analytic import relative_time
from passes.partition.cut.bounds import gap, lower_bound
from passes.partition.cut.dag import prices
from passes.partition.partition import Partition, Spec
from passes.partition.problem import CutProblem, machine, problem


@dataclass(frozen=True)
class _Sent:
    """The values that the stages of a cut send to each other."""

    cut: CutProblem
    layout: SkipLayout

    @cached_property
    def _values(self) -> dict[str, fx.Node]:
        nodes = self.cut.work[0].graph.nodes
        return {str(node.target) if node.op == "get_attr" else node.name: node for node in nodes}

    def gradient_bytes(self, hop: Hop) -> int:
        """The bytes of the gradient that comes back for a value, for a mini-batch."""
        return batch_bytes(self._values[hop.value], trained=True)


@dataclass(frozen=True)
class PlannedLanes:
    """The lanes of a planned pipeline: their devices, the stages on each, and the order of a step.

    Args:
        specs: the description of each lane's device.
        placement: the lane of each stage.
        chain: the passes, of which those from "partition" to "split" run here.
        checkpoint_segments: as for :func:`fxpipe.compile`.
        names: the name of each lane's device, where several lanes may be on one device, between
            which nothing has to travel. None: each lane has a device of its own.
    """

    specs: tuple[DeviceSpec, ...]
    placement: tuple[int, ...]
    schedule: str | Schedule
    chunks: int
    checkpoint: Modes
    chain: Chain
    checkpoint_segments: int = 1
    names: tuple[str, ...] | None = None

    @property
    def _names(self) -> tuple[str, ...]:
        return self.names or tuple(f"lane {lane}" for lane in range(len(self.specs)))

    @property
    def _places(self) -> tuple[int, ...]:
        """The number of the device that each stage runs on: lanes of one name share a device."""
        return tuple(self._names.index(self._names[lane]) for lane in self.placement)

    def planned(
        self, gm: fx.GraphModule, partition: Spec, part: int, reserve: Sequence[float] = ()
    ) -> Plan:
        """The plan for a model graph that has costs. A stage may take ``1 / part`` of the memory of
        its device, less the bytes that are in ``reserve`` for it."""
        devices = self._devices(part, reserve)
        stages = len(devices)
        report_progress("partition")
        lanes = tuple(self._names[lane] for lane in self.placement)
        cut = ToStages((), (), devices=lanes, partition=self.cut(partition, part, reserve))
        rest = self.chain.passes(cut, since="partition", until="split")
        gm = next(rest)(gm)  # runs pass "partition"
        again = recomputed_by(self.checkpoint, self.chunks, stages)
        found = problem(gm.graph, devices=devices, recomputed=again)
        stage = [node.meta[STAGE] for node in found.work]
        gm = run(rest, gm)
        costs = stage_costs(gm.graph)
        contains = stage_names(gm.graph)
        kept_graph = gm.graph
        stage_graph = run(self.chain.passes(cut, since="split"), gm)
        layout = skip_layout(stage_graph)
        sent = _Sent(found, layout)
        kept = stage_memory(costs, layout, kept_graph)
        if self.checkpoint_segments > 1:
            modules: list[Any] = [stage_graph.get_submodule(f"stage_{i}") for i in range(stages)]
            kept = in_segments(kept, modules, self.checkpoint_segments, self.checkpoint)
        memory = step_memory(kept, self.placement, self.chunks, self.checkpoint)
        report_progress("schedule")
        order, timeline = self._played(self._costs(found, stage, devices), sent, memory, reserve)
        target = machine(
            devices,
            chunks=self.chunks,
            checkpoint=self.checkpoint,
            order=order,
            placement=self._places,
            segments=self.checkpoint_segments,
        )
        priced = prices(found.whole, target, stage)
        held = [round(n) for n in peaks(order, memory).stages]
        known = [sum(round(kept[i].fixed) + held[i] for i in own) for own in self._stages_on]
        running = [max(0, round(n - k)) for n, k in zip(timeline.peak_memory, known, strict=True)]
        return Plan(
            self.specs,
            tuple(
                PlannedStage(
                    i,
                    self.placement[i],
                    devices[i],
                    contains[i],
                    tuple(n.name for n, s in zip(found.work, stage, strict=True) if s == i),
                    float(priced.compute[i]),
                    float(priced.link[i]),
                    float(priced.times[i]),
                    round(kept[i].fixed),
                    held[i],
                    running[self.placement[i]] // len(self._stages_on[self.placement[i]]),
                    float(priced.memory[i]),
                )
                for i in range(stages)
            ),
            layout,
            order,
            timeline,
            self.checkpoint,
            gm.meta.get(GAP, gap(priced.slowest, lower_bound(found.dag, target))),
        )

    @property
    def _stages_on(self) -> list[list[int]]:
        """The numbers of the stages that each lane runs, lane by lane."""
        lanes = range(len(self.specs))
        return [[i for i, own in enumerate(self.placement) if own == lane] for lane in lanes]

    def _devices(self, part: int, reserve: Sequence[float] = ()) -> tuple[DeviceSpec, ...]:
        """The device of each stage, with ``1 / part`` of its memory, less the stage's reserve."""
        specs = [self.specs[lane] for lane in self.placement]
        return tuple(
            spec
            if spec.memory is None
            else spec.with_memory(max(1.0, spec.memory / part - (reserve[i] if reserve else 0.0)))
            for i, spec in enumerate(specs)
        )

    def cut(self, partition: Spec, part: int, reserve: Sequence[float] = ()) -> Partition:
        """The pass that cuts the model, for stages with so much memory as :meth:`planned` says."""
        return Partition(
            len(self.placement),
            partition,
            self._devices(part, reserve),
            self.chunks,
            self.checkpoint,
            order=self._order,
            placement=self._places,
            explains=False,
            segments=self.checkpoint_segments,
        )

    def _order(self, stages: int) -> Schedule | None:
        """The schedule that tells the cut how many micro-batches are alive at once, if there are so
        many stages. None: all micro-batches may be alive at once."""
        schedule, lanes = self.schedule, len(self.specs)
        if isinstance(schedule, Schedule):
            return schedule if schedule.stages == stages else None
        if lanes == len(self.placement):  # a device for each stage, so that there are as many lanes
            lanes = stages
            # Where 1F1B fits the memory, so does what the search finds, since it tries 1F1B too.
            schedule = "1f1b" if schedule == AUTO else schedule
        elif schedule == AUTO or stages != len(self.placement):
            return None
        return named(schedule, lanes=lanes, stages=stages, microbatches=self.chunks)

    def _played(
        self, costs: Sequence[StageCost], sent: _Sent, memory: Memory, reserve: Sequence[float]
    ) -> tuple[Schedule, Timeline]:
        """The schedule of a step, and its timeline as the simulator predicts it."""
        edges, once = traffic(sent.layout, self.chunks, sent.gradient_bytes)
        links = Links(edges, between=self._between(), once=once)
        order = self._ordered(costs, links, memory, reserve)
        return order, simulate(order, costs, links, memory)

    def _ordered(
        self, costs: Sequence[StageCost], links: Links, memory: Memory, reserve: Sequence[float]
    ) -> Schedule:
        """The schedule of a step. A search takes a schedule that keeps within the devices' memory,
        less what is in reserve for their stages, if there is one."""
        held = [sum(reserve[i] for i in own) if reserve else 0.0 for own in self._stages_on]
        limits = [
            float("inf") if spec.memory is None else spec.memory - bytes_held
            for spec, bytes_held in zip(self.specs, held, strict=True)
        ]
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
            with suppress(NoRoom):  # no schedule fits: the plan says how many bytes are missing
                return search(max_bytes=[limit * (1 + ROUNDING) for limit in limits])
        return search()

    def _costs(
        self, found: CutProblem, stage: Sequence[int], devices: Sequence[DeviceSpec]
    ) -> list[StageCost]:
        """The seconds that a micro-batch takes at each stage, on the stage's own device."""
        forward, backward = [0.0] * len(devices), [0.0] * len(devices)
        for node, s in zip(found.work, stage, strict=True):
            is_another = devices[s] != devices[0]
            times = relative_time(node, devices[s], devices[0]) if is_another else 1.0
            forward[s] += times * node.meta[COST].forward_s
            backward[s] += times * node.meta[COST].backward_s
        costs = [Cost(forward_s=f, backward_s=b) for f, b in zip(forward, backward, strict=True)]
        return estimated_costs(costs, self.chunks, self.checkpoint)

    def _between(self) -> dict[tuple[int, int], Link]:
        """The link between each pair of lanes, which is as slow as the slower of their devices'
        links."""
        return {
            (a, b): Link(
                max(one.link_latency_s, other.link_latency_s),
                min(one.link_bytes_per_s, other.link_bytes_per_s),
            )
            for a, one in enumerate(self.specs)
            for b, other in enumerate(self.specs)
            if self._names[a] != self._names[b]
        }
