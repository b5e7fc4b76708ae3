"""Suggestions: calls of :func:`fxpipe.compile` that are predicted to make a compiled model faster.

::

    as it is          24.9 ms   gpipe, 4 micro-batches
    chunks            20.3 ms   8              one kind of change after the other, each on top
    schedule          16.9 ms   zb_h1          of those that have helped: together they save 32 %;
                                               each is tried by itself, too

Every change is given to the planner, and what does not make a step faster is not suggested. So is
nothing that does not fit into the memory that is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fxpipe.compiler.replanned import Replanned
from fxpipe.compiler.written import WrittenCall
from fxpipe.inspect.batch_statistics import caution
from fxpipe.ir.errors import AnotherStrategy
from fxpipe.ir.progress import report_progress
from fxpipe.ir.text import human_time
from fxpipe.planning.result import Plan
from fxpipe.schedule import NAMES, Schedule
from passes.common.modes import AUTO, is_never
from passes.partition.ways import Change

WORTH = 0.05  # a change is suggested if a step takes less time by at least this part of it
SLIGHT = 0.01  # ... and goes into several changes together if it saves this part


@dataclass(frozen=True)
class Suggestion:
    """A call of :func:`fxpipe.compile` that makes a pipeline of the same model, which is predicted
    to be faster.

    Attributes:
        options: the options that change, with their new values; None for one that is left out.
        seconds: how long a step takes then, by prediction; a call, if nothing is trained.
        before: how long it takes now, by prediction.
        memory: the bytes that each lane holds then, at most.
        call: the call, as Python. Arguments that have no short literal stand there by the names of
            their parameters, such as ``model`` and ``loss_fn``.
        run: what takes so long: "step", or "call" if nothing is trained.
        caution: what the change does beside that: a sentence without its full stop, or empty.
    """

    options: Mapping[str, Any]
    seconds: float
    before: float
    memory: tuple[float, ...]
    call: str
    run: str = "step"
    caution: str = ""

    @property
    def saved(self) -> float:
        """The part of the time that is saved, from 0.0 to 1.0."""
        return 1 - self.seconds / self.before if self.before else 0.0

    def __str__(self) -> str:
        given = {name: value for name, value in self.options.items() if value is not None}
        takes_turns = given.get("chunks") == 1 and len(self.memory) > 1
        more = "; lanes work one after the other then, as without a pipeline" * takes_turns
        return (
            f"{Change(given)}: a {self.run} is predicted to take {human_time(self.seconds)} in "
            f"place of {human_time(self.before)}, {self.saved:.0%} less{more}"
        )


@dataclass(frozen=True)
class Suggesting:
    """The search for suggestions for a compiled model.

    Args:
        compiled: the model.
        now: what is predicted for it as it is.
        call: the call that has compiled it.
    """

    compiled: Replanned
    now: Plan
    call: WrittenCall
    _known: dict[str, Plan | None] = field(default_factory=dict)

    @cached_property
    def found(self) -> list[Suggestion]:
        """What helps, all changes together, and each by itself: the most helpful first, but what
        changes what the model computes behind what does not."""
        together = self._together()
        single = [self._suggestion(settings) for settings in together.values()]
        helpful = [each for each in single if each is not None and each.saved >= WORTH]
        best = max((each.saved for each in helpful), default=0.0)
        everything = self._suggestion(_flat(together)) if len(together) > 1 else None
        if everything is not None and everything.saved >= max(WORTH, best + SLIGHT):
            helpful.append(everything)
        return sorted(helpful, key=lambda each: (bool(each.caution), each.seconds))

    def _together(self) -> dict[str, dict[str, Any]]:
        """The changes that help one on top of the other, by their kinds."""
        found: dict[str, dict[str, Any]] = {}
        seconds = self.now.seconds
        for kind, tried in self._kinds():
            best: dict[str, Any] | None = None
            limit = seconds * (1 - SLIGHT)
            for settings in tried:
                plan = self._plan({**_flat(found), **settings})
                if plan is not None and plan.seconds < min(limit, seconds):
                    best, seconds = settings, plan.seconds
            if best is not None:
                found[kind] = best
        return found

    def _kinds(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """The kinds of changes, in the order in which they are tried, and the settings of each."""
        options, layout = self.compiled.options, self.compiled.layout
        if not self.compiled.asked(self.compiled.memory).is_automatic:
            yield "partition", [{"partition": "auto"}]
        if not is_never(layout.modes):
            modes = {"never", AUTO} - {options.checkpoint}
            # Numbers of segments that are given are for the modes that are given.
            left = {} if options.checkpoint_segments is None else {"checkpoint_segments": None}
            yield "checkpoint", [{"checkpoint": mode, **left} for mode in sorted(modes)]
        own = isinstance(options.schedule, Schedule)
        yield "chunks", [] if own else [{"chunks": n} for n in self._counts]
        if not options.training:
            return  # a call has one order
        # With a schedule of the user's own go its number of stages and of micro-batches.
        kept = {"chunks": self.compiled.chunks} if own else {}
        names = [name for name in NAMES if name != options.schedule]
        yield "schedule", [{**kept, "schedule": name, "stages": None} for name in names]

    @property
    def _counts(self) -> list[int]:
        """The numbers of micro-batches to try: other ones if it is known what they would take."""
        if not self.compiled.options.knows_other_sizes:
            return []
        now = self.compiled.chunks
        most = min(4 * now, self.compiled.rows or now)
        wanted = {max(1, now // 2), min(2 * now, most), most} - {now}
        return [n for n in sorted(wanted) if self.compiled.takes(n)]

    def _suggestion(self, settings: Mapping[str, Any]) -> Suggestion | None:
        plan = self._plan(settings)
        if plan is None:
            return None
        call = str(self.call.with_options(**settings))
        run = "step" if plan.training else "call"
        compiled = self.compiled
        then = settings.get("chunks", compiled.chunks)
        warned = caution(compiled.mode.model_graph, compiled.rows, compiled.chunks, then)
        before = self.now.seconds
        return Suggestion(dict(settings), plan.seconds, before, plan.memory, call, run, warned)

    def _plan(self, settings: Mapping[str, Any]) -> Plan | None:
        """The plan with changed options; None if there is none that fits."""
        key = repr(sorted(settings.items()))
        if key not in self._known:
            report_progress(str(Change({k: v for k, v in settings.items() if v is not None})))
            try:
                plan = self.compiled.with_options(**settings)
            except (ValueError, AnotherStrategy):  # there is no such schedule, or nothing fits
                plan = None
            self._known[key] = plan if plan is not None and plan.fits else None
        return self._known[key]


def _flat(changes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for settings in changes.values() for name, value in settings.items()}
