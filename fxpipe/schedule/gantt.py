"""Timelines drawn as Gantt charts, in SVG, with a row for each lane and a box for each action.

The colours are those of Okabe and Ito (2008), which can be told apart with any kind of colour
vision. Boxes of weight gradients are less high, so that they differ in print without colour too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.sax.saxutils import escape

from fxpipe.ir.text import nice
from fxpipe.schedule.actions import Action, Kind
from fxpipe.schedule.occupancy import Occupancy, Span, time_unit

_BASE = {
    Kind.FORWARD: (0x00, 0x72, 0xB2),
    Kind.BACKWARD: (0xD5, 0x5E, 0x00),
    Kind.BACKWARD_INPUT: (0xE6, 0x9F, 0x00),
    Kind.WEIGHT_GRAD: (0x00, 0x9E, 0x73),
    Kind.RECOMPUTE: (0xCC, 0x79, 0xA7),
}
_MEANING = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, input half",
    Kind.WEIGHT_GRAD: "weight gradient",
    Kind.RECOMPUTE: "recomputation",
}
_LIGHT, _DARK = 0.72, 0.28  # how much white is in the colours of a lane's first and last stage
_OTHER, _COPY, _MARK, _HELD, _FIXED = "#BBBBBB", "#555555", "#CC0000", "#C9C9D6", "#A2A2B4"
_SIZE = 11  # the size of letters, in pixels
_ROW, _GAP, _MEMORY, _WAY = 24, 9, 36, 4  # heights: boxes, gaps between lanes, memory, copies
_NARROWEST, _WIDEST = 640, 8000  # limits on the width of the part that has the boxes
_SIZES = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))

IN_THE_DARK = (
    "<style>@media (prefers-color-scheme: dark) { svg:root { background: white; "
    "filter: invert(0.88) hue-rotate(180deg); } }</style>"
)
"""For a drawing that is a file, or an image of a page: on a dark screen it is dark. A page that has
drawings in its text says itself what they look like."""

FORWARDS = (1.0, "forwards of a stage")
"""The unit of time for schedules without costs, in which the forward of a stage takes 1."""


def draw(
    timelines: Sequence[Occupancy],
    *,
    memory: bool = True,
    marks: Sequence[Action] = (),
    caption: str = "",
    unit: tuple[float, str] | None = None,
    widest: float = _WIDEST,
) -> str:
    """Draw timelines as SVG, one below the other, over one axis of time. All begin at time 0.

    Args:
        memory: draw the memory of each lane below it, for timelines that have it.
        marks: actions to outline.
        caption: a line below the drawing, which explains the marks.
        unit: the seconds in a unit of time, and its name; None: s, ms or µs, as fits.
        widest: the most pixels for the part that has the boxes. It is less wide where all numbers
            have room in their boxes nevertheless.
    """
    return _Chart(timelines, memory, marks, caption, unit, widest).svg()


def _text_width(text: str, size: float = _SIZE) -> float:
    return 0.58 * size * len(text)


def _text(x: float, y: float, text: str, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, more: str) -> str:
    return f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" {more}/>'


def _line(x: float, y: float, x2: float, y2: float, more: str) -> str:
    return f'<line x1="{x:.2f}" y1="{y:.1f}" x2="{x2:.2f}" y2="{y2:.1f}" {more}/>'


@dataclass(frozen=True)
class _Panel:
    """A timeline, and its y coordinates in the drawing: ``title`` of its name, ``tops`` of the
    upper edges of its lanes, and ``bottom`` of its lower edge."""

    timeline: Occupancy
    title: float
    tops: tuple[float, ...]
    bottom: float
    has_memory: bool


class _Chart:
    def __init__(
        self,
        timelines: Sequence[Occupancy],
        memory: bool,
        marks: Sequence[Action],
        caption: str,
        unit: tuple[float, str] | None,
        widest: float,
    ) -> None:
        self.widest = widest
        self.marks, self.caption = set(marks), caption
        self.seconds = max((timeline.makespan for timeline in timelines), default=0.0) or 1.0
        self.unit, self.unit_name = unit or time_unit(self.seconds)
        self.labels = {
            (index, lane): _lane_label(timeline, lane)
            for index, timeline in enumerate(timelines)
            for lane in range(len(timeline.lanes))
        }
        peaks = [_peak_label(t) for t in timelines if t.memory and memory]
        self.left = 16 + max(map(_text_width, [*self.labels.values(), *peaks]), default=0)
        self.right = 24 + max(map(_text_width, peaks), default=0)
        self.width = self._plot_width(timelines)
        self.panels: list[_Panel] = []
        y = 8.0
        for timeline in timelines:
            panel = _place(timeline, y, memory)
            self.panels.append(panel)
            y = panel.bottom + 10
        self.axis = y

    def _plot_width(self, timelines: Sequence[Occupancy]) -> float:
        """The width of the part that has the boxes, so that all boxes but the shortest tenth have
        room for their numbers."""
        spans = [span for timeline in timelines for span in timeline.spans]
        spans = [span for span in spans if span.action is not None]
        lengths = sorted(span.seconds for span in spans if span.seconds > 0)
        if not lengths:
            return _NARROWEST
        digits = max(len(_number(span)) for span in spans)
        box = digits * 0.62 * _SIZE + 5
        wished = self.seconds / lengths[len(lengths) // 10] * box
        return min(max(wished, _NARROWEST), self.widest)

    def x(self, seconds: float) -> float:
        return self.left + seconds / self.seconds * self.width

    def svg(self) -> str:
        legend = list(self._legend())
        rows = 1 + max((row for row, _ in legend), default=0)
        below = self.axis + 42
        height = below + rows * 20 + (20 if self.caption else 0) + 4
        width = self.left + self.width + self.right
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" '
            f'font-family="Helvetica, Arial, sans-serif" font-size="{_SIZE}">',
            IN_THE_DARK,
            _rect(0, 0, width, height, 'fill="white"'),
            *self._axis(),
        ]
        for index, panel in enumerate(self.panels):
            parts += self._panel(index, panel)
        parts += [f'<g transform="translate(0,{below:.0f})">', *(p for _, p in legend), "</g>"]
        if self.caption:
            parts.append(_text(10, height - 8, self.caption, more=f' fill="{_MARK}"'))
        return "\n".join([*parts, "</svg>", ""])

    def _axis(self) -> Iterator[str]:
        step = nice(self.seconds / self.unit / max(4, self.width / 90))
        count = int(self.seconds / self.unit / step + 1e-9)
        for i in range(count + 1):
            x = self.x(i * step * self.unit)
            for panel in self.panels:
                yield _line(x, panel.title + 6, x, panel.bottom, 'stroke="#DDDDDD"')
            yield _line(x, self.axis, x, self.axis + 4, 'stroke="black"')
            yield _text(x, self.axis + 16, f"{i * step:g}", "middle")
        yield _line(self.left, self.axis, self.left + self.width, self.axis, 'stroke="black"')
        middle = self.left + min(self.width, 900) / 2
        yield _text(middle, self.axis + 31, f"time ({self.unit_name})", "middle")

    def _panel(self, index: int, panel: _Panel) -> Iterator[str]:
        timeline, begin = panel.timeline, panel.timeline.start
        yield _text(10, panel.title, timeline.name, more=' font-weight="bold"')
        said = (
            f"{timeline.makespan / self.unit:.4g} {self.unit_name}; idle {timeline.bubble:.1%}, "
            f"{timeline.bubble_in_span:.1%} from the first action of each lane to its last"
        )
        yield _text(22 + _text_width(timeline.name, _SIZE * 1.1), panel.title, said)
        most = max((a for series in timeline.memory for _, a in series), default=0.0)
        for lane, top in enumerate(panel.tops):
            stages = " ".join(f"stage-{stage}" for stage in _shades(timeline, lane))
            named = f' class="{stages}"' if stages else ""
            yield _text(10, top + _ROW * 0.67, self.labels[index, lane], more=named)
            yield _rect(self.left, top, self.width, _ROW, 'fill="#F6F6F6"')
            shades = _shades(timeline, lane)
            for span in timeline.of_lane(lane):
                yield from self._box(span, span.start - begin, top, shades)
            for copy in timeline.transfers:
                if copy.target == lane:
                    x, end = (self.x(at - begin) for at in (copy.start, copy.end))
                    more = f'fill="{_COPY}"'
                    yield _rect(x, top + _ROW + 1, max(end - x - 0.5, 0.5), _WAY - 1, more)
            if panel.has_memory:
                yield from self._held(panel, lane, top + _ROW + _ways(timeline) + 2, most)

    def _box(self, span: Span, start: float, top: float, shades: dict[int, float]) -> Iterator[str]:
        x, end = self.x(start), self.x(start + span.seconds)
        action = span.action
        inset = 5 if action is not None and action.kind is Kind.WEIGHT_GRAD else 1
        fill = _OTHER if action is None else _colour(action.kind, shades[action.stage])
        edge = 'stroke="white" stroke-width="0.6"'
        if action in self.marks:
            edge = f'stroke="{_MARK}" stroke-width="2"'
        said = f"{span}: {span.seconds / self.unit:.4g} {self.unit_name}"
        title = f"<title>{escape(said)}</title>"
        box = _rect(x, top + inset, max(end - x, 0.5), _ROW - 2 * inset, f'fill="{fill}" {edge}')
        about = "" if action is None else f' class="stage-{action.stage} mb-{action.microbatch}"'
        yield f"<g{about}>{title}{box}"
        number = _number(span)
        if _text_width(number) <= end - x - 1:
            yield _text((x + end) / 2, top + _ROW / 2 + 4, number, "middle")
        yield "</g>"

    def _held(self, panel: _Panel, lane: int, top: float, most: float) -> Iterator[str]:
        """The memory of a lane over time, as steps; all lanes of a panel have one scale, whose ends
        are at the right. What is held all the time is darker."""
        begin, low, right = panel.timeline.start, top + _MEMORY, self.left + self.width
        series = [(s - begin, amount) for s, amount in panel.timeline.memory[lane]]
        series.append((panel.timeline.makespan, series[-1][1]))

        def y(amount: float) -> float:
            return low - _MEMORY * amount / (most or 1)

        points = [f"{self.x(series[0][0]):.1f},{low:.1f}"]
        for (start, amount), (end, _) in pairwise(series):
            points += [f"{self.x(t):.1f},{y(amount):.1f}" for t in (start, end)]
        points.append(f"{self.x(series[-1][0]):.1f},{low:.1f}")
        yield _line(self.left, top, right, top, 'stroke="#DDDDDD"')
        yield f'<polygon points="{" ".join(points)}" fill="{_HELD}"/>'
        always = min(amount for _, amount in series)
        end = self.x(series[-1][0])
        yield _rect(self.left, y(always), end - self.left, low - y(always), f'fill="{_FIXED}"')
        yield _line(self.left, low, right, low, 'stroke="#777777"')
        yield _text(self.left - 6, low - 5, _peak(panel.timeline.peak_memory[lane]), "end")
        yield _text(right + 4, top + 9, _peak(most))
        yield _text(right + 4, low, "0")

    def _legend(self) -> Iterator[tuple[int, str]]:
        """The items of the legend: the row that each is in, and its SVG."""
        timelines = [panel.timeline for panel in self.panels]
        spans = [span for timeline in timelines for span in timeline.spans]
        kinds = {span.action.kind for span in spans if span.action is not None}
        items = [
            (_colour(kind, 0.45), meaning, 4 if kind is Kind.WEIGHT_GRAD else 1)
            for kind, meaning in _MEANING.items()
            if kind in kinds
        ]
        others = dict.fromkeys(str(span) for span in spans if span.action is None)
        if others:
            items.append((_OTHER, ", ".join(others), 1))
        if any(timeline.transfers for timeline in timelines):
            items.append((_COPY, "copy to the lane", 5))
        if any(panel.has_memory for panel in self.panels):
            items.append((_HELD, "memory, with its peak", 1))
            items.append((_FIXED, "held all the time", 1))
        x, row = 10.0, 0
        for fill, meaning, inset in items:
            wide = 24 + _text_width(meaning) + 12
            if x + wide > self.left + self.width and x > 10:
                x, row = 10.0, row + 1
            y = row * 20
            swatch = _rect(x, y + inset, 18, 14 - 2 * inset, f'fill="{fill}"')
            yield row, swatch + _text(x + 24, y + 11, meaning)
            x += wide
        notes = ["numbers are micro-batches"]
        if any(len(_shades(t, lane)) > 1 for t in timelines for lane in range(len(t.lanes))):
            notes.append("of a lane's stages, later ones are darker")
        yield row + 1, _text(10, (row + 1) * 20 + 11, "; ".join(notes))


def _place(timeline: Occupancy, top: float, memory: bool) -> _Panel:
    has_memory = memory and bool(timeline.memory)
    tall = _ROW + _ways(timeline) + (_MEMORY + 2 if has_memory else 0)
    tops = tuple(top + 20 + lane * (tall + _GAP) for lane in range(len(timeline.lanes)))
    bottom = tops[-1] + tall if tops else top + 20
    return _Panel(timeline, top + 11, tops, bottom, has_memory)


def _ways(timeline: Occupancy) -> int:
    return _WAY if timeline.transfers else 0


def _number(span: Span) -> str:
    return span.name if span.action is None else str(span.action.microbatch)


def _shades(timeline: Occupancy, lane: int) -> dict[int, float]:
    """How much white is in the colours of each stage of a lane, from 0 to 1."""
    stages = sorted({s.action.stage for s in timeline.spans if s.lane == lane and s.action})
    if len(stages) == 1:
        return {stages[0]: 0.45}
    step = (_LIGHT - _DARK) / max(len(stages) - 1, 1)
    return {stage: _LIGHT - i * step for i, stage in enumerate(stages)}


def _colour(kind: Kind, white: float) -> str:
    return "#" + "".join(f"{round(255 * white + part * (1 - white)):02X}" for part in _BASE[kind])


def _lane_label(timeline: Occupancy, lane: int) -> str:
    stages = list(_shades(timeline, lane))
    if not stages:
        return timeline.lanes[lane]
    said = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
    return f"{timeline.lanes[lane]} · {said}"


def _peak_label(timeline: Occupancy) -> str:
    return "  " + max(map(_peak, timeline.peak_memory), key=len)


def _peak(amount: float) -> str:
    unit, name = next((u for u in _SIZES if amount >= u[0]), _SIZES[-1])
    return f"{amount / unit:.3g} {name}"
