"""When which lane does what: predicted by the simulator, or measured."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fxpipe.schedule.actions import Action


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit to say a time in: how many seconds it has, and its name."""
    return next((u for u in ((1.0, "s"), (1e-3, "ms")) if seconds >= u[0]), (1e-6, "µs"))


@dataclass(frozen=True)
class Span:
    """Something that a lane does, from ``start`` to ``end``, in seconds since the step began.

    ``name`` says what it is where it is not an action: the loss, the optimizer's step.
    """

    lane: int
    start: float
    end: float
    action: Action | None
    name: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def __str__(self) -> str:
        return self.name or str(self.action)


@dataclass(frozen=True)
class Transfer:
    """A copy from one lane to another: ``action`` is the one that made what travels; None for what
    goes once in a step."""

    source: int
    target: int
    start: float
    end: float
    action: Action | None
    bytes: float = 0

    def __str__(self) -> str:
        return "copy, once" if self.action is None else f"copy {self.action}"


@dataclass(frozen=True)
class Timeline:
    """A step of training in time.

    Attributes:
        lanes: their names, one each.
        spans: what they do; those of one lane do not overlap.
        transfers: what travels between them meanwhile.
        memory: for each lane, ``(seconds, bytes)`` wherever the bytes change, in order; empty if
            nothing is known of it.
    """

    name: str
    lanes: tuple[str, ...]
    spans: tuple[Span, ...]
    transfers: tuple[Transfer, ...] = ()
    memory: tuple[tuple[tuple[float, float], ...], ...] = ()

    def of_lane(self, lane: int) -> list[Span]:
        """A lane's spans, in order of time."""
        return sorted((s for s in self.spans if s.lane == lane), key=lambda s: (s.start, s.end))

    @property
    def start(self) -> float:
        """When the first lane begins."""
        return min((span.start for span in self.spans), default=0.0)

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end, over all lanes."""
        return max((span.end for span in self.spans), default=self.start) - self.start

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each lane works."""
        return tuple(sum(s.seconds for s in self.of_lane(i)) for i in range(len(self.lanes)))

    @property
    def own_spans(self) -> tuple[float, ...]:
        """Seconds from each lane's own first start to its own last end."""
        lanes = [self.of_lane(lane) for lane in range(len(self.lanes))]
        return tuple(max(s.end for s in own) - own[0].start if own else 0.0 for own in lanes)

    @property
    def period(self) -> float:
        """Seconds that a step adds to a long run in which steps follow each other.

        A lane that is done begins with the next step, so that all keep their distance in time: it
        is the longest of the lanes' own spans.
        """
        return max(self.own_spans, default=0.0)

    @property
    def bubble(self) -> float:
        """The share of all lanes' time, from the first start to the last end, that is idle."""
        return _idle(sum(self.busy), self.makespan * len(self.lanes))

    @property
    def bubble_in_span(self) -> float:
        """The share of the lanes' time that is idle, each from its own first start to its last end.

        Steps that follow each other overlap, so this is what a long run pays.
        """
        return _idle(sum(self.busy), sum(self.own_spans))

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """The most bytes of each lane; empty if nothing is known of it."""
        return tuple(max((amount for _, amount in lane), default=0.0) for lane in self.memory)

    def __str__(self) -> str:
        unit, said = time_unit(self.makespan)
        lines = [
            f"{self.name}: {self.makespan / unit:.4g} {said}, "
            f"{self.bubble:.1%} of all lanes' time is idle, "
            f"{self.bubble_in_span:.1%} within their own spans"
        ]
        for lane, (name, busy) in enumerate(zip(self.lanes, self.busy, strict=True)):
            own = self.own_spans[lane]
            peak = f", peak {self.peak_memory[lane]:.6g} bytes" if self.memory else ""
            lines.append(f"{name}: works {busy / unit:.4g} of its {own / unit:.4g} {said}{peak}")
        return "\n".join(lines)

    def draw(self, memory: bool = True) -> str:
        """A Gantt chart as SVG: a row a lane, a box an action, with its micro-batch in it.

        Args:
            memory: draw what is known of it below each lane.
        """
        from fxpipe.schedule.gantt import draw  # which draws timelines, and so imports this module

        return draw([self], memory=memory)

    def _repr_svg_(self) -> str:
        """For notebooks."""
        return self.draw()

    def to_perfetto(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome trace (JSON), which ``ui.perfetto.dev`` and ``chrome://tracing`` open."""
        with open(path, "w") as file:
            json.dump({"traceEvents": list(_events(self)), "displayTimeUnit": "ms"}, file)


def _idle(busy: float, whole: float) -> float:
    return 1 - busy / whole if whole > 0 else 0.0


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """In microseconds. Lanes are threads of one process, and copies to a lane one beside it."""
    yield _meta("process_name", 0, timeline.name)
    for lane, name in enumerate(timeline.lanes):
        yield _meta("thread_name", 2 * lane, name)
        if any(transfer.target == lane for transfer in timeline.transfers):
            yield _meta("thread_name", 2 * lane + 1, f"{name}, copies to it")
    for span in timeline.spans:
        yield _event(str(span), 2 * span.lane, span.start, span.end, span.action)
    for copy in timeline.transfers:
        yield _event(str(copy), 2 * copy.target + 1, copy.start, copy.end, copy.action)
    for name, series in zip(timeline.lanes, timeline.memory, strict=False):
        for seconds, amount in series:
            title = f"memory of {name}"
            yield {
                "name": title,
                "ph": "C",
                "pid": 0,
                "ts": seconds * 1e6,
                "args": {"bytes": amount},
            }


def _meta(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 0, "tid": thread, "args": {"name": name}}


def _event(
    name: str, thread: int, start: float, end: float, action: Action | None
) -> dict[str, Any]:
    args: dict[str, Any] = {}
    if action is not None:
        kind = action.kind.name.lower()
        args = {"stage": action.stage, "microbatch": action.microbatch, "kind": kind}
    times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"name": name, "ph": "X", "pid": 0, "tid": thread, **times, "args": args}
