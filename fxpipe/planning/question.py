"""What a plan depends on (the model, the devices and the options), and which changes of these would
make a model fit that does not fit."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from fxpipe.ir._torch import LazyGraphModule
from fxpipe.ir.devices import DeviceSpec
from fxpipe.ir.errors import AnotherStrategy, is_the_models
from fxpipe.ir.log import PLAN, warn
from fxpipe.ir.progress import report_progress
from fxpipe.ir.text import too_little
from fxpipe.meaning.asked import Asked
from fxpipe.meaning.call import meaning_of
from fxpipe.meaning.sample import batch_size, out_of_inference_mode
from fxpipe.planning.joint import CutWithWays, JointSearch
from fxpipe.planning.lanes import CutModel, PlannedLanes
from fxpipe.planning.loss import ExpectedLoss, SavedByLoss
from fxpipe.planning.loss_timer import MeasuredLoss
from fxpipe.planning.result import ROUNDING, Plan
from fxpipe.runtime.microbatch import LISTED
from fxpipe.schedule import Schedule, placement_of
from fxpipe.schedule.choice import AUTO
from fxpipe.trace import CustomTracer, Traced, canonical, trace, untouched
from fxpipe.trace.patches import prints
from passes.chain import Chain, ToStages, default_chain, run
from passes.common import modes
from passes.common.modes import Modes, milder
from passes.common.segments import NUMBERS, Segments, is_open
from passes.cost.analytic import ADAMS_UPDATE
from passes.cost.choice import Costs
from passes.cost.update import Update
from passes.partition.automatic import SLACK, Auto, DoesNotFit
from passes.partition.cut.solve import QUICK, Effort
from passes.partition.partition import Spec
from passes.partition.problem import Beside
from passes.partition.ways import Change, ways_out

ADVICE_S = 60.0
"""For how many seconds of the CPU changes are tried, to say with which a model would fit."""


def sketch(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dims: list[int | None],
    tracer: str | CustomTracer,
    chunks: int | None = None,
    chain: Chain | None = None,
    training: bool = True,
) -> tuple[Traced, ToStages]:
    """Trace a model with fake tensors, and run the passes that do not depend on the number of
    micro-batches. Returns the traced model, and the context from which further passes are made. The
    model does not run, and the graph is not compared with it.

    ``chunks``: the number of micro-batches that the user gave, or None. ``chain``: the passes; None
    stands for the default chain. ``training``: whether there is a backward.
    """
    chain = chain or default_chain()

    def sketched(tracer: str | CustomTracer) -> tuple[Traced, ToStages]:
        traced = trace(model, args, kwargs, tracer=tracer, batch_dims=dims, check=False)
        values = traced.bind(args, kwargs)
        context = ToStages(tuple(values), tuple(dims), chunks_asked_for=chunks, training=training)
        with untouched(model):
            passes = chain.passes(context, until=_first_that_counts_chunks(chain))
            traced.graph_module = run(passes, traced.graph_module)
        return traced, context

    if tracer != "auto":
        return sketched(tracer)
    try:
        return sketched("symbolic")
    except Exception as error:  # tracing runs the model's code, which may raise anything
        if not (isinstance(error, AnotherStrategy) or is_the_models(error)):
            raise
    return sketched("export")  # if export fails too, the user sees its error


def _first_that_counts_chunks(chain: Chain) -> str:
    """The name of the first pass whose result depends on the number of micro-batches."""
    names = [entry.name for entry in chain.entries]
    return "rows" if "rows" in names else "cost"


@dataclass(frozen=True)
class CostedModel:
    """A traced model (``sketched``), and copies of its graph with the costs of its nodes, one copy
    for each number of micro-batches (``known``); and the cuts that have been made of it (``cuts``),
    by all that they depend on. ``rebuild`` puts the graph's output into the structure that the
    model returns.

    ``has_loss``: whether a training step has a loss. Without one there are no steps in the order of
    a schedule: the user calls the pipeline, and a backward comes after all forwards.
    ``refused``: numbers of rows that the model does not take.
    """

    model: nn.Module
    sketched: fx.GraphModule
    context: ToStages
    chain: Chain
    known: dict[int, fx.GraphModule] = field(default_factory=dict)
    rebuild: Callable[[Any], Any] = field(default=lambda output: output)
    has_loss: bool = True
    refused: frozenset[int] = frozenset()
    cuts: dict[Hashable, CutModel] = field(default_factory=dict)

    @property
    def has_steps(self) -> bool:
        """Whether the order of a schedule is that of what runs: of training steps, or of forwards
        alone."""
        return self.has_loss or not self.context.training

    def of(self, chunks: int) -> fx.GraphModule:
        """A copy of the graph, with costs for ``chunks`` micro-batches."""
        return copied(self.with_costs(chunks))

    def with_costs(self, chunks: int) -> fx.GraphModule:
        """The graph, with costs for ``chunks`` micro-batches, to be looked at only."""
        if chunks not in self.known:
            report_progress("cost")
            context = replace(self.context, chunks=chunks)
            since = _first_that_counts_chunks(self.chain)
            passes = self.chain.passes(context, since=since, until="partition")
            with untouched(self.model):
                self.known[chunks] = run(passes, copied(self.sketched))
        return self.known[chunks]


@dataclass(frozen=True)
class CostSettings:
    """Where the costs of nodes come from, as :func:`fxpipe.plan` takes it: ``costs``, the
    description of the first device, how many tensors the optimizer keeps for a parameter, whether
    there is a backward, and what the optimizer's step takes."""

    costs: Costs
    spec: DeviceSpec
    optimizer_states: float
    training: bool = True
    optimizer_update: Update = ADAMS_UPDATE


