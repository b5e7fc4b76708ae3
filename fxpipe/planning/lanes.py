"""The lanes of a plan: how a model is cut for them, and how long a step takes in the simulator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from torch import fx

from fxpipe.ir.cost import Cost, stage_costs, total
from fxpipe.ir.devices import DeviceSpec
from fxpipe.ir.graph import COST, GAP, STAGE
from fxpipe.ir.progress import report_progress
from fxpipe.planning.estimates import (
    LossMemory,
    StageMemory,
    estimated_costs,
    predicted,
    stage_memory,
    step_links,
    step_memory,
    updates_on,
    with_loss,
    with_moves,
    with_updates,
)
from fxpipe.planning.loss import SavedByLoss, loss_memory, loss_seconds
from fxpipe.planning.result import ROUNDING, Plan, PlannedStage
from fxpipe.planning.segmented import KnownSegments, SegmentedStage
from fxpipe.schedule import (
    Links,
    Memory,
    NoRoom,
    Schedule,
    StageCost,
    Timeline,
    forwards,
    named,
    peaks,
    schedule_of,
)
from fxpipe.schedule.choice import AUTO
from fxpipe.schedule.recomputation import recomputed_cells
from passes.chain import Chain, ToStages, run
from passes.common.modes import AUTO as AUTO_MODES
from passes.common.modes import Modes, choices, moved, of_stages, plain
from passes.common.segments import NUMBERS, Segments, counts, is_open, simplest, ways
from passes.common.skips import SkipLayout, skip_layout
from passes.common.stage_names import stage_names
from passes.cost.analytic import relative_time
from passes.cost.update import NO_UPDATE, Update
from passes.partition.cut.bounds import gap, lower_bound
from passes.partition.cut.dag import Machine, prices
from passes.partition.cut.solve import Effort
from passes.partition.partition import Partition, Spec
from passes.partition.problem import Beside, CutProblem, machine, problem
from passes.partition.shift import Shift


@dataclass(frozen=True)
class CutModel:
    """A model that has been cut into stages, ahead of the decision which micro-batches these keep.

    Attributes:
        gm: the model graph.
        problem: the problem that the cut solves.
        stage: the stage of each node of the problem.
        devices: the description of each stage's device, with the memory that the cut could take.
        contains: what is in each stage, in words.
        modules: the stages.
        layout: what the stages send to each other.
        kept: the bytes that each stage keeps, if no micro-batch is checkpointed.
        beside: for each way that the lanes offer, the bytes that each stage has been taken to need
            beside what it keeps; see :class:`~passes.partition.cut.dag.Way`. Empty: none.
        loss: what the loss takes beside what the last stage keeps.
        bound: the slowest stage of no cut that fits takes less seconds for a mini-batch, as far as
            the search for a cut knows what fits.
        segments: the stages in segments that have been looked at, of this cut and of others.
        kept_in_segments: the bytes that those of this cut keep, by stage, mode and number of
            segments.
        steps: the steps that have been predicted, by the ways of their stages and their order.
    """

    gm: fx.GraphModule
    problem: CutProblem
    stage: tuple[int, ...]
    devices: tuple[DeviceSpec, ...]
    contains: tuple[str, ...]
    modules: tuple[fx.GraphModule, ...]
    layout: SkipLayout
    kept: tuple[StageMemory, ...]
    beside: Beside
    loss: LossMemory
    bound: float = 0.0
    segments: KnownSegments = field(default_factory=KnownSegments)
    kept_in_segments: dict[tuple[int, str, int], StageMemory] = field(default_factory=dict)
    steps: dict[tuple[tuple[tuple[str, int], ...], Schedule], PlannedStep] = field(
        default_factory=dict
    )

    @cached_property
    def costs(self) -> list[Cost]:
        """The seconds that a mini-batch takes at each stage, on the stage's own device."""
        found: list[list[Cost]] = [[] for _ in self.devices]
        for node, stage in zip(self.problem.work, self.stage, strict=True):
            device, cost = self.devices[stage], node.meta[COST]
            is_another = device != self.devices[0]
            times = relative_time(node, device, self.devices[0]) if is_another else 1.0
            found[stage].append(
                Cost(
                    forward_s=times * cost.forward_s,
                    backward_s=times * cost.backward_s,
                    again_s=times * cost.again_s,
                    operators=cost.operators,
                )
            )
        return list(map(total, found))

    def kept_by(self, stage: int, mode: str, count: int) -> StageMemory:
        """The bytes that a stage keeps that has so many segments."""
        key = stage, mode, count
        if count == 1:
            return self.kept[stage]
        if key not in self.kept_in_segments:
            parts = self.in_segments(stage, count)
            self.kept_in_segments[key] = parts.memory(self.kept[stage], mode)
        return self.kept_in_segments[key]

    def in_segments(self, stage: int, count: int) -> SegmentedStage:
        """A stage in so many segments, or in fewer if it has fewer places to cut."""
        return self.segments.of(self.modules[stage], count)

    def most_segments(self, stage: int) -> int:
        """In how many segments a stage can be cut, of those numbers that the compiler chooses."""
        most = len(self.in_segments(stage, NUMBERS[-1]).calls)
        return max(number for number in NUMBERS if number <= max(1, most))

    @property
    def stages_by_name(self) -> dict[str, int]:
        """The stage of each node, by its name."""
        pairs = zip(self.problem.work, self.stage, strict=True)
        return {node.name: stage for node, stage in pairs}

    def nodes_of(self, stage: int) -> tuple[str, ...]:
        """The names of a stage's nodes."""
        pairs = zip(self.problem.work, self.stage, strict=True)
        return tuple(node.name for node, own in pairs if own == stage)


