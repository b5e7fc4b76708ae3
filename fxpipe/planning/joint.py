"""Joint search: the cut of a model and the ways of its stages, searched for under limits of memory.

::

    cut without limits ─▶ needs ─▶ cut under limits ─▶ needs ─▶ ...   until a cut comes again
            │                             │
         settled                       settled          each cut with the ways that suit it
            └──────────────┬──────────────┘      none fits: nodes leave full devices (shift)
                        fastest ─▶ cut for its own ways ─▶ settled ─▶ ...   as long as it is faster
                           └─ slower than without limits: all this again, with more left free

The search for a cut (:mod:`passes.partition.cut`) knows what stages keep, and compares all cuts and
ways. It does not know what a stage needs beside that while it runs, which depends on the order of
the step, and on how large its segments are. The simulation knows this for the cut that it is given:
what it says of each way, the next search takes into account. And the search looks at the slowest
stage, where the simulation looks at the whole step: so the ways of the fastest step that is found
are held fixed, and the model is cut anew for these. A stage may recompute while it would wait for
others, which only the simulation knows: the model is cut with recomputing counted in full, by half
and not at all.

A cut of the search may need more than was foreseen, and so may the next one elsewhere, round after
round. Where none fits, those that are found are changed step by step, each as the simulation says:
nodes leave the device that lacks most for one that has room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product

from fxpipe.planning.keeping import Keeping
from fxpipe.planning.lanes import CutModel, PlannedLanes, PlannedStep
from fxpipe.planning.result import ROUNDING
from passes.common.modes import AUTO, is_recomputed, of_stages, plain, recomputing_less
from passes.common.segments import counts, is_open
from passes.partition.automatic import SLACK, DoesNotFit
from passes.partition.problem import Beside
from passes.partition.shift import Shift

ROUNDS = 6
"""How often a model is cut again, or a cut is shifted, at most, for what the simulation says of the
cut before."""
TRIES = 16
"""How often, at most, it is cut for the ways of the fastest step and for those beside them."""
EXPOSED = 1.0, 0.5, 0.0
"""The parts of the time of recomputing that a cut for the ways of the fastest step may count."""


@dataclass(frozen=True)
class CutWithWays:
    """A cut, and a step with the ways of its stages. ``short``: the bytes that are missing for it
    on all devices together; 0 if it fits."""

    cut: CutModel
    step: PlannedStep
    short: float

    @property
    def seconds(self) -> float:
        """The seconds that the step is predicted to take."""
        return self.step.timeline.makespan

    def within(self, bound: float) -> CutWithWays:
        """The same, with another bound; see :class:`CutModel`."""
        return replace(self, cut=replace(self.cut, bound=bound))


@dataclass(frozen=True)
class JointSearch:
    """The search.

    Args:
        lanes: the lanes, with the ways among which the stages may choose.
        cut: cuts the model for lanes; see :meth:`PlannedLanes.cut_up`, which takes the rest of the
            arguments. Raises :class:`DoesNotFit` if there is no such cut.
    """

    lanes: PlannedLanes
    cut: Callable[..., CutModel]

    @cached_property
    def free(self) -> CutWithWays:
        """The cut and the ways that are best if the memory of the devices has no limit."""
        cut = self.cut(self.lanes, None)
        step = self.lanes.step(cut, self.lanes.chosen(cut))
        return CutWithWays(cut, step, Keeping(self.lanes, cut).short(step))

    def given(self) -> CutWithWays:
        """The cut that the user gives, whether it fits or not, with the ways that suit it."""
        cut = self.cut(self.lanes, 1)
        return self._settled(cut, self.lanes.step(cut, self.lanes.chosen(cut)))

    def found(self, part: int, first: Sequence[CutWithWays] = ()) -> Iterator[CutWithWays]:
        """What is found under the limits, one cut after the other, of which not all fit. A cut that
        is found again is there twice, the second time with the bound of the search under limits.

        Each cut has to leave free what the one before it needs beside. Two cuts that suit each
        other's needs may alternate so; a search that goes on after the ``first`` cuts leaves free
        the most that any cut so far needs.

        Where the search for a cut finds none, the one whose fullest device is least full is tried,
        too: what the search counts for a cut that it has not seen simulated may be too much.

        Args:
            part: each stage may take ``1 / part`` of the memory of its device.
            first: cuts that have been found; they are not found again.
        """
        lanes, cut, last = self.lanes, self.free.cut, self.free
        known = {each.cut.stage: each for each in first}
        is_tightest = False
        for i in range(ROUNDS):
            if i or first:
                last = [*known.values()][-1]
                every = [each.cut.beside for each in known.values()]
                beside = _most_of(every) if first else last.cut.beside
                try:
                    cut = self._cut_under(lanes, part, beside)
                except DoesNotFit:
                    if is_tightest:
                        return
                    cut, is_tightest = self.cut(lanes, part, beside, is_tightest=True), True
            if cut.stage in known:
                yield known[cut.stage].within(cut.bound)
                return
            found = self._under(cut, part, lanes.beside(cut, last.step.order))
            known[cut.stage] = found
            yield found

    def _cut_under(
        self,
        lanes: PlannedLanes,
        part: int,
        beside: Beside,
        limit: float = math.inf,
        exposed: float = 1.0,
    ) -> CutModel:
        """The best cut under limits of memory, whose slowest stage takes at most ``limit`` seconds.
        The best of all cuts need not be searched for again, if it is within these limits."""
        free = replace(self.free.cut, devices=lanes.devices(part), beside=beside)
        if exposed == 1 and lanes == self.lanes and lanes.is_within(free, limit):
            return free
        return self.cut(lanes, part, beside, limit=limit, exposed=exposed)

    def on(self, cut: CutModel, part: int) -> CutWithWays:
        """A cut that has been found for other ways, with those that suit it here."""
        lanes = self.lanes
        cut = replace(cut, devices=lanes.devices(None), beside=())
        order = lanes.step(cut, lanes.chosen(cut)).order
        return self._under(cut, part, lanes.beside(cut, order))

    def _under(self, cut: CutModel, part: int, beside: Beside) -> CutWithWays:
        limited = replace(cut, devices=self.lanes.devices(part), beside=beside)
        return self._settled(limited, self.lanes.step(limited, self.lanes.chosen(limited)))

    def has_room(self, found: CutWithWays) -> bool:
        """Whether all devices together have the memory that a step needs of them."""
        return sum(Keeping(self.lanes, found.cut).room(found.step)) >= 0

    def fitting(self, found: CutWithWays) -> CutWithWays:
        """A cut that fits, or is short of fewer bytes than this one: as long as a device lacks
        memory, nodes leave it for another one, as many as take what it lacks."""
        for _ in range(ROUNDS):
            others = self._shifted(found) if found.short else ()
            nearer = next((other for other in others if other.short < found.short), None)
            if nearer is None:
                break
            found = nearer
        return found

    def _shifted(self, found: CutWithWays) -> Iterator[CutWithWays]:
        """The cuts in which nodes leave the device that lacks most, those first in which they go to
        the device that has most room."""
        placement, before = self.lanes.placement, found.cut.stages_by_name
        room = Keeping(self.lanes, found.cut).room(found.step)
        fullest = room.index(min(room))
        targets = [stage for stage, lane in enumerate(placement) if room[lane] > 0]
        for target in sorted(targets, key=lambda stage: -room[placement[stage]]):
            for source in (stage for stage, lane in enumerate(placement) if lane == fullest):
                shift = Shift(before, source, target, -room[fullest])
                cut = self.cut(self.lanes, 1, found.cut.beside, shift=shift)
                yield self._with_ways_of(found, cut)

    def _with_ways_of(self, found: CutWithWays, cut: CutModel) -> CutWithWays:
        """Another cut, with the ways that suit it, looked for from those of one that is found."""
        stages = len(cut.devices)
        modes = of_stages(found.step.modes, stages)
        numbers = counts(found.step.segments, modes, stages)
        ways = enumerate(zip(modes, numbers, strict=True))
        own = [self.lanes.nearest(cut, stage, way) for stage, way in ways]
        return self._settled(cut, self.lanes.step(cut, own, found.step.order))

    def faster(self, found: CutWithWays, part: int) -> CutWithWays:
        """A step that is as fast as this one, or faster: the model is cut for its ways, with each
        of :data:`EXPOSED`, and for those in which one stage recomputes less, and again for those of
        what is faster, at most :data:`TRIES` times."""
        tried: set[tuple[tuple[str, ...], float]] = set()
        while True:
            stages = len(found.cut.devices)
            now = of_stages(found.step.modes, stages)
            others = (
                [*now[:stage], mode, *now[stage + 1 :]]
                for stage in range(stages if self.lanes.checkpoint == AUTO else 0)
                for mode in recomputing_less(now[stage])
                if mode in self.lanes.known_modes
            )
            may_hide = self.lanes.checkpoint == AUTO and any(map(is_recomputed, now))
            parts = EXPOSED if may_hide else EXPOSED[:1]
            for modes, exposed in chain(product([now], parts), product(others, EXPOSED[:1])):
                if len(tried) == TRIES or (tuple(modes), exposed) in tried:
                    continue
                tried.add((tuple(modes), exposed))
                other = self._cut_for(found, modes, part, exposed)
                if other and not other.short and other.seconds < found.seconds * (1 - ROUNDING):
                    found = other
                    break
            else:
                return found

    def _cut_for(
        self, found: CutWithWays, modes: Sequence[str], part: int, exposed: float
    ) -> CutWithWays | None:
        """What is found if the model is cut anew for stages with these modes; None if no cut is
        that fits, or none with which the step would be about as fast as the one that has been
        found. What stages need is taken from the cut of that one. ``exposed``: the part of the time
        of recomputing that the cut counts."""
        segments = self.lanes.checkpoint_segments
        if is_open(segments, self.lanes.checkpoint):
            before = of_stages(found.step.modes, len(modes))
            numbers = counts(found.step.segments, found.step.modes, len(modes))
            segments = [
                number if mode == old else 1
                for number, mode, old in zip(numbers, modes, before, strict=True)
            ]
        own = replace(self.lanes, checkpoint=plain(modes), checkpoint_segments=segments)
        try:
            beside = own.beside(found.cut, found.step.order)
            cut = self._cut_under(own, part, beside, self._most(found), exposed)
        except DoesNotFit:
            return None
        ways = enumerate(own.chosen(cut))
        step = own.step(cut, [self.lanes.nearest(cut, stage, way) for stage, way in ways])
        if step.timeline.makespan > found.seconds * (1 + SLACK):
            return None
        beside = self.lanes.beside(cut, step.order)
        return self._settled(replace(cut, beside=beside, bound=found.cut.bound), step)

    def _most(self, found: CutWithWays) -> float:
        """The seconds that the slowest stage of another cut may take for a mini-batch, for a step
        that is about as fast: the slowest stage works for all micro-batches, and waits for the
        other stages to work for one of them, on the way there and back."""
        times = self.lanes.times(found.cut, found.step)
        slowest = max(times)
        waits = (sum(times) - slowest) / self.lanes.chunks
        return max(slowest * (1 + SLACK), found.seconds - waits)

    def _settled(self, cut: CutModel, step: PlannedStep) -> CutWithWays:
        keeping = Keeping(self.lanes, cut)
        step = keeping.settled(step)
        return CutWithWays(cut, step, keeping.short(step))


def _most_of(every: Sequence[Beside]) -> Beside:
    """For each way and stage, the largest of these numbers of bytes."""
    return tuple(tuple(map(max, zip(*rows, strict=True))) for rows in zip(*every, strict=True))
