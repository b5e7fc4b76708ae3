"""The comparison of two timelines of one step, such as a predicted and a measured one."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from fxpipe.schedule.actions import Action, Kind
from fxpipe.schedule.gantt import draw
from fxpipe.schedule.occupancy import Span, time_unit
from fxpipe.schedule.timeline import Timeline


@dataclass(frozen=True)
class Disagreement:
    """The durations of one action in two timelines, in seconds."""

    action: Action
    first: float
    second: float

    @property
    def seconds(self) -> float:
        """How many seconds longer the action takes in the second timeline."""
        return self.second - self.first


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`; ``str`` of it is a summary."""

    first: Timeline
    second: Timeline

    @property
    def error(self) -> float:
        """By which fraction the second step is longer than the first one: 0.1 is 10 %."""
        return self.second.makespan / self.first.makespan - 1 if self.first.makespan else 0.0

    @cached_property
    def durations(self) -> tuple[Disagreement, ...]:
        """The durations of all actions that are in both timelines, the largest difference first."""
        first, second = _spans(self.first), _spans(self.second)
        found = [
            Disagreement(action, span.seconds, second[action].seconds)
            for action, span in first.items()
            if action in second
        ]
        return tuple(sorted(found, key=lambda d: (-abs(d.seconds), d.action)))

    @property
    def largest(self) -> Disagreement | None:
        """The action whose durations differ most; None if the two have none in common."""
        return self.durations[0] if self.durations else None

    @property
    def stages(self) -> dict[tuple[int, Kind], tuple[float, float]]:
        """The mean seconds of each kind of action at each stage: the first timeline's mean, then
        the second's."""
        grouped: dict[tuple[int, Kind], list[Disagreement]] = defaultdict(list)
        for found in sorted(self.durations, key=lambda d: d.action):
            grouped[found.action.stage, found.action.kind].append(found)
        return {
            key: (fmean(d.first for d in group), fmean(d.second for d in group))
            for key, group in grouped.items()
        }

    def __str__(self) -> str:
        a, b = self.first, self.second
        lines = [
            f"{self._both(a.makespan, b.makespan)} ({self.error:+.1%})",
            f"idle: {a.name} {a.bubble:.1%}, {b.name} {b.bubble:.1%}",
        ]
        for (stage, kind), (first, second) in self.stages.items():
            lines.append(f"stage {stage} {_name(kind)}: {self._both(first, second)}")
        return "\n".join([*lines, self._caption()])

    def _caption(self) -> str:
        found = self.largest
        if found is None:
            return "no action is in both"
        action = found.action
        said = f"{_name(action.kind)} of micro-batch {action.microbatch} at stage {action.stage}"
        return f"largest disagreement: {said} ({action}), {self._both(found.first, found.second)}"

    def _both(self, first: float, second: float) -> str:
        unit, said = time_unit(max(first, second))
        return (
            f"{self.first.name} {first / unit:.4g} {said}, "
            f"{self.second.name} {second / unit:.4g} {said}"
        )

    def draw(self, memory: bool = False) -> str:
        """Both timelines as SVG, one below the other on one axis. The action whose durations differ
        most is outlined. ``memory``: draw the memory of each lane too, if it is known."""
        marks = [] if self.largest is None else [self.largest.action]
        timelines = [self.first, self.second]
        return draw(timelines, memory=memory, marks=marks, caption=self._caption())


def compare(first: Timeline, second: Timeline) -> Comparison:
    """Put two timelines of one step side by side."""
    return Comparison(first, second)


def _name(kind: Kind) -> str:
    """The kind of an action in words: "backward input"."""
    return kind.name.lower().replace("_", " ")


def _spans(timeline: Timeline) -> dict[Action, Span]:
    return {span.action: span for span in timeline.spans if span.action is not None}
