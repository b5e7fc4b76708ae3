"""Tools that all drawings share: lines and their legend, colours, and the text of values."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import graphviz  # type: ignore[import-untyped]
import torch
from torch import fx

from fxpipe import ops
from fxpipe.inspect.draw.svg import Drawing
from fxpipe.ir._torch import pytree
from fxpipe.ir.graph import ORIGIN, VALUE
from fxpipe.ir.tensors import tensor_bytes
from fxpipe.ir.text import human_bytes

SKIP_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_SKIP_STYLES = ("solid", "dashed", "dotted")
GREY = "#777777"
PALE = "#BBBBBB"
CLUSTER = {"style": "rounded,filled", "color": PALE, "fillcolor": "#F6F6F6", "labeljust": "l"}
Point = tuple[float, float]

OVAL = 26.0  # the height of an oval with one line
THICK = "3.5"  # the width of lines for skips, and of no other lines
STRAIGHT = "10"  # the weight that makes Graphviz draw an edge straight
_INVISIBLE = {"style": "invis"}

# ------------------------------------------------------------------------------------------- lines


@dataclass(frozen=True)
class Line:
    """A kind of edge: how it is drawn, and its meaning, which the legend explains. ``skip`` is the
    name of the value, of a line that is for one skip."""

    meaning: str
    style: str = "solid"
    color: str = "black"
    penwidth: str = "1"
    arrowhead: str = "normal"
    skip: str = ""

    @property
    def is_skip(self) -> bool:
        return self.penwidth == THICK

    @property
    def attributes(self) -> dict[str, str]:
        named = {"class": f"skip-{self.skip}"} if self.skip else {}
        return named | {
            "style": self.style,
            "color": self.color,
            "fontcolor": self.color,
            "penwidth": self.penwidth,
            "arrowhead": self.arrowhead,
        }


DATA = Line("value")
CALLER = Line("from and to the caller", style="dotted", arrowhead="vee")


def skip_lines(names: Sequence[str], what: str) -> dict[str, Line]:
    """A kind of line for each skip value; the lines of values that follow each other differ by
    colour and dashes. The legend explains a line as ``what`` and the value's name."""
    lines: dict[str, Line] = {}
    for name in dict.fromkeys(names):
        i = len(lines)
        lines[name] = Line(
            f"{what} {name}",
            style=_SKIP_STYLES[i % len(_SKIP_STYLES)],
            color=SKIP_COLOURS[i % len(SKIP_COLOURS)],
            penwidth=THICK,
            skip=name,
        )
    return lines


class Picture:
    """Builds a drawing, and remembers which kinds of lines its legend has to explain."""

    def __init__(self, name: str, **attributes: str) -> None:
        self.dot = graphviz.Digraph(name)
        self.dot.attr("graph", fontname="Helvetica", fontsize="11", **attributes)
        self.dot.attr("node", fontname="Helvetica", fontsize="10", shape="box", style="rounded")
        # A viewer that has no Helvetica may take a wider font: the margin leaves room for it.
        self.dot.attr("node", margin="0.25,0.08")
        self.dot.attr("edge", fontname="Helvetica", fontsize="9")
        self.lines: dict[Line, None] = {}
        self.joined: set[tuple[str, str]] = set()
        self.notes: list[str] = []

    def oval(self, name: str, *lines: str, **more: str) -> None:
        text = label(*several(lines))
        self.dot.node(name, text, shape="oval", style="solid", height=f"{OVAL / 72:.3f}", **more)

    def edge(self, tail: str, head: str, line: Line, **more: str) -> None:
        self.lines.setdefault(line)
        self.joined.add((tail, head))
        self.dot.edge(tail, head, **{**line.attributes, **more})

    def order(self, tail: str, head: str, **more: str) -> None:
        """Make the layout draw ``tail`` ahead of ``head``, by an invisible edge, unless there is an
        edge between them already."""
        if (tail, head) not in self.joined:
            self.dot.edge(tail, head, **_INVISIBLE, **more)

    def source(self, legend_at: Point | None = None) -> graphviz.Source:
        """The finished drawing with its legend, whose upper left corner is at ``legend_at``, if
        given."""
        if self.lines or self.notes:
            with self.dot.subgraph(name="cluster_legend") as legend:
                legend.attr(label="legend", style="rounded", color=PALE)
                place = {}
                if legend_at is not None:
                    place = _place_legend(legend, self.lines, self.notes, legend_at)
                legend.node(_LEGEND, _legend(self.lines, self.notes), shape="plaintext", **place)
        return Drawing(self.dot.source)


_ROOM = "&#160;" * 6
_LEGEND = "the legend"  # no fx node can have this name, since it contains a space


