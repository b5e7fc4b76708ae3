"""Drawings of graphs of every level, as Graphviz source: the model, its stages, the pipeline.

::

    draw_model      a box a node                         what was traced, and where it was cut
    draw_stages     a box a stage                        who sends what to whom
    draw_pipeline   a box a cell (micro-batch, stage)    what runs, and what waits for what

The same graph gives the same source. Lines differ by width and dashes as well as by colour (those
of Okabe and Ito), so that they can be told apart in print and by the colour-blind.
"""

from __future__ import annotations

import html
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import graphviz  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxpipe import ops
from fxpipe.graph import (
    MICROBATCH,
    ORIGIN,
    VALUE,
    Cost,
    operator_name,
    tensor_bytes,
)
from fxpipe.inspect.text import human_bytes, human_time
from passes.cells import Cell, cell_of, cells
from passes.skips import routes, stage_of

SKIP_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_SKIP_STYLES = ("solid", "dashed", "dotted")
_GREY = "#777777"
_PALE = "#BBBBBB"
_CLUSTER = {"style": "rounded,filled", "color": _PALE, "fillcolor": "#F6F6F6", "labeljust": "l"}
_Point = tuple[float, float]

_THICK = "3.5"  # of skips, and nothing else
_STRAIGHT = "10"  # the weight of edges that should be straight
_INVISIBLE = {"style": "invis"}

# ------------------------------------------------------------------------------------------- lines


@dataclass(frozen=True)
class _Line:
    """How an edge is drawn, and what that means."""

    meaning: str
    style: str = "solid"
    color: str = "black"
    penwidth: str = "1"
    arrowhead: str = "normal"

    @property
    def is_skip(self) -> bool:
        return self.penwidth == _THICK

    @property
    def attributes(self) -> dict[str, str]:
        return {
            "style": self.style,
            "color": self.color,
            "fontcolor": self.color,
            "penwidth": self.penwidth,
            "arrowhead": self.arrowhead,
        }


_DATA = _Line("value")
_MODEL_SKIP = _Line("value that passes over stages", color=SKIP_COLOURS[0], penwidth=_THICK)
_NEXT = _Line("value for the next stage")
_CALLER = _Line("from and to the caller", style="dotted", arrowhead="vee")
_COPY = _Line("copy")
_USE = _Line("value, not copied", arrowhead="empty")
_ORDER = _Line(
    "fork to join: its backward comes after", style="dashed", color=_GREY, arrowhead="vee"
)


def _skip_lines(names: Sequence[str], what: str) -> dict[str, _Line]:
    """A line for each skip value: its own colour and, with the next ones, its own dashes."""
    lines: dict[str, _Line] = {}
    for name in dict.fromkeys(names):
        i = len(lines)
        lines[name] = _Line(
            f"{what} {name}",
            style=_SKIP_STYLES[i % len(_SKIP_STYLES)],
            color=SKIP_COLOURS[i % len(SKIP_COLOURS)],
            penwidth=_THICK,
        )
    return lines


class _Picture:
    """A drawing in the making, which remembers the lines that its legend has to explain."""

    def __init__(self, name: str, **attributes: str) -> None:
        self.dot = graphviz.Digraph(name)
        self.dot.attr("graph", fontname="Helvetica", fontsize="11", **attributes)
        self.dot.attr("node", fontname="Helvetica", fontsize="10", shape="box", style="rounded")
        # Where there is no Helvetica, a wider font is taken: leave room for it.
        self.dot.attr("node", margin="0.25,0.08")
        self.dot.attr("edge", fontname="Helvetica", fontsize="9")
        self.lines: dict[_Line, None] = {}
        self.joined: set[tuple[str, str]] = set()

    def oval(self, name: str, label: str, **more: str) -> None:
        text = graphviz.escape(label)
        self.dot.node(name, text, shape="oval", style="solid", height="0.3", **more)

    def edge(self, tail: str, head: str, line: _Line, **more: str) -> None:
        self.lines.setdefault(line)
        self.joined.add((tail, head))
        self.dot.edge(tail, head, **{**line.attributes, **more})

    def order(self, tail: str, head: str, **more: str) -> None:
        """Keep one before the other, without a line, unless a line does so."""
        if (tail, head) not in self.joined:
            self.dot.edge(tail, head, **_INVISIBLE, **more)

    def source(self, legend_at: _Point | None = None) -> graphviz.Source:
        """The whole, with a legend: its upper left corner there, or else beside all."""
        if self.lines:
            with self.dot.subgraph(name="cluster_legend") as legend:
                legend.attr(label="legend", style="rounded", color=_PALE)
                place = {}
                if legend_at is not None:
                    place = _place_legend(legend, self.lines, legend_at)
                legend.node(_LEGEND, _legend(self.lines), shape="plaintext", **place)
        return graphviz.Source(self.dot.source)