@prints()
def costed(
    model: nn.Module,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    settings: CostSettings,
    *,
    in_dims: Any,
    tracer: str | CustomTracer,
    chunks: int | None,
    chain: Chain,
) -> tuple[CostedModel, int | None]:
    """Trace a model for plans. Returns it, and the number of rows of the example's mini-batch, None
    if the example has no batch.

    Raises ValueError for an input that is a list with an element for each row.
    """
    args, kwargs = out_of_inference_mode(canonical(model, *inputs))
    found = meaning_of(model, args, kwargs, Asked(in_dims, check=False)).in_dims
    if LISTED in found:
        raise ValueError(
            "no plan can be made for an input that is a list with one element for each row: "
            "stack its elements to one tensor, or give their batch dimensions in in_dims"
        )
    dims = [dim if isinstance(dim, int) else None for dim in found]
    report_progress("trace")
    traced, known = sketch(model, args, kwargs, dims, tracer, chunks, chain, settings.training)
    known = replace(
        known,
        costs=settings.costs,
        spec=settings.spec,
        optimizer_states=settings.optimizer_states,
        optimizer_update=settings.optimizer_update,
    )
    prices = CostedModel(model, traced.graph_module, known, chain, rebuild=traced.rebuild)
    return prices, batch_size(known.inputs, dims)


def saved_by_loss(
    prices: CostedModel,
    loss_fn: Callable[[Any, Any], Any] | None,
    target: Any,
    rows: tuple[int, int] | None = None,
) -> SavedByLoss | None:
    """What the loss saves of the output of a model, and how long it takes; None, with a warning, if
    nobody can know it, and without one if there is no loss function, or no target.

    ``rows``: those of the mini-batch, and of a micro-batch, where times are to be measured.
    """
    if loss_fn is None or target is None:
        return None
    expected = ExpectedLoss(loss_fn, target, prices.rebuild)
    found = expected.saved(prices.sketched.graph)
    if isinstance(found, str):
        warn(f"the plan does not count what the loss saves: {found}")
        return None
    if rows is None:
        return found
    device = next((each.device for each in prices.model.parameters()), torch.device("cpu"))
    measured = MeasuredLoss(expected, rows, device, prices.context.spec)
    return measured(found, prices.sketched.graph)


