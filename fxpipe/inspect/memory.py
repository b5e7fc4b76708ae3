"""A drawing, as SVG, of the memory that each lane holds over the time of a training step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from xml.sax.saxutils import escape

from fxpipe.ir.text import human_bytes, human_time
from fxpipe.schedule import Timeline

_LEFT, _WIDTH, _ROW, _GAP = 150, 820, 64, 26  # in pixels
_FILL, _EDGE, _FIXED = "#CCE3F0", "#0072B2", "#BBBBBB"


def draw_memory(timeline: Timeline) -> str:
    """Draw the memory of a timeline as SVG: one row for each lane, all rows on one scale. Memory
    that is held during the whole step (parameters, gradients, optimizer state) is grey."""
    most = max(timeline.peak_memory, default=0.0) or 1.0
    height = len(timeline.memory) * (_ROW + _GAP) + 60
    width = _LEFT + _WIDTH + 100
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif" '
        'font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for lane in range(len(timeline.memory)):
        parts += _row(timeline, lane, 12 + lane * (_ROW + _GAP), most)
    parts += _axis(timeline, height - 48)
    return "\n".join([*parts, "</svg>", ""])


def _row(timeline: Timeline, lane: int, top: float, most: float) -> Iterator[str]:
    def y(amount: float) -> float:
        return top + _ROW * (1 - amount / most)

    begin, low = timeline.start, top + _ROW
    series = [(s - begin, amount) for s, amount in timeline.memory[lane]]
    series.append((timeline.makespan, series[-1][1]))
    points = []
    for (start, amount), (end, _) in pairwise(series):
        points += [(_x(timeline, start), y(amount)), (_x(timeline, end), y(amount))]
    line = " ".join(f"{x:.1f},{at:.1f}" for x, at in points)
    right = _LEFT + _WIDTH
    yield f'<polygon points="{_LEFT},{low} {line} {right},{low}" fill="{_FILL}"/>'
    fixed = y(series[0][1])
    yield (
        f'<rect x="{_LEFT}" y="{fixed:.1f}" width="{_WIDTH}" height="{low - fixed:.1f}" '
        f'fill="{_FIXED}"/>'
    )
    yield f'<polyline points="{line}" fill="none" stroke="{_EDGE}" stroke-width="1.5"/>'
    yield f'<line x1="{_LEFT}" x2="{right}" y1="{low}" y2="{low}" stroke="black"/>'
    yield _text(10, top + _ROW / 2, timeline.lanes[lane])
    yield _text(10, top + _ROW / 2 + 16, f"peak {human_bytes(round(timeline.peak_memory[lane]))}")


def _axis(timeline: Timeline, top: float) -> Iterator[str]:
    for part in range(5):
        x = _LEFT + _WIDTH * part / 4
        yield _text(x, top + 10, human_time(timeline.makespan * part / 4), "middle")
    yield f'<rect x="{_LEFT}" y="{top + 22}" width="14" height="12" fill="{_FIXED}"/>'
    yield _text(_LEFT + 20, top + 32, "parameters, gradients, optimizer state")
    yield f'<rect x="{_LEFT + 260}" y="{top + 22}" width="14" height="12" fill="{_FILL}"/>'
    yield _text(_LEFT + 280, top + 32, "activations")


def _x(timeline: Timeline, seconds: float) -> float:
    return _LEFT + _WIDTH * min(seconds / (timeline.makespan or 1.0), 1.0)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