_ROOM = "&#160;" * 6
_LEGEND = "the legend"  # with a space, as no fx node is named


def _place_legend(
    legend: graphviz.Digraph, lines: Iterable[_Line], corner: _Point
) -> dict[str, str]:
    (left, top), meanings = corner, [line.meaning for line in lines]
    width, height = 80 + max(map(_width, meanings)), 30 + 24 * len(meanings)
    middle = left + width / 2
    legend.attr(bb=_numbers(left, top - height, left + width, top), lp=_numbers(middle, top - 12))
    return {"pos": _numbers(middle, top - 10 - height / 2)}


def _legend(lines: Iterable[_Line]) -> str:
    """A table, which stays together wherever the layout puts it: samples, and what they mean."""
    rows = "".join(map(_legend_row, lines))
    return f'<<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="3">{rows}</TABLE>>'


def _legend_row(line: _Line) -> str:
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


def _label(*lines: str) -> str:
    return r"\n".join(graphviz.escape(line) for line in lines if line)


def _numbers(*values: float) -> str:
    return ",".join(f"{value:g}" for value in values)


def _width(text: str) -> float:
    """About how many points wide it is."""
    return 5.2 * len(text)


def _type_text(value: Any) -> str:
    """``float32 [4, 3]``; one for each tensor of a value that has several."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return ", ".join(
        f"{str(t.dtype).removeprefix('torch.')} [{', '.join(map(str, t.shape))}]" for t in tensors
    )


def _value_text(node: fx.Node) -> str:
    """The name of a value, what it is, and its size."""
    value = node.meta.get(VALUE)
    lines = [_origin(node), _type_text(value)]
    if size := tensor_bytes(value):
        lines.append(human_bytes(size))
    # Left-justified and indented, or the text would touch its line.
    return "".join(f"  {graphviz.escape(line)}      " + r"\l" for line in lines if line)


def _origin(node: fx.Node) -> str:
    return str(node.meta.get(ORIGIN, node.name))


# ------------------------------------------------------------------------------------------- model


def draw_model(gm: fx.GraphModule) -> graphviz.Source:
    """The traced model, a box a node: its name, what it calls, and the shape that it gives.

    Where nodes have stages, each stage is a cluster, and values that pass over stages stand out.
    """
    picture = _Picture("model", nodesep="0.25", ranksep="0.35")
    clusters: dict[int | None, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        clusters.setdefault(_home(node), []).append(node)
    for stage, nodes in sorted(
        clusters.items(), key=lambda item: -1 if item[0] is None else item[0]
    ):
        if stage is None:
            for node in nodes:
                _draw_node(picture.dot, node)
            continue
        with picture.dot.subgraph(name=f"cluster_stage_{stage}") as cluster:
            cluster.attr(label=f"stage {stage}", **_CLUSTER)
            for node in nodes:
                _draw_node(cluster, node)
    for node in gm.graph.nodes:
        for source in node.all_input_nodes:
            _draw_use(picture, source, node)
    return picture.source()


def _home(node: fx.Node) -> int | None:
    """The stage that a node is drawn in; a parameter's is its first user's."""
    stage = stage_of(node)
    if stage is None and node.op == "get_attr":
        stages = [s for user in node.users if (s := stage_of(user)) is not None]
        return min(stages, default=None)
    return stage


def _draw_node(dot: graphviz.Digraph, node: fx.Node) -> None:
    shape = _type_text(node.meta.get(VALUE))
    if node.op in ("placeholder", "output"):
        dot.node(node.name, _label(node.name, shape), shape="oval", style="solid")
    elif node.op == "get_attr":
        small = {"fontsize": "7", "height": "0.2", "margin": "0.05,0.02"}
        dot.node(node.name, _label(str(node.target)), style="dotted", **small)
    else:
        called = operator_name(node)
        text = _label(node.name, "" if called == node.name else called, shape)
        dot.node(node.name, text, style="rounded,filled", fillcolor="white")


def _draw_use(picture: _Picture, source: fx.Node, user: fx.Node) -> None:
    tail, head = stage_of(source), stage_of(user)
    if tail is not None and head is not None and head > tail + 1:
        picture.edge(source.name, user.name, _MODEL_SKIP, weight="0")
    else:
        picture.edge(source.name, user.name, _DATA)


# ------------------------------------------------------------------------------------------ stages


def draw_stages(
    gm: fx.GraphModule, devices: Sequence[str], costs: Sequence[Cost]
) -> graphviz.Source:
    """The stage graph, a box a stage, and the values that go from one to another.

    Args:
        devices: one for each stage.
        costs: one for each stage, for a whole mini-batch.
    """
    # Ranks of their own in each cluster would tear apart stages that take turns on two devices.
    picture = _Picture("stages", nodesep="0.6", ranksep="0.5", newrank="true")
    for device in dict.fromkeys(devices):
        with picture.dot.subgraph(name=f"cluster_device_{device}") as cluster:
            cluster.attr(label=graphviz.escape(device), margin="14", **_CLUSTER)
            for stage, cost in enumerate(costs):
                if devices[stage] == device:
                    _draw_stage(cluster, stage, device, cost)
    for node in gm.graph.find_nodes(op="placeholder"):
        picture.oval(node.name, node.name)
    _draw_hops(picture, gm.graph)
    _draw_results(picture, gm.graph)
    for stage in range(1, len(costs)):
        picture.order(_stage(stage - 1), _stage(stage))
    return picture.source()


def _stage(index: int) -> str:
    return f"stage {index}"


def _draw_stage(dot: graphviz.Digraph, stage: int, device: str, cost: Cost) -> None:
    text = _label(
        f"stage {stage} · {device}",
        f"parameters {human_bytes(cost.param_bytes)}",
        f"forward {human_time(cost.forward_s)}, backward {human_time(cost.backward_s)}",
    )
    dot.node(_stage(stage), text, style="rounded,filled", fillcolor="white", group="stages")


def _draw_hops(picture: _Picture, graph: fx.Graph) -> None:
    hops = [
        (value, source, target)
        for value, stages in routes(graph)
        for source, target in pairwise(stages)
    ]
    skips = _skip_lines([_origin(v) for v, s, t in hops if _is_skip(s, t)], "long skip:")
    for value, source, target in hops:
        tail = value.name if source is None else _stage(source)
        line = _CALLER if source is None else _NEXT
        if _is_skip(source, target):
            line = skips[_origin(value)]
        weight = "0" if line.is_skip else _STRAIGHT
        picture.edge(tail, _stage(target or 0), line, label=_value_text(value), weight=weight)


def _is_skip(source: int | None, target: int | None) -> bool:
    return source is not None and target is not None and target > source + 1


def _draw_results(picture: _Picture, graph: fx.Graph) -> None:
    output = graph.output_node()
    picture.oval(output.name, output.name)
    for value in output.all_input_nodes:
        stage = stage_of(value)
        tail = value.name if stage is None else _stage(stage)
        if value.op == "get_attr":
            _draw_node(picture.dot, value)
        picture.edge(tail, output.name, _CALLER, label=_value_text(value))


# ---------------------------------------------------------------------------------------- pipeline

_End = Cell | str
"""Where a line begins or ends: a cell, or the name of a scatter or gather."""


@dataclass(frozen=True)
class _Link:
    """A line of the grid. It passes rows in a lane of its own, beside the cells of a column."""

    tail: _End
    head: _End
    line: _Line
    value: str

    @property
    def lane(self) -> tuple[str, str]:
        """One for each value; but where that passes in two ways, one for each."""
        return self.line.meaning, self.value

    @property
    def microbatch(self) -> int:
        cell = self.tail if isinstance(self.tail, tuple) else self.head
        return cell[0] if isinstance(cell, tuple) else 0

    def passed(self, stages: int) -> range:
        """The rows between its ends."""
        first = self.tail[1] + 1 if isinstance(self.tail, tuple) else 0
        return range(first, self.head[1] if isinstance(self.head, tuple) else stages)


def draw_pipeline(gm: fx.GraphModule, devices: Sequence[str]) -> graphviz.Source:
    """The pipeline graph as a grid: a row a stage, a column a micro-batch, a box a cell.

    Every position is given, as the layouts that Graphviz finds by itself are no grids: lines that
    pass a row would be led around the outside of it.

    Args:
        devices: one for each stage.
    """
    links = list(dict.fromkeys(_links(gm.graph)))
    grid = _Grid(gm.graph, devices, links)
    picture = _Picture("pipeline", layout="nop2")
    for stage in range(len(devices)):
        _draw_row(picture, grid, stage)
    for name, text in {**grid.scatters, **grid.gathers}.items():
        width = f"{_width(text) / 72 + 0.35:.2f}"
        picture.oval(name, text, pos=_numbers(*grid.oval(name)), width=width)
    for link in links:
        spot = grid.name_spot(link)
        named = {} if spot is None else {"label": link.value, "lp": _numbers(*spot)}
        tail, head = (end if isinstance(end, str) else _cell(end) for end in (link.tail, link.head))
        picture.edge(tail, head, link.line, pos=_route(grid.path(link)), arrowsize="0.7", **named)
    return picture.source(legend_at=grid.below)


def _links(graph: fx.Graph) -> Iterator[_Link]:
    skipped = [_origin(n) for n in graph.nodes if n.target is ops.portal_blue]
    skips = _skip_lines(skipped, "skip through a portal:")
    for node in graph.nodes:
        head = _end(node)
        for source in node.all_input_nodes:
            tail = _end(source)
            if head is None or tail is None or head == tail or source.target is ops.scatter:
                continue  # what gather asks of scatter is only how large the parts are
            yield _Link(tail, head, _line(node, tail, head, skips), _origin(source))


def _end(node: fx.Node) -> _End | None:
    if (cell := cell_of(node)) is not None:
        return cell
    if node.target in (ops.scatter, ops.gather):
        return node.name
    source = node.args[0] if node.args and MICROBATCH in node.meta else None
    return _end(source) if isinstance(source, fx.Node) else None


def _line(node: fx.Node, tail: _End, head: _End, skips: Mapping[str, _Line]) -> _Line:
    if node.target is ops.portal_copy:
        return skips[_origin(node)]
    if isinstance(tail, str) or isinstance(head, str):
        return _CALLER
    if tail[1] == head[1]:
        return _ORDER
    return _COPY if node.target is ops.copy else _USE


def _cell(cell: Cell) -> str:
    return f"mb {cell[0]} stage {cell[1]}"


class _Grid:
    """Where things are, in points: x from left to right, y from the top down, below zero."""

    width, height = 72.0, 44.0  # of a cell
    lane_width = 14.0
    gap = 40.0  # between the cells of one row and of the next
    pad = 9.0  # around the cells of a row

    def __init__(self, graph: fx.Graph, devices: Sequence[str], links: Sequence[_Link]) -> None:
        self.cells = cells(graph)
        self.labels = [f"stage {stage} · {device}" for stage, device in enumerate(devices)]
        self.stages = len(devices)
        self.microbatches = 1 + max((microbatch for microbatch, _ in self.cells), default=-1)
        self.scatters = {
            node.name: f"scatter {node.args[0]}"
            for node in graph.find_nodes(op="call_function", target=ops.scatter)
        }
        self.gathers = {
            node.name: f"gather {node.name.removesuffix('_out')}"
            for node in graph.find_nodes(op="call_function", target=ops.gather)
        }
        # Short ones first, so that long ones go around them; skips last, beside their names.
        long = [link for link in links if link.passed(self.stages)]
        long.sort(key=lambda link: (link.line.is_skip, len(link.passed(self.stages))))
        self.lanes = list(dict.fromkeys(link.lane for link in long))
        # A skip says its name once: in the last column, where there is room beside it.
        last = {link.lane: link for link in long if link.line.is_skip}
        self.named = {link: i for i, link in enumerate(last.values())}

    @property
    def head(self) -> float:
        """The width of the rows' labels."""
        return max(map(_width, self.labels), default=0) + 30

    @property
    def column(self) -> float:
        """From one micro-batch to the next."""
        return self.width + 22 + self.lane_width * len(self.lanes)

    @property
    def right(self) -> float:
        """Where the rows end."""
        names = max((_width(link.value) + 8 for link in self.named), default=0)
        return self.head + self.microbatches * self.column + names

    @property
    def below(self) -> _Point:
        """Where there is room below all."""
        return 0, self.y(self.stages) - 30

    def y(self, stage: int) -> float:
        """The middle of a row; those before the first and after the last are the ovals'."""
        return -(stage + 1) * (self.height + self.gap)

    def centre(self, cell: Cell) -> _Point:
        return self.head + cell[0] * self.column + self.width / 2, self.y(cell[1])

    def oval(self, name: str) -> _Point:
        stage = -1 if name in self.scatters else self.stages
        names = list(self.scatters if stage < 0 else self.gathers)
        across = self.microbatches * self.column
        return self.head + across * (names.index(name) + 0.5) / len(names), self.y(stage)

    def lane(self, link: _Link) -> float:
        left = self.centre((link.microbatch, 0))[0] + self.width / 2
        return left + self.lane_width * (self.lanes.index(link.lane) + 1)

    def name_spot(self, link: _Link) -> _Point | None:
        """The middle of its name, if this is the line that says it."""
        if link not in self.named:
            return None
        left = self.head + self.microbatches * self.column - 16
        lower = 12 * (self.named[link] % 3 - 1)  # or else names in one row would be one on another
        middle = self.y(link.passed(self.stages)[0]) - lower
        return left + _width(link.value) / 2, middle

    def path(self, link: _Link) -> list[_Point]:
        """From the lower edge of one thing to the upper of another, or along a row."""
        if link.line is _ORDER and isinstance(link.tail, tuple) and isinstance(link.head, tuple):
            (left, y), (right, _) = self.centre(link.tail), self.centre(link.head)
            return [(left + self.width / 2, y), (right - self.width / 2, y)]
        through: list[_Point] = []
        if rows := link.passed(self.stages):
            x, reach = self.lane(link), self.height / 2 + self.pad
            through = [(x, self.y(rows[0]) + reach), (x, self.y(rows[-1]) - reach)]
        return [self._edge(link, link.tail, -1), *through, self._edge(link, link.head, 1)]

    def _edge(self, link: _Link, end: _End, side: int) -> _Point:
        if isinstance(end, str):
            x, y = self.oval(end)
            return x, y + side * 11
        x, y = self.centre(end)
        return x + self._shift(link), y + side * self.height / 2

    def _shift(self, link: _Link) -> float:
        """Lines to or from one cell do not meet: those to lanes are on the right."""
        if link.passed(self.stages):
            share = (self.lanes.index(link.lane) + 1) / (len(self.lanes) + 1)
            return self.width / 2 * share
        for end, ovals in ((link.tail, list(self.scatters)), (link.head, list(self.gathers))):
            if isinstance(end, str):
                return 8 * (ovals.index(end) - (len(ovals) - 1) / 2)
        return 0