def shortage(plan: Plan, *, is_nearest: bool = True) -> str:
    """A sentence that says how much memory is missing on which device for a plan. ``is_nearest``:
    whether its cut is the one of many that is short of fewest bytes."""
    limits = [spec.memory or 0.0 for spec in plan.devices]
    short = [
        too_little(f"device {lane}", needed, limit)
        for lane, (needed, limit) in enumerate(zip(plan.memory, limits, strict=True))
        if limit and needed > limit
    ]
    said = f"{'with the nearest cut, ' * is_nearest}{'; '.join(short)}"
    return f"the model does not fit into the devices' memory; {said}"


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph, with the same tensors and metadata, to be read and not run."""
    return LazyGraphModule(gm, copy.deepcopy(gm.graph))


@dataclass(frozen=True)
class PlanQuestion:
    """The model, the devices and the options of a plan; :meth:`answer` makes the plan.

    Args:
        checkpoint, checkpoint_segments: as for :func:`fxpipe.compile`.
        loss: what the loss saves for its backward; None: nobody knows.
        effort: limits the search for an automatic cut.
    """

    prices: CostedModel
    partition: Spec
    specs: tuple[DeviceSpec, ...]
    schedule: str | Schedule
    stages: int | None
    chunks: int
    checkpoint: Modes
    checkpoint_segments: Segments = None
    names: tuple[str, ...] | None = None
    loss: SavedByLoss | None = None
    effort: Effort | None = None

    @cached_property
    def _lanes(self) -> PlannedLanes:
        placement = placement_of(self.schedule, len(self.specs), self.stages)
        return PlannedLanes(
            self.specs,
            placement,
            self.schedule,
            self.chunks,
            self.checkpoint,
            self.prices.chain,
            self.checkpoint_segments,
            self.names,
            self.loss,
            self._trains,
            self.effort,
            self.prices.context.optimizer_update,
        )

    @property
    def _is_open(self) -> bool:
        """Whether the numbers of segments are to be found out."""
        return is_open(self.checkpoint_segments, self.checkpoint)

    @property
    def _restricts_ways(self) -> bool:
        """Whether there is a limit of memory, under which stages recompute, and they do not choose
        by themselves what, and in how many segments."""
        is_limited = any(spec.memory is not None for spec in self.specs)
        recomputes = any(map(modes.is_recomputed, modes.listed(self.checkpoint)))
        return is_limited and recomputes and not (self.checkpoint == modes.AUTO and self._is_open)

    @property
    def _trains(self) -> bool:
        """Whether a training step is planned."""
        return self.prices.context.training

    @property
    def _several(self) -> int:
        """The number of stages on each device."""
        return len(self._lanes.placement) // len(self.specs)

    def answer(self) -> Plan:
        """The fastest plan that fits, of those that are found; :mod:`fxpipe.planning.joint` says
        how. If the user gives the cut, it need not fit.

        First the model is cut as if there were no limits: if what comes of that fits, no limit has
        to be thought of. If a device has several stages, each may first take all of its memory, and
        then an equal part of it.

        Raises :class:`DoesNotFit`, without advice, if no cut is found that fits.
        """
        plan = self.nearest()
        if self.is_automatic and not plan.fits:
            raise DoesNotFit(shortage(plan))
        return plan

    def nearest(self) -> Plan:
        """The fastest plan that fits, or if none is found the one that is short of fewest bytes."""
        return self._lanes.plan(self._best.cut, self._best.step)

    @cached_property
    def _best(self) -> CutWithWays:
        """The fastest of all that are found and fit; if there is none, the one that is short of
        fewest bytes."""
        search = self._search
        if not self.is_automatic:
            return search.given()
        free = search.free
        recomputes = any(map(modes.is_recomputed, modes.listed(free.step.modes)))
        may_hide = self._restricts_ways and recomputes
        if not free.short and not may_hide:
            return free
        every: list[CutWithWays] = [free]
        for part in self._parts:
            best: list[CutWithWays] = []
            for searched in self._searches(part):
                found: list[CutWithWays] = []
                for each in searched:
                    found.append(each)
                    is_free = not each.short and each.seconds <= free.seconds * (1 + ROUNDING)
                    if is_free and not may_hide:
                        return each  # no limit costs any time
                every += found
                if fitting := [each for each in found if not each.short]:
                    fastest = min(fitting, key=lambda found: found.seconds)
                    same = [each for each in every if each.cut.stage == fastest.cut.stage]
                    fastest = fastest.within(max(each.cut.bound for each in same))
                    best.append(search.faster(fastest, part))
                if best and best[0].seconds <= free.seconds * (1 + SLACK):
                    break
            if best:
                fastest = min(best, key=lambda found: found.seconds)
                return self._or_shifted(fastest, every, part)
        nearest = search.fitting(min(every, key=lambda found: found.short))
        if nearest.short:
            return nearest
        others = (found for found in every if found.seconds < nearest.seconds)
        fitting = [found for found in map(search.fitting, others) if not found.short]
        return search.faster(min([nearest, *fitting], key=lambda found: found.seconds), 1)

    def _or_shifted(
        self, found: CutWithWays, every: Sequence[CutWithWays], part: int
    ) -> CutWithWays:
        """The fastest step that is found under limits; or one that is faster, which a cut that does
        not fit comes to as nodes leave its full devices. What a cut needs beside what it keeps is
        known once it has been simulated: where a model consists of few large parts, the search,
        which goes by what the cut before it needs, passes over cuts that fit."""
        search = self._search
        if found.seconds <= search.free.seconds * (1 + SLACK):
            return found
        short = {each.cut.stage: each for each in every if each.short}
        shifted = [search.fitting(each) for each in short.values()]
        fitting = [each for each in shifted if not each.short]
        fastest = min([found, *fitting], key=lambda each: each.seconds)
        return found if fastest is found else search.faster(fastest.within(found.cut.bound), part)

    def can_fit(self) -> bool:
        """Whether a plan is found that fits. One that fits is enough, which need not be the
        fastest. Where stages recompute what they can, and all devices together have too little
        memory for that, no other cut is looked for: it would need about as much."""
        search = self._search
        if not self.is_automatic:
            return not search.given().short
        every = [search.free]
        searches = (each for part in self._parts for each in self._searches(part, fastest=False))
        for found in itertools.chain([search.free], itertools.chain.from_iterable(searches)):
            if not found.short:
                return True
            if found is not search.free:
                every.append(found)
                if not search.has_room(found):
                    return False
        return not search.fitting(min(every, key=lambda found: found.short)).short

    def _searches(self, part: int, fastest: bool = True) -> Iterator[Iterable[CutWithWays]]:
        """What two searches under the limits find, see :meth:`JointSearch.found`: the second goes
        on after the cuts with which the first begins. Where the user restricts what stages
        recompute, the cut that is best if they choose it is taken, too, with what the user gives:
        the search for a cut counts what recomputing takes in full, while the simulation knows where
        lanes would be idle else. ``fastest``: whether the fastest step is wanted, and not any that
        fits, for which that cut is left out: it is about time.
        """
        first: list[CutWithWays] = []

        def found() -> Iterator[CutWithWays]:
            for each in self._search.found(part):
                first.append(each)
                yield each
            if self._restricts_ways and fastest:
                best = replace(self, checkpoint=modes.AUTO, checkpoint_segments=None)._best
                bound = self._search.free.cut.bound
                yield self._search.on(replace(best.cut, bound=bound), part)

        yield found()
        if len(first) > 2:
            yield self._search.found(part, first[:2])

    @cached_property
    def _search(self) -> JointSearch:
        return JointSearch(self._lanes, self._cut)

    @property
    def _parts(self) -> list[int]:
        """Which part of the memory of its device a stage may take, one to be tried after the
        other."""
        return [1] if self._several == 1 else [1, self._several]

    def _cut(
        self, lanes: PlannedLanes, part: int | None, beside: Beside = (), **options: Any
    ) -> CutModel:
        """The model, cut for these lanes as :meth:`PlannedLanes.cut_up` says. A cut for memory
        without limits does not depend on the schedule, but for the lanes of the stages, and is made
        only once."""
        spec = self.partition
        if part is not None or spec != "auto":
            return lanes.cut_up(self.prices.of(self.chunks), spec, part, beside, **options)
        key = (
            *(lanes.placement, self.specs, self.names, self.chunks),
            *(self.checkpoint, self.checkpoint_segments, self.loss, self.effort),
        )
        if key not in self.prices.cuts:
            self.prices.cuts[key] = lanes.cut_up(self.prices.of(self.chunks), spec, None)
        return self.prices.cuts[key]

    @cached_property
    def is_automatic(self) -> bool:
        """Whether the cut is searched for, and not given by the user."""
        spec = self.partition
        spec = spec(self.prices.of(self.chunks)) if callable(spec) else spec
        return isinstance(spec, Auto) or (isinstance(spec, str) and spec == "auto")

    def ways_out(self, batch: int | None) -> str:
        """A sentence that says with which other options, or how many devices, the model would fit.

        ``batch``: the rows of the mini-batch, None if they are not known.
        """
        several = [2**i * self.chunks for i in range(1, 40) if 2**i * self.chunks < (batch or 0)]
        is_measured = (
            isinstance(self.prices.context.costs, str) and self.prices.context.costs == "measured"
        )
        more = [*several, *([batch] if batch and batch > self.chunks else [])]
        more = [number for number in more if (batch or 0) // number not in self.prices.refused]
        is_named = isinstance(self.schedule, str)
        frugal = ["1f1b"] if is_named and self.schedule not in ("1f1b", "zb_h1", AUTO) else []
        settings: dict[str, list[Any]] = {
            "schedule": frugal
            if self._trains and self.prices.has_steps and len(self.specs) > 1 and not self.stages
            else [],
            # Other numbers of chunks would have to be measured, which takes too long for advice.
            "chunks": [] if is_measured else more,
            "checkpoint": self._other_modes if self._trains else [],
        }
        report_progress("what would fit")
        PLAN.info("other options are tried, to say with which the model would fit")
        given = {name: values for name, values in settings.items() if values}
        end = time.process_time() + ADVICE_S
        return ways_out(
            self._tells, given, len(self.specs), is_over=lambda: time.process_time() > end
        )

    @property
    def _other_modes(self) -> list[str]:
        """The modes that may need less memory than the present ones."""
        given = modes.listed(self.checkpoint)
        if modes.AUTO in given:
            return []
        known = self._lanes.known_modes
        others = [*milder(self.checkpoint), modes.OFFLOAD]
        return [mode for mode in others if mode in known and mode not in given]

    def _tells(self, change: Change) -> bool:
        """Whether the model fits after a change; the log and the listener of the progress learn
        what is tried, since many changes take long."""
        report_progress(str(change))
        fits = self._fits(change)
        PLAN.info("%s: %s", change, "fits" if fits else "does not fit")
        return fits

    def _fits(self, change: Change) -> bool:
        count = len(self.specs) if change.devices is None else change.devices
        specs = (*self.specs, *self.specs[-1:] * (count - len(self.specs)))
        names = self.names
        if names is not None and count > len(names):
            more = range(len(names), count)
            is_one = len(set(names)) == 1  # such as the CPU, which has all lanes
            names = (*names, *(names[0] if is_one else f"device {i}" for i in more))
        # Whether it fits hardly depends on how fast the cut is, and many changes are tried.
        other = replace(self, specs=specs, names=names, effort=QUICK, **change.settings)
        gm = other.prices.of(other.chunks)
        try:
            spec = other._automatic(gm)
            # This takes less time than a plan, and most of what does not fit does not fit here.
            return any(
                quick._lanes.cut(spec, 1).can_fit(gm.graph, spec) and quick.can_fit()
                for quick in other._of_few_segments
            )
        except ValueError:  # there is no such schedule, or no room for the pins
            return False

    @property
    def _of_few_segments(self) -> list[PlanQuestion]:
        """The question, with fewer ways where the numbers of segments are to be found out, among
        which those are that need least: to say whether it fits with one of them takes less time."""
        if not self._is_open:
            return [self]
        least = modes.ALWAYS if self.checkpoint == modes.AUTO else self.checkpoint
        return [
            replace(self, checkpoint_segments=1),
            replace(self, checkpoint=least, checkpoint_segments=max(NUMBERS)),
        ]

    def _automatic(self, gm: fx.GraphModule) -> Auto:
        """The partition that the user asked for. It is an automatic one, since only these raise
        :class:`DoesNotFit`."""
        spec = self.partition(gm) if callable(self.partition) else self.partition
        spec = Auto() if isinstance(spec, str) else spec
        assert isinstance(spec, Auto)
        return spec