@dataclass(frozen=True)
class PlannedStep:
    """A predicted training step.

    Attributes:
        modes: which micro-batches are checkpointed.
        segments: in how many segments stages are recomputed.
        kept: the bytes that each stage keeps.
        memory: the same, as the simulator takes it.
        order: the schedule.
        timeline: the prediction.
    """

    modes: Modes
    segments: Segments
    kept: tuple[StageMemory, ...]
    memory: Memory
    order: Schedule
    timeline: Timeline


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
        loss: what the loss saves for its backward, and how long it takes; None if that is not
            known.
        training: whether a training step is planned; if not, a call without a backward.
        update: what the step of the optimizer takes.
        segments: the stages in segments that have been looked at.
        known: the cuts that have been looked at, by the stages of their nodes, for devices without
            limits of memory. Cuts that suit different limits, or ways, are often the same.
    """

    specs: tuple[DeviceSpec, ...]
    placement: tuple[int, ...]
    schedule: str | Schedule
    chunks: int
    checkpoint: Modes
    chain: Chain
    checkpoint_segments: Segments = 1
    names: tuple[str, ...] | None = None
    loss: SavedByLoss | None = None
    training: bool = True
    effort: Effort | None = None
    update: Update = NO_UPDATE
    segments: KnownSegments = field(default_factory=KnownSegments, compare=False, repr=False)
    known: dict[tuple[int, ...], CutModel] = field(default_factory=dict, compare=False, repr=False)

    @property
    def _names(self) -> tuple[str, ...]:
        return self.names or tuple(f"lane {lane}" for lane in range(len(self.specs)))

    @property
    def _places(self) -> tuple[int, ...]:
        """The number of the device that each stage runs on: lanes of one name share a device."""
        return tuple(self._names.index(self._names[lane]) for lane in self.placement)

    def cut_up(
        self,
        gm: fx.GraphModule,
        partition: Spec,
        part: int | None,
        beside: Beside = (),
        *,
        limit: float = math.inf,
        is_tightest: bool = False,
        shift: Shift | None = None,
        exposed: float = 1.0,
    ) -> CutModel:
        """Cut a model graph that has costs.

        Args:
            part: a stage may take ``1 / part`` of the memory of its device; None: as much as it
                needs.
            beside: the bytes that stages need beside what they keep, as :meth:`beside` says.
            limit: the seconds that the slowest stage may take for a mini-batch.
            is_tightest: whether the cut is the one whose fullest device is least full.
            shift: the cut is what this makes of another one.
            exposed: the part of the time of recomputing that the cut counts.

        Raises :class:`DoesNotFit` if no cut is found that fits.
        """
        devices = self.devices(part)
        report_progress("partition")
        way = self.cut(
            partition,
            part,
            beside,
            limit=limit,
            is_tightest=is_tightest,
            shift=shift,
            exposed=exposed,
        )
        lanes = tuple(self._names[lane] for lane in self.placement)
        context = ToStages(
            (), (), devices=lanes, partition=way, chunks=self.chunks, training=self.training
        )
        rest = self.chain.passes(context, since="partition", until="split")
        gm = next(rest)(gm)  # runs pass "partition"
        found = problem(gm.graph, devices=devices)
        stage, gap = tuple(node.meta[STAGE] for node in found.work), gm.meta.get(GAP)
        if stage not in self.known:
            stage_graph = run(self.chain.passes(context, since="split"), run(rest, gm))
            self.known[stage] = self._split(gm, stage_graph, found, stage)
        cut = replace(self.known[stage], devices=tuple(devices), beside=beside)
        return replace(cut, bound=self._bound(cut, gap))

    def _split(
        self,
        gm: fx.GraphModule,
        stage_graph: fx.GraphModule,
        found: CutProblem,
        stage: tuple[int, ...],
    ) -> CutModel:
        """A cut, with the stage graph that it leads to, for devices without limits of memory."""
        costs, layout = stage_costs(stage_graph), skip_layout(stage_graph)
        return CutModel(
            gm,
            found,
            stage,
            self.devices(None),
            tuple(stage_names(gm.graph)),
            tuple(stage_graph.get_submodule(f"stage_{i}") for i in range(len(self.placement))),  # type: ignore[misc]
            layout,
            tuple(stage_memory(costs, layout, stage_graph, training=self.training)),
            (),
            loss_memory(self.loss, gm.graph),
            segments=self.segments,
        )

    def _bound(self, cut: CutModel, gap: float | None) -> float:
        """The bound of a cut (see :class:`CutModel`) that is this far from optimal at most; None:
        that is not known."""
        order = self._order(len(cut.devices))
        target = self._machine(cut, self.checkpoint, self.checkpoint_segments, order, cut.beside)
        if gap is None:
            return lower_bound(cut.problem.dag, target)
        return prices(cut.problem.whole, target, cut.stage).slowest / (1 + gap)

    def ways(self, cut: CutModel, stage: int) -> list[tuple[str, int]]:
        """The modes, each with a number of segments, among which a stage may choose: those that
        keep most come first. It has no more segments than places to cut it, and a single one if the
        user's schedule says when it is recomputed."""
        stages = len(cut.devices)
        found = [
            (of_stages(modes, stages)[stage], counts(segments, modes, stages)[stage])
            for modes, segments in self._all_ways
        ]
        if self.checkpoint == AUTO_MODES and not cut.devices[stage].host_bytes_per_s:
            found = [(mode, number) for mode, number in found if not moved(mode)]
        if is_open(self.checkpoint_segments, self.checkpoint):
            most = 1 if stage in self._recomputed else cut.most_segments(stage)
            found = [(mode, number) for mode, number in found if number <= most]
        return list(dict.fromkeys(found))

    @property
    def has_host(self) -> bool:
        """Whether some device has a link to the memory of its host."""
        return any(spec.host_bytes_per_s for spec in self.specs)

    @property
    def is_eager(self) -> bool:
        """Whether stages run operator by operator."""
        return all(spec.is_eager for spec in self.specs)

    @property
    def known_modes(self) -> tuple[Modes, ...]:
        """The modes among which the compiler may choose on these devices."""
        has_parts = is_open(self.checkpoint_segments, AUTO_MODES)
        return choices(AUTO_MODES, self.has_host, self.is_eager, has_parts)

    @property
    def _all_ways(self) -> list[tuple[Modes, Segments]]:
        return ways(self.checkpoint, self.checkpoint_segments, self.has_host, self.is_eager)

    @property
    def _recomputed(self) -> set[int]:
        """The stages of which the user's schedule says when they are recomputed."""
        given = self.schedule
        if not isinstance(given, Schedule):
            return set()
        actions = (action for lane in range(len(given.lanes)) for action in given.actions(lane))
        return {stage for stage, _ in recomputed_cells(actions)}

    def nearest(self, cut: CutModel, stage: int, way: tuple[str, int]) -> tuple[str, int]:
        """A mode and a number of segments, as a stage of this cut can have them: it has fewer
        segments if it has fewer places to cut, and keeps all where it cannot go this way: a device
        without a host's memory moves nothing."""
        mode, number = way
        fewer = [n for kept, n in self.ways(cut, stage) if kept == mode and n <= number]
        return (mode, max(fewer)) if fewer else ("never", 1)

    def _offered(self, cut: CutModel) -> list[list[tuple[str, int]]]:
        """For each way, the mode and the number of segments of each stage."""
        stages = len(cut.devices)
        return [
            [
                self.nearest(cut, stage, way)
                for stage, way in enumerate(
                    zip(of_stages(modes, stages), counts(segments, modes, stages), strict=True)
                )
            ]
            for modes, segments in self._all_ways
        ]

    def chosen(self, cut: CutModel) -> list[tuple[str, int]]:
        """The mode of each stage of a cut, with its number of segments: those given or, for "auto",
        those with which the stage takes least time of those that its memory has room for."""
        order = self._order(len(cut.devices))
        target = self._machine(cut, self.checkpoint, self.checkpoint_segments, order, cut.beside)
        priced = prices(cut.problem.whole, target, cut.stage)
        offered = self._offered(cut)
        return [offered[way][stage] for stage, way in enumerate(priced.way)]

    def is_within(self, cut: CutModel, limit: float) -> bool:
        """Whether the limits of memory cost a cut no time: each stage has room for the way that
        takes it least time, and takes at most so many seconds for a mini-batch."""
        order = self._order(len(cut.devices))
        target = self._machine(cut, self.checkpoint, self.checkpoint_segments, order, cut.beside)
        priced = prices(cut.problem.whole, target, cut.stage)
        free = prices(cut.problem.whole, replace(target, memory=None), cut.stage)
        return priced.fits(target) and priced.way == free.way and priced.slowest <= limit

    def needs(self, cut: CutModel) -> list[dict[tuple[str, int], float]]:
        """For each stage, the bytes that its device needs if the stage goes a way, by all ways of
        which ``cut.beside`` tells. Nothing is known of stages that share a device."""
        found: list[dict[tuple[str, int], float]] = [{} for _ in cut.devices]
        if not cut.beside or len(self.placement) > len(self.specs):
            return found
        order = self._order(len(cut.devices))
        target = self._machine(cut, self.checkpoint, self.checkpoint_segments, order, cut.beside)
        needed = prices(cut.problem.whole, target, cut.stage).needed
        for row, offered in zip(needed, self._offered(cut), strict=True):
            for stage, way in enumerate(offered):
                found[stage][way] = float(row[stage])
        return found

    def times(self, cut: CutModel, step: PlannedStep) -> list[float]:
        """The seconds that each stage of a cut takes for a mini-batch, as the search for a cut
        counts them, with the ways of a step."""
        target = self._machine(cut, step.modes, step.segments, step.order)
        return [float(t) for t in prices(cut.problem.whole, target, cut.stage).times]

    def beside(self, cut: CutModel, order: Schedule) -> Beside:
        """For each way, the bytes that each stage of a cut needs beside those that the search for a
        cut counts: all stages go this way in a simulated step. Stages of one lane need equal parts
        of what the lane needs."""
        target = self._machine(
            cut, self.checkpoint, self.checkpoint_segments, self._order(len(cut.devices))
        )
        counted = prices(cut.problem.whole, target, cut.stage).needed
        found = []
        for needed, offered in zip(counted, self._offered(cut), strict=True):
            row = [0.0] * len(offered)
            held = self.step(cut, offered, order).timeline.peak_memory
            for own, bytes_held in zip(self._stages_on, held, strict=True):
                for stage in own:
                    row[stage] = (bytes_held - sum(float(needed[i]) for i in own)) / len(own)
            found.append(tuple(row))
        return tuple(found)

    def step(
        self, cut: CutModel, ways: Sequence[tuple[str, int]], order: Schedule | None = None
    ) -> PlannedStep:
        """The training step of a cut, as the simulator predicts it, whose stages have these modes
        and numbers of segments.

        ``order``: its schedule, made for other modes maybe; None: the one that the user asks for.
        """
        if order is None:
            return self._step(cut, ways, None)
        key = tuple(ways), order
        if key not in cut.steps:
            cut.steps[key] = self._step(cut, ways, order)
        return cut.steps[key]

    def _step(
        self, cut: CutModel, ways: Sequence[tuple[str, int]], order: Schedule | None
    ) -> PlannedStep:
        """Predict the step that :meth:`step` returns, and keeps for the next time."""
        modes = plain([mode for mode, _ in ways])
        segments = simplest([number for _, number in ways], modes)
        kept = tuple(cut.kept_by(stage, *way) for stage, way in enumerate(ways))
        updates = updates_on(self.specs, self.update)
        memory = step_memory(kept, self.placement, self.chunks, modes, cut.loss, updates)
        parts = [cut.in_segments(i, n).shares if n > 1 else [1.0] for i, (_, n) in enumerate(ways)]
        costs = estimated_costs(cut.costs, self.chunks, modes, parts)
        costs = with_loss(costs, *self._loss_seconds(cut.gm.graph))
        costs = with_moves(costs, kept, self.chunks, modes)
        links = step_links(cut.layout, self.chunks, self.specs, self._names, cut.gm.graph)
        if order is None:
            are_whole = all(number == 1 for _, number in ways)
            order = self._ordered(costs, links, memory, self._reserve(cut, ways), are_whole)
        else:  # segments are recomputed right ahead of their own backward
            again = enumerate(zip(memory.again(len(costs)), ways, strict=True))
            order = order.recomputing(
                [
                    n if number == 1 and stage not in memory.offloaded else 0
                    for stage, (n, (_, number)) in again
                ]
            )
        order = order.reloading(memory.offloaded)
        costs = with_updates(costs, kept, cut.devices, self.update)
        timeline = predicted(order, costs, links, memory, training=self.training)
        return PlannedStep(modes, segments, kept, memory, order, timeline)

    def plan(self, cut: CutModel, step: PlannedStep) -> Plan:
        """The plan that has this cut and this step."""
        target = self._machine(cut, step.modes, step.segments, step.order)
        priced = prices(cut.problem.whole, target, cut.stage)
        kept, timeline = step.kept, step.timeline
        held = [round(n) for n in peaks(step.order, step.memory).stages]
        known = [sum(round(kept[i].fixed) + held[i] for i in own) for own in self._stages_on]
        running = [max(0, round(n - k)) for n, k in zip(timeline.peak_memory, known, strict=True)]
        return Plan(
            self.specs,
            tuple(
                PlannedStage(
                    i,
                    self.placement[i],
                    self.specs[self.placement[i]],
                    cut.contains[i],
                    cut.nodes_of(i),
                    float(priced.compute[i]),
                    float(priced.link[i]),
                    float(priced.times[i]),
                    round(kept[i].fixed),
                    held[i],
                    running[self.placement[i]] // len(self._stages_on[self.placement[i]]),
                )
                for i in range(len(cut.devices))
            ),
            cut.layout,
            step.order,
            timeline,
            step.modes,
            gap(priced.slowest, cut.bound),
            self.training,
            step.segments,
        )

    def _machine(
        self,
        cut: CutModel,
        modes: Modes,
        segments: Segments,
        order: Schedule | None,
        beside: Beside = (),
    ) -> Machine:
        return machine(
            cut.devices,
            chunks=self.chunks,
            checkpoint=modes,
            order=order,
            placement=self._places,
            segments=segments,
            beside=beside,
            loss=self._seconds_of_loss(cut.gm.graph),
        )

    def _seconds_of_loss(self, graph: fx.Graph) -> float:
        """The seconds that the loss of a mini-batch and its backward take in the last stage."""
        return self.chunks * sum(self._loss_seconds(graph))

    def _loss_seconds(self, graph: fx.Graph) -> tuple[float, float]:
        """The seconds that the loss of a micro-batch takes in the last stage, and its backward."""
        return loss_seconds(self.loss, graph, self.chunks, self.specs[self.placement[-1]])

    def _reserve(self, cut: CutModel, ways: Sequence[tuple[str, int]]) -> list[float]:
        """The bytes of each stage that a search for a schedule has to leave free, since it does not
        know what stages need while they run."""
        reserve = [0.0] * len(ways)
        for row, offered in zip(cut.beside, self._offered(cut) if cut.beside else (), strict=True):
            for stage, way in enumerate(ways):
                if offered[stage] == way:
                    reserve[stage] = max(reserve[stage], row[stage])
        return reserve

    @property
    def _stages_on(self) -> list[list[int]]:
        """The numbers of the stages that each lane runs, lane by lane."""
        lanes = range(len(self.specs))
        return [[i for i, own in enumerate(self.placement) if own == lane] for lane in lanes]

    def devices(self, part: int | None) -> tuple[DeviceSpec, ...]:
        """The device of each stage, with ``1 / part`` of its memory; None: without a limit."""
        specs = [self.specs[lane] for lane in self.placement]
        return tuple(
            spec.with_memory(
                None if part is None or spec.memory is None else max(1.0, spec.memory / part)
            )
            for spec in specs
        )

    def cut(
        self,
        partition: Spec,
        part: int | None,
        beside: Beside = (),
        *,
        limit: float = math.inf,
        is_tightest: bool = False,
        shift: Shift | None = None,
        exposed: float = 1.0,
    ) -> Partition:
        """The pass that cuts the model, with arguments as :meth:`cut_up` takes them."""
        return Partition(
            len(self.placement),
            partition,
            self.devices(part),
            self.chunks,
            self.checkpoint,
            order=self._order,
            placement=self._places,
            explains=False,
            segments=self.checkpoint_segments,
            effort=self.effort,
            beside=beside,
            limit=limit,
            is_tightest=is_tightest,
            shift=shift,
            exposed=exposed,
            loss=self._seconds_of_loss,
        )

    def _order(self, stages: int) -> Schedule | None:
        """The schedule that tells the cut how many micro-batches are alive at once, if there are so
        many stages. None: all micro-batches may be alive at once."""
        schedule, lanes = self.schedule, len(self.specs)
        if not self.training:
            return None  # what a call keeps is kept to its end
        if isinstance(schedule, Schedule):
            return schedule if schedule.stages == stages else None
        if lanes == len(self.placement):  # a device for each stage, so that there are as many lanes
            lanes = stages
            # Where 1F1B fits the memory, so does what the search finds, since it tries 1F1B too.
            schedule = "1f1b" if schedule == AUTO else schedule
        elif schedule == AUTO or stages != len(self.placement):
            return None
        return named(schedule, lanes=lanes, stages=stages, microbatches=self.chunks)

    def _ordered(
        self,
        costs: Sequence[StageCost],
        links: Links,
        memory: Memory,
        reserve: Sequence[float],
        are_whole: bool,
    ) -> Schedule:
        """The schedule of a step. A search takes a schedule that keeps within the devices' memory,
        less what is in reserve for their stages, if there is one. ``are_whole``: no stage is
        recomputed in segments."""
        if not self.training:
            return forwards(self.placement, self.chunks)
        held = [sum(reserve[i] for i in own) for own in self._stages_on]
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
            moves_recomputations=are_whole,
        )
        if self.schedule == AUTO and min(limits) < float("inf"):
            with suppress(NoRoom):  # no schedule fits: the plan says how many bytes are missing
                return search(max_bytes=[limit * (1 + ROUNDING) for limit in limits])
        return search()
