"""The timeline of a training step, which the simulator predicts or a measurement gives."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fxpipe.ir.text import human_bytes
from fxpipe.schedule.actions import Action
from fxpipe.schedule.gantt import draw
from fxpipe.schedule.occupancy import Occupancy, time_unit


@dataclass(frozen=True)
class Timeline(Occupancy):
    """A step of training in time: it can be printed, drawn, and written as a trace.

    The attributes are those of :class:`fxpipe.schedule.occupancy.Occupancy`.
    """

    def __str__(self) -> str:
        unit, said = time_unit(self.makespan)
        lines = [
            f"{self.name}: {self.makespan / unit:.4g} {said}; lanes wait {self.bubble:.1%} of the "
            f"time, and {self.bubble_in_span:.1%} between their first action and their last"
        ]
        for lane, (name, busy) in enumerate(zip(self.lanes, self.busy, strict=True)):
            own = self.own_spans[lane]
            peak = f", peak {human_bytes(self.peak_memory[lane])}" if self.memory else ""
            lines.append(
                f"{name}: works {busy / unit:.4g} of the {own / unit:.4g} {said} from its first "
                f"action to its last{peak}"
            )
        return "\n".join(lines)

    def draw(self, memory: bool = True) -> str:
        """A Gantt chart as SVG: a row for each lane, and a box for each action, with the number of
        its micro-batch in it.

        Args:
            memory: draw the memory of each lane below it, if the timeline has it.
        """
        return draw([self], memory=memory)

    def _repr_svg_(self) -> str:
        """The drawing that notebooks show."""
        return self.draw()

    def to_perfetto(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome trace (JSON), which ``ui.perfetto.dev`` and ``chrome://tracing`` open."""
        with open(path, "w") as file:
            json.dump({"traceEvents": list(_events(self)), "displayTimeUnit": "ms"}, file)


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The events of a Chrome trace, whose times are in microseconds. Each lane is a thread of one
    process, and a second thread beside it has the copies to that lane."""
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
