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
from fxpipe.inspect.report import Report
from fxpipe.ir.text import human_bytes
from fxpipe.schedule import Timeline
from fxpipe.schedule.gantt import draw
from passes.common.skips import Hop, SkipLayout


@dataclass(frozen=True)
class Page:
    """The contents of a report page. ``str`` of it is the HTML.

    Args:
        title: the heading of the page.
        report: the report, whose table and lines the page shows first.
        drawings: drawings as SVG, by their headings.
        timelines: a training step, or a call without one: as predicted, with the memory that each
            lane holds, and as measured, if it has been.
        changes: one history for each chain of passes, which says what each pass has changed.
        codes: the Python code of graphs, by the graphs' names.
    """

    title: str
    report: Report
    drawings: Mapping[str, str]
    timelines: Sequence[Timeline]
    changes: Sequence[History]
    codes: Mapping[str, str]

    def __str__(self) -> str:
        report, layout = self.report, self.report.layout
        run = "Training step" if report.training else "Call"
        rows = [
            [*row[:2], (said, said), *row[2:]]
            for row, said in zip(report.rows, report.contain, strict=True)
        ]
        columns = (*report.columns[:2], CONTAINS, *report.columns[2:])
        stages = [f"stage-{number}" for number in range(len(rows))]
        values = [f"skip-{hop.value}" if hop.is_skip else "" for hop in layout.hops]
        travels = _said(layout) + table_html(COLUMNS, _rows(layout.hops), about=values)
        return sections_html(
            self.title,
            [
                Section("Summary", list_html(report.facts)),
                Section("Stages", table_html(columns, rows, words=CONTAINS, about=stages)),
                *(Section(name, drawing_html(name, svg)) for name, svg in self.drawings.items()),
                Section(
                    f"{run} and memory",
                    drawing_html("timeline", draw(self.timelines, widest=WIDEST)),
                ),
                Section("Values sent", travels),
                Section("Passes", "".join(_chains(self.changes))),
                Section("Code", "".join(text_html(*code) for code in self.codes.items())),
            ],
        )


CONTAINS = "contains"
WIDEST = 1100  # pixels for the boxes of a step: all of it can be seen at once
COLUMNS = ("value", "from", "to", "way", "size")


def _said(layout: SkipLayout) -> str:
    count, skips = len(layout.hops), len(layout.skips)
    return (
        f"<p>{count} value{'s are' if count != 1 else ' is'} sent to a stage for each mini-batch; "
        f"{skips} of them {'are skips, which pass' if skips != 1 else 'is a skip, which passes'} "
        "over stages to the one that uses it. A value has the name of the node that computes it; "
        "the code of the stages is below.</p>"
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