def _route(points: Sequence[_Point]) -> str:
    """Through all points, as the spline of an edge; it leaves room for its arrowhead."""
    x, y = points[-1]
    is_level = points[-2][1] == y
    neck = (x - 7, y) if is_level else (x, y + 7)
    path = [*points[:-1], neck]
    spline = [path[0]]
    for (x0, y0), (x1, y1) in pairwise(path):
        middle_x, middle_y = (x0 + x1) / 2, (y0 + y1) / 2
        if is_level:
            spline += [(middle_x, y0), (middle_x, y1), (x1, y1)]
        else:
            spline += [(x0, middle_y), (x1, middle_y), (x1, y1)]
    return f"e,{_numbers(x, y)} " + " ".join(_numbers(*point) for point in spline)


def _draw_row(picture: _Picture, grid: _Grid, stage: int) -> None:
    label, y, reach = grid.labels[stage], grid.y(stage), grid.height / 2 + grid.pad
    with picture.dot.subgraph(name=f"cluster_stage_{stage}") as cluster:
        cluster.attr(
            label=graphviz.escape(label),
            lp=_numbers(grid.head / 2 - 4, y),
            bb=_numbers(0, y - reach, grid.right, y + reach),
            **_CLUSTER,
        )
        for cell, nodes in sorted(grid.cells.items()):
            if cell[1] == stage:
                _draw_cell(cluster, grid, cell, nodes)


