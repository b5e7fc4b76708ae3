"""The drawing of the pipeline graph: a grid with a row for each stage and a column for each
micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import graphviz  # type: ignore[import-untyped]
from torch import fx

from fxpipe import ops
from fxpipe.inspect.draw.picture import (
    CALLER,
    CLUSTER,
    GREY,
    OVAL,
    Line,
    Picture,
    Point,
    label,
    numbers,
    origin,
    skip_lines,
    width_of,
)
from fxpipe.ir.graph import MICROBATCH
from passes.to_pipeline.cells import Cell, cell_of, cells

_COPY = Line("copy")
_USE = Line("value, not copied", arrowhead="empty")
_ORDER = Line("fork to join: its backward comes after", style="dashed", color=GREY, arrowhead="vee")

_NAMED = 3  # an oval that stands for several values names at most so many of them

_End = Cell | str
"""Where a line begins or ends: a cell, or the name of a scatter or gather."""


@dataclass(frozen=True)
class _PipelineLink:
    """A line between two ends. Where it passes rows, it runs in a strip of its own, a "lane",
    beside the cells of a column."""

    tail: _End
    head: _End
    line: Line
    value: str

    @property
    def lane(self) -> tuple[str, str]:
        """The lane in which the line passes cells: lines of the same kind for the same value share
        one."""
        return self.line.meaning, self.value

    @property
    def microbatch(self) -> int:
        cell = self.tail if isinstance(self.tail, tuple) else self.head
        return cell[0] if isinstance(cell, tuple) else 0

    def passed(self, stages: int) -> range:
        """The rows (stages) between the rows of the line's ends."""
        first = self.tail[1] + 1 if isinstance(self.tail, tuple) else 0
        return range(first, self.head[1] if isinstance(self.head, tuple) else stages)


def draw_pipeline(gm: fx.GraphModule, devices: Sequence[str]) -> graphviz.Source:
    """Draw the pipeline graph as a grid: a row for each stage, a column for each micro-batch, and a
    box for each cell.

    All positions are computed here, since no layout of Graphviz is a grid, and since Graphviz would
    lead a line that passes a row around the row's far end.

    Args:
        devices: the names of the devices, one for each stage.
    """
    grid = _PipelineGrid(gm.graph, devices)
    picture = Picture("pipeline", layout="nop2")
    for stage in range(len(devices)):
        _draw_row(picture, grid, stage)
    for name, text in {**grid.scatters, **grid.gathers}.items():
        width, at = f"{_oval_width(text) / 72:.2f}", numbers(*grid.oval(name))
        picture.oval(name, text, pos=at, width=width, fixedsize="true")
    for link in grid.links:
        spot = grid.name_spot(link)
        named = {} if spot is None else {"label": link.value, "lp": numbers(*spot)}
        tail, head = (end if isinstance(end, str) else _cell(end) for end in (link.tail, link.head))
        picture.edge(tail, head, link.line, pos=_route(grid.path(link)), arrowsize="0.7", **named)
    return picture.source(legend_at=grid.below)


def _links(graph: fx.Graph, ovals: Mapping[str, str]) -> Iterator[_PipelineLink]:
    """The lines of the drawing.

    ``ovals``: for each scatter and gather that is drawn together with others, their common oval.
    """
    skipped = [origin(n) for n in graph.nodes if n.target is ops.portal_blue]
    skips = skip_lines(skipped, "skip through a portal:")
    for node in graph.nodes:
        head = _end(node)
        for source in node.all_input_nodes:
            tail = _end(source)
            if head is None or tail is None or head == tail or source.target is ops.scatter:
                continue  # gather only reads the micro-batches' sizes from scatter: no line
            first, last = (_drawn(end, ovals) for end in (tail, head))
            joined = next((end for end in (first, last) if end not in (tail, head)), None)
            value = origin(source) if joined is None else str(joined)
            line = _line(node, tail, head, skips)
            # Values between neighbouring cells are drawn as one line, which has no name.
            yield _PipelineLink(first, last, line, "" if _is_next(first, last) else value)


def _is_next(tail: _End, head: _End) -> bool:
    return isinstance(tail, tuple) and isinstance(head, tuple) and head[1] <= tail[1] + 1


def _drawn(end: _End, ovals: Mapping[str, str]) -> _End:
    return ovals.get(end, end) if isinstance(end, str) else end


