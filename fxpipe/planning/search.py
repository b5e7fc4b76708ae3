"""Search: the fastest of many ways to run a model on some devices, by prediction. It is what
:func:`fxpipe.tune` shows as a table, and what ``schedule="auto"`` and ``chunks="auto"`` take the
first of.

::

    micro-batches   1, 2, 4, 8 ...      costs once for each ─┐
    stages          one, two a lane     a cut once for each ─┤
    schedule        gpipe, zbv ...      simulated ───────────┴─ the fastest that fits
                                           │
                    an order of its own ───┘  for the numbers that are best so far

What a lower bound shows to be slower than the best so far is left out. The bounds hold for every
cut and every order, so that leaving out loses nothing:

- Each micro-batch launches all operators, reads all weights and makes their gradients, so more
  micro-batches are more work, and no step takes less than its work, shared out evenly among the
  lanes.
- With one stage on each lane, no step takes less than the slowest stage of the best cut.
- A micro-batch goes through the longest chain of operators, forward, and back at least as far as
  the gradients of the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from fxpipe.ir.counts import count
from fxpipe.ir.devices import DeviceSpec
from fxpipe.ir.log import PLAN
from fxpipe.ir.progress import report_progress
from fxpipe.ir.text import human_time
from fxpipe.planning.loss import SavedByLoss
from fxpipe.planning.question import CostedModel, PlanQuestion, shortage
from fxpipe.planning.result import ROUNDING, Plan
from fxpipe.schedule import ALL_FORWARDS, AUTO, NAMES, Schedule, named, placement_of
from passes.common.modes import Modes
from passes.common.segments import Segments
from passes.cost.choice import Costs
from passes.partition.automatic import Auto, DoesNotFit
from passes.partition.cut.bounds import least_share, lower_bound
from passes.partition.partition import PartitionError, Spec
from passes.partition.problem import CutProblem, machine, problem

MOST = 8
"""At most so many micro-batches for each lane are tried."""


@dataclass(frozen=True)
class Setting:
    """A schedule ("auto": an order of its own), the number of stages (None: as many as the schedule
    takes), the number of micro-batches, and ``checkpoint_segments`` as :func:`fxpipe.compile` takes
    it."""

    schedule: str
    stages: int | None
    chunks: int
    segments: Segments = None

    def __str__(self) -> str:
        order = "an order of its own" if self.schedule == AUTO else self.schedule
        several = _counted(self.chunks)
        if isinstance(self.segments, tuple):
            several += f" and {', '.join(map(str, self.segments))} segments"
        elif isinstance(self.segments, int) and self.segments > 1:
            several += f" and {self.segments} segments"
        return f"{order} with {several}"


@dataclass(frozen=True)
class SettingTrial:
    """A setting, and what is known of it.

    Attributes:
        plan: the plan; None if there is none that fits, or if a bound has made it needless.
        seconds: the predicted time of a step, or the lower bound on it; inf if it does not fit.
        why: why there is no plan; empty if there is one, or if it is left out.
        nearest: a plan that does not fit, and is short of fewest bytes of those that were found.
    """

    setting: Setting
    plan: Plan | None
    seconds: float
    why: str = ""
    nearest: Plan | None = None

    @property
    def is_left_out(self) -> bool:
        """Whether a lower bound has made it needless to plan this setting."""
        return self.plan is None and not self.why


def numbers_of_microbatches(lanes: int, rows: int | None) -> list[int]:
    """The numbers of micro-batches to try for a mini-batch of so many rows: those that cut it into
    equal parts, up to :data:`MOST` for each lane. (What is predicted is a step of equal parts.)
    Where the rows have no divisor from the number of lanes on, they are one for each lane, and
    twice as many as long as there are so many rows.

    ``rows`` is None for a mini-batch that cannot be cut.
    """
    most = min(MOST * lanes, rows or 1)
    even = [n for n in range(1, most + 1) if (rows or 1) % n == 0]
    if even[-1] >= min(lanes, most):
        return even
    return sorted({*even, *(n for n in (lanes * 2**i for i in range(MOST)) if n <= most)})


def number_given(chunks: Any) -> int | None:
    """The number of micro-batches that the user gives; None for None, and for "auto".

    Raises ValueError for anything else.
    """
    if chunks is None or (isinstance(chunks, str) and chunks == AUTO):
        return None
    return count("chunks", chunks, '"auto", or the number of micro-batches')


def settings_of(
    lanes: int,
    numbers: Iterable[int],
    schedules: Sequence[str] = NAMES,
    stages: Sequence[int | None] = (None,),
    segments: Sequence[Segments] = (None,),
    *,
    is_strict: bool = False,
) -> list[Setting]:
    """The settings that there are of these schedules, numbers of stages, of micro-batches and of
    segments: those that go together.

    Raises ValueError for a name that no schedule has; if there are no settings; and, if
    ``is_strict``, if any two do not go together.
    """
    found, error, numbers = [], ValueError("there is nothing to try"), list(numbers)
    for schedule in schedules:
        placement_of(schedule, lanes, None)  # raises for an unknown name
        for number in stages:
            for chunks in numbers:
                try:
                    placement = placement_of(schedule, lanes, number)
                    if schedule != AUTO:
                        named(schedule, lanes=lanes, stages=len(placement), microbatches=chunks)
                except ValueError as other:
                    if is_strict:
                        raise
                    error = other
                    continue
                found += [Setting(schedule, number, chunks, each) for each in segments]
    if not found:
        raise error
    return found


def leaves_stages_open(
    partition: Spec, checkpoint: Modes, segments: Segments, stages: int | None
) -> bool:
    """Whether a schedule may have as many stages as it takes: nothing that the user gives is for
    one number of stages."""
    is_free = (isinstance(partition, str) and partition == "auto") or (
        isinstance(partition, Auto) and not partition.pins and partition.devices is None
    )
    is_of_any = isinstance(checkpoint, str) and not isinstance(segments, tuple)
    return is_free and stages is None and is_of_any


def are_given(costs: Costs) -> bool:
    """Whether the user gives the costs, in a dict, a profile or its path."""
    return not (isinstance(costs, str) and costs in ("analytic", "measured"))


@dataclass(frozen=True)
class Left:
    """What a user leaves to the search, and what not.

    Attributes:
        schedule: a name; "auto" if it is open.
        chunks: the number of micro-batches; None if it is open.
        stages: the number of stages; None: as many as a schedule takes.
        segments: ``checkpoint_segments``, as :func:`fxpipe.compile` takes it.
        has_given_costs: whether the user gives the costs.
    """

    schedule: str
    chunks: int | None
    stages: int | None
    segments: Segments = None
    has_given_costs: bool = False


@dataclass(frozen=True)
class SettingSearch:
    """The model, the cut and the devices that all settings have in common.

    Args:
        prices: the model with its costs.
        partition, checkpoint: as for :func:`fxpipe.compile`.
        specs: the description of each lane's device.
        names: the devices' names, as for :class:`PlanQuestion`.
        loss: what the loss saves for its backward; None: nobody knows.
    """

    prices: CostedModel
    partition: Spec
    specs: tuple[DeviceSpec, ...]
    checkpoint: Modes
    names: tuple[str, ...] | None = None
    loss: SavedByLoss | None = None
    _bounds: dict[tuple[int, int | None], float] = field(default_factory=dict)
    _problems: dict[int, CutProblem] = field(default_factory=dict)

    def question(self, setting: Setting) -> PlanQuestion:
        """The question which plan there is for a setting."""
        return PlanQuestion(
            self.prices,
            self.partition,
            self.specs,
            setting.schedule,
            setting.stages,
            setting.chunks,
            self.checkpoint,
            setting.segments,
            self.names,
            self.loss,
        )

    def trial(self, setting: Setting) -> SettingTrial:
        """The plan for a setting. A plan of a given cut that does not fit counts as none."""
        report_progress(str(setting))
        found = self._planned(setting)
        PLAN.info("%s: %s", setting, found.why or f"a step of {human_time(found.seconds)}")
        return found

    def _planned(self, setting: Setting) -> SettingTrial:
        try:
            question = self.question(setting)
            plan = question.nearest()
        except PartitionError as error:  # there are fewer nodes than stages, say
            return SettingTrial(setting, None, math.inf, str(error))
        if not plan.fits:
            why = shortage(plan, is_nearest=question.is_automatic)
            return SettingTrial(setting, None, math.inf, why, plan)
        return SettingTrial(setting, plan, plan.seconds)

    def fastest(self, settings: Sequence[Setting], *, has_own: bool = False) -> list[SettingTrial]:
        """The trials of these settings, the fastest first, and those last that are left out or do
        not fit. None of the settings is faster than the first.

        ``has_own``: whether an order of its own is looked for as well, with the numbers of stages
        and of micro-batches that are best among the settings; with any of them if nothing fits.
        """
        usual = 4 * len(self.specs)
        counts = sorted({setting.chunks for setting in settings})
        counts.sort(key=lambda number: abs(math.log2(number / usual)))
        trials: list[SettingTrial] = []
        for number in counts:
            for setting in (each for each in settings if each.chunks == number):
                trials.append(self._unless_slower(setting, trials))
        if has_own:
            for setting in self._own(_ranked(trials), settings):
                trials.append(self._unless_slower(setting, trials))
        return _ranked(trials)

    def all_of(
        self, settings: Sequence[Setting], *, has_own: bool, done: Callable[[], object]
    ) -> list[SettingTrial]:
        """The trials of all these settings, none of which is left out, in the order of
        :meth:`fastest`. ``done`` is called after each."""
        trials = []
        for setting in settings:
            trials.append(self.trial(setting))
            done()
        if has_own:
            trials += map(self.trial, self._own(_ranked(trials), settings))
        return _ranked(trials)

    def of_open(self, left: Left, rows: int | None) -> list[SettingTrial]:
        """The trials of all settings that are left open, for a mini-batch of so many rows (None: it
        cannot be cut), as of :meth:`fastest`."""
        lanes = len(self.specs)
        usual = 4 * lanes if left.chunks is None else left.chunks
        if left.chunks is not None or left.has_given_costs:
            # Costs that are given say nothing of what a micro-batch costs beside its share of them.
            numbers = [min(usual, rows or 1)]
        else:
            numbers = numbers_of_microbatches(lanes, rows)
        is_open, has_steps = left.schedule == AUTO, self.prices.has_steps
        # Without steps, all forwards come ahead of all backwards, whatever the schedule.
        schedules = (NAMES if has_steps else ALL_FORWARDS) if is_open else [left.schedule]
        settings = settings_of(lanes, numbers, schedules, [left.stages], [left.segments])
        PLAN.info(
            "the fastest of %d settings is searched for by prediction: %s, with %s micro-batches; "
            "those are left out that a bound shows not to be the fastest",
            *(len(settings), ", ".join(schedules), ", ".join(map(str, numbers))),
        )
        # An order of its own is for one number of micro-batches. Where this mini-batch has fewer
        # rows than are usual, larger ones are to have more.
        may_have_own = is_open and has_steps
        trials = self.fastest(settings, has_own=may_have_own and (rows or 1) >= usual)
        if may_have_own and trials[0].plan is None:
            trials = self.fastest(settings, has_own=True)
        return trials

    def why_none(self, trials: Sequence[SettingTrial], rows: int | None) -> str:
        """Say why none of these trials has a plan, where the user gives a cut that does not fit: it
        may be tried nevertheless.

        Raises :class:`DoesNotFit`, with advice, if there is no cut that fits, and
        :class:`PartitionError` if the model cannot be cut as the user asks.
        """
        nearest = trials[0]
        question = self.question(nearest.setting)
        if nearest.nearest is None:
            question.nearest()  # raises the error that says why
        if question.is_automatic:
            raise DoesNotFit(f"{nearest.why}; {self.advice(nearest, rows)}")
        return "the cut that is given fits into the memory with none of the settings"

    def advice(self, trial: SettingTrial, rows: int | None) -> str:
        """A sentence that says which changes would make a setting fit that does not; empty if it
        has no plan for another reason."""
        if trial.nearest is None:
            return ""
        question = self.question(trial.setting)
        if not question.is_automatic:
            return 'partition="auto" looks for a cut that fits'
        return f"as for {trial.setting}, {question.ways_out(rows)}"

    def _own(self, trials: Sequence[SettingTrial], settings: Sequence[Setting]) -> list[Setting]:
        """The settings with an order of its own that are looked at."""
        best = trials[0]
        if best.plan is not None:
            numbers = {len(self.specs), len(best.plan.stages)}
            given = {setting.stages for setting in settings} - {None}
            return [
                replace(best.setting, schedule=AUTO, stages=number)
                for number in sorted(numbers & given if given else numbers)
            ]
        every = {(each.stages, each.chunks): each for each in settings}
        return [replace(each, schedule=AUTO) for each in every.values()]

    def _unless_slower(self, setting: Setting, trials: Sequence[SettingTrial]) -> SettingTrial:
        """The trial of a setting, unless a bound shows that one of these trials is no slower."""
        best = min((t.seconds for t in trials if t.plan is not None), default=math.inf)
        if math.isfinite(best):
            for bound in self._bounds_of(setting):
                if bound >= best * (1 + ROUNDING):
                    return SettingTrial(setting, None, bound)
        return self.trial(setting)

    def _bounds_of(self, setting: Setting) -> Iterator[float]:
        """Lower bounds on the time of a step, those first that take less time to find."""
        known = [count for count in self.prices.known if count <= setting.chunks]
        if known:  # more micro-batches are more work
            yield self._share(max(known), None)
        yield self._share(setting.chunks, None)
        lanes = len(self.specs)
        yield self._chain(setting.chunks)
        if len(placement_of(setting.schedule, lanes, setting.stages)) == lanes:
            yield self._share(setting.chunks, lanes)

    def _share(self, chunks: int, stages: int | None) -> float:
        """The seconds of the busiest lane at least; with ``stages``, if it has one stage of so
        many."""
        key = chunks, stages
        if key not in self._bounds:
            dag = self._problem(chunks).dag
            modes = self.checkpoint if isinstance(self.checkpoint, str) else "never"
            target = machine(self.specs, chunks=chunks, checkpoint=modes)
            self._bounds[key] = (least_share if stages is None else lower_bound)(dag, target)
        return self._bounds[key]

    def _chain(self, chunks: int) -> float:
        """The seconds that one micro-batch takes at least: those of the longest chain of operators,
        forward and as far back as to the gradients of the inputs, which are half of a backward."""
        key = chunks, 0
        if key not in self._bounds:
            found = self._problem(chunks)
            seconds = (found.whole.seconds + found.whole.forward).min(axis=0) / 2 / chunks
            length: dict[fx.Node, float] = {}
            for node, own in zip(found.work, seconds, strict=True):
                ahead = (length.get(source, 0.0) for source in node.all_input_nodes)
                length[node] = float(own) + max(ahead, default=0.0)
            self._bounds[key] = max(length.values(), default=0.0)
        return self._bounds[key]

    def _problem(self, chunks: int) -> CutProblem:
        if chunks not in self._problems:
            graph = self.prices.with_costs(chunks).graph
            self._problems[chunks] = problem(graph, devices=self.specs)
        return self._problems[chunks]


def _ranked(trials: Iterable[SettingTrial]) -> list[SettingTrial]:
    """The trials, the fastest first; of equally fast ones that which takes less memory. Of those
    that do not fit the first one is short of fewest bytes."""
    return sorted(
        trials,
        key=lambda trial: (
            trial.plan is None,
            float(f"{trial.seconds:.9g}"),
            max(trial.plan.memory) if trial.plan else _missing(trial.nearest),
        ),
    )


def _missing(nearest: Plan | None) -> float:
    """The bytes that are missing for a plan that does not fit; inf if there is none."""
    return math.inf if nearest is None else -sum(min(0.0, left) for left in nearest.headroom)


@dataclass(frozen=True)
class Choice:
    """What has been chosen for a pipeline, and why.

    Attributes:
        schedule, stages, chunks, checkpoint, checkpoint_segments: as :func:`fxpipe.compile` takes
            them.
        partition: the stage of each node.
        gap: how far the cut is from optimal, at most; see :class:`Plan`.
        rows: the rows of the mini-batch for which it has been chosen; None: it cannot be cut.
        seconds: the predicted time of a step.
        others: the fastest other settings, one for each schedule and then one for each number of
            micro-batches, and their seconds.
        training: whether that is a training step; if not, it is a call.
        planned, left_out, unfit: how many settings have been planned, have been left out as a lower
            bound shows them to be slower, and have no plan that fits.
        is_estimated: whether the user has asked for measured times, which only the cut has: the
            choice is made with estimated ones.
    """

    schedule: str | Schedule
    stages: int
    chunks: int
    checkpoint: Modes
    partition: Mapping[str, int]
    gap: float
    rows: int | None
    seconds: float
    others: tuple[tuple[str, float], ...] = ()
    training: bool = True
    planned: int = 1
    left_out: int = 0
    unfit: int = 0
    is_estimated: bool = False
    checkpoint_segments: Segments = 1

    @staticmethod
    def of(trials: Sequence[SettingTrial], rows: int | None) -> Choice:
        """The first of the trials.

        Raises :class:`DoesNotFit`, without advice, or :class:`PartitionError`, if it has no plan.
        """
        best = trials[0]
        if best.plan is None:
            raise DoesNotFit(best.why)
        plan, setting = best.plan, best.setting
        return Choice(
            plan.schedule if setting.schedule == AUTO else setting.schedule,
            len(plan.stages),
            setting.chunks,
            plan.checkpoint,
            plan.partition,
            plan.gap,
            rows,
            plan.seconds,
            tuple((_said(trial.setting, plan), trial.seconds) for trial in _nearest(trials)),
            plan.training,
            sum(trial.plan is not None for trial in trials),
            sum(trial.is_left_out for trial in trials),
            sum(bool(trial.why) for trial in trials),
            checkpoint_segments=plan.checkpoint_segments,
        )

    @property
    def name(self) -> str:
        """The name of the schedule; that of an order of its own is "auto"."""
        return self.schedule if isinstance(self.schedule, str) else self.schedule.name

    def __str__(self) -> str:
        said = _counted(self.chunks)
        if self.training:
            said = str(Setting(self.name, None, self.chunks))
        return f"{said} on {self.stages} stage{'s' * (self.stages != 1)}"

    @property
    def lines(self) -> list[str]:
        """What a report says of the choice."""
        rows = "" if self.rows is None else f", for a mini-batch of {self.rows} rows"
        run = "step" if self.training else "call"
        found = [f"chosen by prediction{rows}: {self}, {human_time(self.seconds)} a {run}"]
        if self.others:
            others = ", ".join(
                f"{said} {human_time(seconds)} (+{max(0.0, seconds / self.seconds - 1):.1%})"
                for said, seconds in self.others
            )
            found.append(f"others: {others}")
        if self.is_estimated:
            found.append(
                "these times are estimated, since each number of micro-batches would have to be "
                'measured; with costs="measured" the cut has measured ones, and '
                "fxpipe.tune(..., measure=3) chooses by measured steps"
            )
        counts = [f"{self.planned} settings have been planned"]
        if self.left_out:
            counts.append(f"{self.left_out} left out, which lower bounds show to be no faster")
        if self.unfit:
            counts.append(f"{self.unfit} cannot be cut so, or do not fit")
        return [*found, ", ".join(counts)]


def _counted(chunks: int) -> str:
    return f"{chunks} micro-batch{'es' * (chunks != 1)}"


def _said(setting: Setting, plan: Plan) -> str:
    """A setting in words. A call without training has no schedule of which to speak."""
    return str(setting) if plan.training else _counted(setting.chunks)


def _nearest(trials: Sequence[SettingTrial]) -> list[SettingTrial]:
    """The fastest trial with each other schedule, and with each other number of micro-batches; at
    most three of either kind."""
    planned = [trial for trial in trials if trial.plan is not None]
    best = planned[0].setting
    schedules: dict[str, SettingTrial] = {best.schedule: planned[0]}
    numbers: dict[int, SettingTrial] = {best.chunks: planned[0]}
    for trial in planned:
        schedules.setdefault(trial.setting.schedule, trial)
        numbers.setdefault(trial.setting.chunks, trial)
    shown = [*list(schedules.values())[1:4], *list(numbers.values())[1:4]]
    return list(dict.fromkeys(shown))