def _place_legend(
    legend: graphviz.Digraph, lines: Iterable[Line], notes: Iterable[str], corner: Point
) -> dict[str, str]:
    (left, top), meanings = corner, [*(line.meaning for line in lines), *notes]
    width, height = 80 + max(map(width_of, meanings)), 30 + 24 * len(meanings)
    middle = left + width / 2
    legend.attr(bb=numbers(left, top - height, left + width, top), lp=numbers(middle, top - 12))
    return {"pos": numbers(middle, top - 10 - height / 2)}


def _legend(lines: Iterable[Line], notes: Iterable[str]) -> str:
    """The legend as one HTML-like table of sample lines and their meanings; Graphviz keeps a table
    together wherever it is put."""
    said = [
        f'<TR><TD COLSPAN="2" ALIGN="LEFT">{html.escape(note)}{_ROOM}</TD></TR>' for note in notes
    ]
    rows = "".join([*map(_legend_row, lines), *said])
    return f'<<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="3">{rows}</TABLE>>'


def _legend_row(line: Line) -> str:
    style = "" if line.style == "solid" else f' STYLE="{line.style}"'
    width = max(1, round(float(line.penwidth)))
    # The sample is the border between two half rows, so that it is level with its text.
    return (
        f'<TR><TD WIDTH="50" HEIGHT="10" SIDES="B" BORDER="{width}" '
        f'COLOR="{line.color}"{style}></TD>'
        f'<TD ROWSPAN="2" ALIGN="LEFT">{html.escape(line.meaning)}{_ROOM}</TD></TR>'
        f'<TR><TD WIDTH="50" HEIGHT="10"></TD></TR>'
    )


# -------------------------------------------------------------------------------------------- text


def label(*lines: str) -> str:
    return r"\n".join(graphviz.escape(line) for line in lines if line)


NAMED = 3  # so many names of a long list are written out


def several(names: Sequence[str]) -> list[str]:
    """The first of many names, and how many more there are."""
    if len(names) <= NAMED + 1:
        return list(names)
    return [*names[:NAMED], f"and {len(names) - NAMED} more"]


def numbers(*values: float) -> str:
    return ",".join(f"{value:g}" for value in values)


def width_of(text: str) -> float:
    """The approximate width of a text, in points."""
    return 5.2 * len(text)


def type_text(value: Any) -> str:
    """``float32 [4, 3]``; one for each tensor of a value that has several."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return ", ".join(
        f"{str(t.dtype).removeprefix('torch.')} [{', '.join(map(str, t.shape))}]" for t in tensors
    )


def _numbers_text(value: Any) -> str:
    """``number`` for a length, ``3 numbers`` for a shape; "" for what is none."""
    parts = pytree.tree_leaves(value)
    kinds = int, float, torch.SymInt, torch.SymFloat
    if not parts or not all(isinstance(each, kinds) for each in parts):
        return ""
    return "number" if len(parts) == 1 else f"{len(parts)} numbers"


def value_text(node: fx.Node) -> str:
    """The name of a value, what it is, and its size."""
    value = node.meta.get(VALUE)
    lines = [origin(node), type_text(value) or _numbers_text(value)]
    if size := tensor_bytes(value):
        lines.append(human_bytes(size))
    return lines_text(lines)


def lines_text(lines: Iterable[str]) -> str:
    """The label of an edge, as Graphviz source: left-justified and indented, since it would touch
    the edge otherwise."""
    return "".join(f"  {graphviz.escape(line)}      " + r"\l" for line in lines if line)


def sources_of(node: fx.Node) -> list[fx.Node]:
    """The inputs of a node to which lines are drawn. A loss takes the tapes of all stages too, to
    which no lines are drawn."""
    if node.target is not ops.loss:
        return node.all_input_nodes
    tapes = node.args[4]
    return [source for source in node.all_input_nodes if source not in tapes]  # type: ignore[operator]


def origin(node: fx.Node) -> str:
    return str(node.meta.get(ORIGIN, node.name))


def polyline(points: Sequence[Point]) -> str:
    """The position of an edge, in Graphviz's format, that runs straight from point to point; it
    ends early enough to leave room for the arrowhead."""
    (x0, y0), (x, y) = points[-2], points[-1]
    length = abs(x - x0) + abs(y - y0) or 1
    neck = x - 6 * (x - x0) / length, y - 6 * (y - y0) / length
    path = [*points[:-1], neck]
    spline = [path[0]]
    for start, end in pairwise(path):
        spline += [start, end, end]
    return f"e,{numbers(x, y)} " + " ".join(numbers(*point) for point in spline)