def _end(node: fx.Node) -> _End | None:
    if (cell := cell_of(node)) is not None:
        return cell
    if node.target in (ops.scatter, ops.gather):
        return node.name
    source = node.args[0] if node.args and MICROBATCH in node.meta else None
    return _end(source) if isinstance(source, fx.Node) else None


def _line(node: fx.Node, tail: _End, head: _End, skips: Mapping[str, Line]) -> Line:
    if node.target is ops.portal_copy:
        return skips[origin(node)]
    if isinstance(tail, str) or isinstance(head, str):
        return CALLER
    if tail[1] == head[1]:
        return _ORDER
    return _COPY if node.target is ops.copy else _USE


def _cell(cell: Cell) -> str:
    return f"mb {cell[0]} stage {cell[1]}"


class _PipelineGrid:
    """The positions of cells, ovals and lines, in points: x grows from left to right; y is 0 at the
    top and negative below, as Graphviz counts it."""

    width, height = 72.0, 44.0  # the size of a cell
    lane_width = 14.0
    gap = 40.0  # the distance between the cells of one row and of the next
    pad = 9.0  # the margin between the cells of a row and its frame

    def __init__(self, graph: fx.Graph, devices: Sequence[str]) -> None:
        self.cells = cells(graph)
        self.labels = [f"stage {stage} · {device}" for stage, device in enumerate(devices)]
        self.stages = len(devices)
        self.microbatches = 1 + max((microbatch for microbatch, _ in self.cells), default=-1)
        room = self.microbatches * (self.width + 22)  # the least width of all columns together
        called = graph.find_nodes(op="call_function", target=ops.scatter)
        self.scatters, into = _ovals(
            "scatter", {node.name: str(node.args[0]) for node in called}, room
        )
        called = graph.find_nodes(op="call_function", target=ops.gather)
        self.gathers, out_of = _ovals(
            "gather", {node.name: node.name.removesuffix("_out") for node in called}, room
        )
        self.links = list(dict.fromkeys(_links(graph, {**into, **out_of})))
        # The lanes of short lines are next to the cells, so that long lines go around short ones.
        # The lanes of skips are outermost, next to the skips' names.
        long = [link for link in self.links if link.passed(self.stages)]
        long.sort(key=lambda link: (link.line.is_skip, len(link.passed(self.stages))))
        self.lanes = list(dict.fromkeys(link.lane for link in long))
        # The name of a skip is drawn once, in the last column, where there is room beside it.
        last = {link.lane: link for link in long if link.line.is_skip}
        self.named = {link: i for i, link in enumerate(last.values())}

    @property
    def head(self) -> float:
        """The width of the rows' labels, in points."""
        return max(map(width_of, self.labels), default=0) + 30

    @property
    def column(self) -> float:
        """The distance between the columns of adjacent micro-batches, in points."""
        return self.width + 22 + self.lane_width * len(self.lanes)

    @property
    def right(self) -> float:
        """The x coordinate at which the rows end, in points."""
        names = max((width_of(link.value) + 8 for link in self.named), default=0)
        return self.head + self.microbatches * self.column + names

    @property
    def below(self) -> Point:
        """The point (x, y) below everything that has been drawn."""
        return 0, self.y(self.stages) - 30

    def y(self, stage: int) -> float:
        """The y coordinate of the middle of a stage's row, in points. The scatters' ovals are one
        row above the first stage, at ``stage`` -1; the gathers' are one row below the last stage.
        """
        return -(stage + 1) * (self.height + self.gap)

    def centre(self, cell: Cell) -> Point:
        return self.head + cell[0] * self.column + self.width / 2, self.y(cell[1])

    def oval(self, name: str) -> Point:
        stage = -1 if name in self.scatters else self.stages
        names = list(self.scatters if stage < 0 else self.gathers)
        across = self.microbatches * self.column
        return self.head + across * (names.index(name) + 0.5) / len(names), self.y(stage)

    def lane(self, link: _PipelineLink) -> float:
        left = self.centre((link.microbatch, 0))[0] + self.width / 2
        return left + self.lane_width * (self.lanes.index(link.lane) + 1)

    def name_spot(self, link: _PipelineLink) -> Point | None:
        """The point at the middle of a line's name; None if no name is drawn at this line."""
        if link not in self.named:
            return None
        left = self.head + self.microbatches * self.column - 16
        lower = 12 * (self.named[link] % 3 - 1)  # keeps names in one row from covering each other
        middle = self.y(link.passed(self.stages)[0]) - lower
        return left + width_of(link.value) / 2, middle

    def path(self, link: _PipelineLink) -> list[Point]:
        """The points of a line: from the lower edge of one end to the upper edge of the other, or
        along a row."""
        if link.line is _ORDER and isinstance(link.tail, tuple) and isinstance(link.head, tuple):
            (left, y), (right, _) = self.centre(link.tail), self.centre(link.head)
            return [(left + self.width / 2, y), (right - self.width / 2, y)]
        through: list[Point] = []
        if rows := link.passed(self.stages):
            x, reach = self.lane(link), self.height / 2 + self.pad
            through = [(x, self.y(rows[0]) + reach), (x, self.y(rows[-1]) - reach)]
        return [self._edge(link, link.tail, -1), *through, self._edge(link, link.head, 1)]

    def _edge(self, link: _PipelineLink, end: _End, side: int) -> Point:
        if isinstance(end, str):
            x, y = self.oval(end)
            return x, y + side * OVAL / 2
        x, y = self.centre(end)
        return x + self._shift(link), y + side * self.height / 2

    def _shift(self, link: _PipelineLink) -> float:
        """How far to the right of the middle of a cell a line begins or ends, in points. Lines that
        pass rows are on the right, so that they do not meet the others."""
        if link.passed(self.stages):
            share = (self.lanes.index(link.lane) + 1) / (len(self.lanes) + 1)
            return self.width / 2 * share
        for end, ovals in ((link.tail, list(self.scatters)), (link.head, list(self.gathers))):
            if isinstance(end, str):
                return 8 * (ovals.index(end) - (len(ovals) - 1) / 2)
        return 0