def _draw_cell(dot: graphviz.Digraph, grid: _Grid, cell: Cell, nodes: Sequence[fx.Node]) -> None:
    targets = [node.target for node in nodes]
    marks = [op.__name__ for op in (ops.checkpoint, ops.recompute) if op in targets]
    dot.node(
        _cell(cell),
        _label(f"mb {cell[0]}", *marks),
        style="rounded,filled",
        fillcolor="#E4E4E4" if marks else "white",
        pos=_numbers(*grid.centre(cell)),
        width=f"{grid.width / 72:.3f}",
        height=f"{grid.height / 72:.3f}",
        fixedsize="true",
    )


# -------------------------------------------------------------------------------------------- SVG


def render_svg(source: graphviz.Source) -> str:
    """The drawing as SVG, laid out by Graphviz, or else by ``graphviz-pure``."""
    program = _program()
    command = [program, f"-K{source.engine}", "-Tsvg"]
    done = subprocess.run(command, input=source.source, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise RuntimeError(f"{program} could not lay out the drawing: {done.stderr.strip()}")
    svg: str = done.stdout
    return svg


def _program() -> str:
    # The wheel's program lies beside Python's own, which is not on PATH if nobody put it there.
    beside = sysconfig.get_path("scripts")
    program = (
        shutil.which("dot")
        or shutil.which("graphviz-pure")
        or shutil.which("graphviz-pure", path=beside)
    )
    if program is None:
        raise RuntimeError(
            "no program lays out drawings here: install Graphviz, or `pip install graphviz-pure`"
        )
    return program
