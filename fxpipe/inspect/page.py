"""The report page: the report, drawings, memory, passes and code of a pipeline, in one HTML file
that needs no network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from fxpipe.compiler.history import History
from fxpipe.inspect.dump import history_html
from fxpipe.inspect.html import (
    Section,
    drawing_html,
    list_html,
    sections_html,
    table_html,
    text_html,
)
from fxpipe.inspect.memory import draw_memory
from fxpipe.inspect.report import Report
from fxpipe.ir.text import human_bytes
from fxpipe.schedule import Timeline
from passes.common.skips import Hop, SkipLayout


@dataclass(frozen=True)
class Page:
    """The contents of a report page. ``str`` of it is the HTML.

    Args:
        title: the heading of the page.
        report: the report, whose table and lines the page shows first.
        drawings: drawings as SVG, by their headings.
        timeline: a training step, or a call without one, with the memory that each lane holds.
        changes: one history for each chain of passes, which says what each pass has changed.
        codes: the Python code of graphs, by the graphs' names.
    """

    title: str
    report: Report
    drawings: Mapping[str, str]
    timeline: Timeline
    changes: Sequence[History]
    codes: Mapping[str, str]

    def __str__(self) -> str:
        layout = self.report.layout
        step = self.timeline.draw(memory=False)
        run = "Training step" if self.report.training else "Call"
        travels = _said(layout) + table_html(COLUMNS, _rows(layout.hops))
        return sections_html(
            self.title,
            [
                Section("Summary", list_html(self.report.lines)),
                Section("Stages", table_html(self.report.columns, self.report.rows)),
                *(Section(name, drawing_html(name, svg)) for name, svg in self.drawings.items()),
                Section(run, drawing_html("timeline", step)),
                Section("Memory", drawing_html("memory", draw_memory(self.timeline))),
                Section("Values sent", travels),
                Section("Passes", "".join(_chains(self.changes))),
                Section("Code", "".join(text_html(*code) for code in self.codes.items())),
            ],
        )


COLUMNS = ("value", "from", "to", "way", "bytes")


def _said(layout: SkipLayout) -> str:
    return (
        f"<p>{len(layout.hops)} values are sent to a stage for each mini-batch; "
        f"{len(layout.skips)} of them are skips, which pass over stages.</p>"
    )


def _rows(hops: Iterable[Hop]) -> Iterable[list[tuple[float | str, str]]]:
    for hop in hops:
        if hop.once:
            way = "once"
        else:
            way = "skip" if hop.is_skip else "next stage" if hop.source is not None else "caller"
        source = "caller" if hop.source is None else str(hop.source)
        yield [
            (hop.value, hop.value),
            (-1 if hop.source is None else hop.source, source),
            (hop.target, str(hop.target)),
            (way, way),
            (hop.bytes, human_bytes(hop.bytes)),
        ]


def _chains(changes: Iterable[History]) -> Iterable[str]:
    for history in changes:
        summary = f"<summary>{escape(history.title)}</summary>"
        yield f"<details>{summary}{history_html(history)}</details>"