def _ovals(
    what: str, values: Mapping[str, str], room: float
) -> tuple[dict[str, str], dict[str, str]]:
    """The texts of the ovals for scatters or gathers, by the ovals' names. Where the width ``room``
    is too small for one oval each, there is one oval for all nodes, and a second dictionary gives
    its name for each node's name."""
    texts = {name: f"{what} {value}" for name, value in values.items()}
    if len(texts) < 2 or sum(_oval_width(text) + 10 for text in texts.values()) <= room:
        return texts, {}
    said = ", ".join(list(values.values())[:_NAMED])
    if len(values) > _NAMED:
        said += f" and {len(values) - _NAMED} more"
    together = f"{what} all"  # no fx node can have this name, since it contains a space
    return {together: f"{what} {said}"}, dict.fromkeys(texts, together)


def _oval_width(text: str) -> float:
    return width_of(text) + 25


def _route(points: Sequence[Point]) -> str:
    """The position of an edge, in Graphviz's format: a spline through all points, which ends early
    enough to leave room for the arrowhead."""
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
    return f"e,{numbers(x, y)} " + " ".join(numbers(*point) for point in spline)


def _draw_row(picture: Picture, grid: _PipelineGrid, stage: int) -> None:
    label, y, reach = grid.labels[stage], grid.y(stage), grid.height / 2 + grid.pad
    with picture.dot.subgraph(name=f"cluster_stage_{stage}") as cluster:
        cluster.attr(
            label=graphviz.escape(label),
            lp=numbers(grid.head / 2 - 4, y),
            bb=numbers(0, y - reach, grid.right, y + reach),
            **CLUSTER,
        )
        for cell, nodes in sorted(grid.cells.items()):
            if cell[1] == stage:
                _draw_cell(cluster, grid, cell, nodes)


def _draw_cell(
    dot: graphviz.Digraph, grid: _PipelineGrid, cell: Cell, nodes: Sequence[fx.Node]
) -> None:
    targets = [node.target for node in nodes]
    known = ops.checkpoint, ops.selective, ops.offloaded, ops.recompute
    marks = [op.__name__ for op in known if op in targets]
    dot.node(
        _cell(cell),
        label(f"mb {cell[0]}", *marks),
        style="rounded,filled",
        fillcolor="#E4E4E4" if marks else "white",
        pos=numbers(*grid.centre(cell)),
        width=f"{grid.width / 72:.3f}",
        height=f"{grid.height / 72:.3f}",
        fixedsize="true",
    )
