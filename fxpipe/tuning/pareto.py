"""The Pareto front of time against memory, and its picture.

::

    memory │  x                 x  a trial for which another one is both faster and smaller
           │  1   x             1  one of the front, which is named below
           │    2───3
           └───────── time
     1  1f1b, 4 chunks: ...
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from xml.sax.saxutils import escape

from fxpipe.ir.text import human_bytes, human_time, nice

_WIDTH, _HEIGHT, _MARGIN = 640, 400, 70
_LINE = 15  # the height of a line of text
_LETTERS = 95  # that a line has room for


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The numbers of the points for which no other point is at most as large in both numbers, and
    smaller in one; in the order of the first number. Of equal points it has the first."""
    found: list[int] = []
    least = float("inf")
    for i in sorted(range(len(points)), key=lambda i: (*points[i], i)):
        if points[i][1] < least:
            found.append(i)
            least = points[i][1]
    return found


def picture(points: Sequence[tuple[float, float]], names: Sequence[str]) -> str:
    """The points in SVG: seconds to the right, bytes upwards, with a line through the front. Each
    point has its name and numbers as a tooltip. Those of the front are counted, and their names are
    below the axis, too."""
    right = max((x for x, _ in points), default=1.0) or 1.0
    top = max((y for _, y in points), default=1.0) or 1.0

    def at(point: tuple[float, float]) -> tuple[float, float]:
        inner = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN
        return (
            _MARGIN + inner[0] * point[0] / right,
            _HEIGHT - _MARGIN - inner[1] * point[1] / top,
        )

    chosen = front(points)
    titles = [
        f"{name}: {human_time(seconds)}, {human_bytes(round(size))}"
        for name, (seconds, size) in zip(names, points, strict=True)
    ]
    lines = [textwrap.wrap(titles[i], _LETTERS, break_on_hyphens=False) for i in chosen]
    height = _HEIGHT + _LINE * sum(map(len, lines))
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(points[i]) for i in chosen))
    left, below = at((0.0, 0.0))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        "<style>svg{color:#222;background:#fff}"
        "@media(prefers-color-scheme:dark){svg{color:#ddd;background:#1b1b1b}}</style>",
        f'<path d="M{left},{_MARGIN} V{below} H{_WIDTH - _MARGIN}" fill="none" '
        'stroke="currentColor"/>',
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 20}" text-anchor="middle" fill="currentColor">'
        "predicted time of a step</text>",
        f'<text x="20" y="{_MARGIN - 20}" fill="currentColor">memory of the fullest device</text>',
    ]
    for seconds in _along(right, 1.0):
        x, _ = at((seconds, 0.0))
        parts.append(
            f'<text x="{x:.1f}" y="{below + 18}" text-anchor="middle" fill="currentColor">'
            f"{human_time(seconds)}</text>"
        )
    for size in _along(top, 1024.0 ** int(math.log(max(top, 1.0), 1024))):
        _, y = at((0.0, size))
        parts.append(
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end" fill="currentColor">'
            f"{human_bytes(size)}</text>"
        )
    parts.append(f'<polyline points="{line}" fill="none" stroke="#0072B2" stroke-width="1.5"/>')
    for i, (point, title) in enumerate(zip(points, titles, strict=True)):
        x, y = at(point)
        colour = "#0072B2" if i in chosen else "#999999"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">'
            f"<title>{escape(title)}</title></circle>"
        )
    row = float(_HEIGHT)
    for number, (i, own) in enumerate(zip(chosen, lines, strict=True), 1):
        x, y = at(points[i])
        parts += [_text(x, y - 8, "middle", f"{number}"), _text(left - 8, row, "end", f"{number}")]
        for each in own:
            parts.append(_text(left, row, "start", each))
            row += _LINE
    return "\n".join([*parts, "</svg>"])


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="11" '
        f'fill="currentColor">{escape(text)}</text>'
    )


def _along(most: float, unit: float) -> list[float]:
    """The numbers along an axis up to ``most``: about five, each a round number of units."""
    step = nice(most / 5 / unit) * unit
    return [step * i for i in range(1, int(most / step * (1 + 1e-9)) + 1)]
