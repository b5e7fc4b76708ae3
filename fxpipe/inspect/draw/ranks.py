"""Drawings of the programs of ranks: of one rank by itself, and of all ranks with their transfers.

::

    draw_ranks    a row for each rank, and a line for each transfer from rank to rank
    draw_rank     one rank: its nodes in the order in which it runs them; above them what arrives
                  from each other rank, below them what it sends
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import graphviz  # type: ignore[import-untyped]
from torch import fx

from fxpipe import ops
from fxpipe.inspect.draw.picture import (
    CLUSTER,
    Line,
    Picture,
    Point,
    numbers,
    origin,
    polyline,
    sources_of,
    width_of,
)
from fxpipe.inspect.draw.step import FILL, MEANING, actions_of
from fxpipe.ir.graph import CARRIED, STAGE
from fxpipe.schedule import Action, Kind
from passes.to_rank.project import edge_of, transfers_of

_VALUES = Line("values, to the rank of another stage")
_GRADIENTS = Line("gradients", style="dashed")
_OTHERS = Line(
    "once in a step: seeds, shared weights and their gradients, the loss", style="dotted"
)
_SMALL = 15.0  # the size of the circle of a transfer, in points
_OTHER = "#E8E8E8"
# What is drawn beside actions, by its operator: the text in the box, and what it means.
_BESIDE: dict[Callable[..., Any], tuple[str, str]] = {
    ops.unshard: ("gather", "gather: collects the parameters of a stage from the replicas' shards"),
    ops.reduce: ("sum", "sum: adds up the gradients of a stage over all replicas"),
    ops.reduce_scatter: ("scatter", "scatter: adds them up, each replica those of its shards"),
    ops.reshard: ("free", "free: keeps shards of the parameters only"),
    ops.optimize: ("step", "step: the optimizer steps the parameters of a stage"),
}


def draw_ranks(graphs: Sequence[fx.GraphModule]) -> graphviz.Source:
    """Draw the graphs of all ranks, in the order of the ranks: a row for each, with a box for each
    action, in the first column in which all is there that it needs. A line is a transfer. Its
    number counts the transfers between these two ranks in this direction; the tooltip of both says
    the dtypes and shapes that it carries.
    """
    receives = (gm.graph.find_nodes(op="call_function", target=ops.receive) for gm in graphs)
    tips = {edge_of(node): _tip(node) for nodes in receives for node in nodes}
    programs = [_RankBoxes(gm, rank) for rank, gm in enumerate(graphs)]
    heads = {key: box for each in programs for key, box in each.heads.items()}
    links = [
        _RankLink(tail, heads[key], line, str(key[1]), tips[key])
        for each in programs
        for key, (tail, line) in each.tails.items()
    ]
    board = _RankGrid([_RankRow(each.label, each.boxes) for each in programs], links)
    board.place_by_needs()
    return board.drawn("ranks", _notes(programs))


def draw_rank(gm: fx.GraphModule, rank: int) -> graphviz.Source:
    """Draw the graph of one rank: its actions, and what it receives and sends, in the order in
    which the rank comes to them. A circle is a transfer; its number counts those between the two
    ranks in this direction; the tooltip says the dtypes and shapes that it carries. A transfer
    begins at its circle, and an action waits for the ones that it needs."""
    program = _RankBoxes(gm, rank)
    above: dict[int, list[_RankBox]] = {}
    below: dict[int, list[_RankBox]] = {}
    links = []
    for node in transfers_of(gm):
        edge, number = edge_of(node)
        name = f"edge_{edge[0]}_{edge[1]}_{number}"
        box = _RankBox(name, str(number), "white", _tip(node))
        program.order[box] = program.places[node]
        (below if edge[0] == rank else above).setdefault(sum(edge) - rank, []).append(box)
        if edge[0] == rank:
            tail, line = program.tails[edge, number]
            links.append(_RankLink(tail, box, line))
        else:
            line = program.arriving[edge, number]
            links.append(_RankLink(box, program.heads[edge, number], line))
    rows = [
        *(_RankRow(f"from rank {other}", above[other], is_thin=True) for other in sorted(above)),
        _RankRow(program.label, program.boxes),
        *(_RankRow(f"to rank {other}", below[other], is_thin=True) for other in sorted(below)),
    ]
    board = _RankGrid(rows, links)
    board.place_in_order(program.order)
    return board.drawn("rank", _notes([program]))


def _tip(node: fx.Node) -> str:
    """What a node carries that transmits or receives."""
    return f"{node.name}: {node.meta.get(CARRIED) or 'what it carries follows from values'}"


@dataclass(frozen=True, eq=False)
class _RankBox:
    """A box of a rank's row, or the circle of a transfer."""

    name: str
    text: str
    fill: str
    tip: str = ""
    kind: Kind | None = None  # of the action; None if it is none


@dataclass(frozen=True)
class _RankLink:
    """A line; ``note`` is written at its head, and ``tip`` is the tooltip of both."""

    tail: _RankBox
    head: _RankBox
    line: Line
    note: str = ""
    tip: str = ""


@dataclass
class _RankRow:
    """A row of boxes, in order. A thin row has circles."""

    label: str
    boxes: list[_RankBox]
    is_thin: bool = False


Transfer = tuple[tuple[int, int], int]  # the edge, and the number of the transfer on it


class _RankBoxes:
    """The boxes of one rank's graph, and where transfers begin and end among them."""

    def __init__(self, gm: fx.GraphModule, rank: int) -> None:
        self.rank = rank
        self.boxes: list[_RankBox] = []
        self.order: dict[_RankBox, float] = {}
        self.places = {node: float(i) for i, node in enumerate(gm.graph.nodes)}
        self.tails: dict[Transfer, tuple[_RankBox, Line]] = {}
        self.heads: dict[Transfer, _RankBox] = {}
        self.arriving: dict[Transfer, Line] = {}
        self.notes: dict[str, None] = {}
        self.kinds: dict[Kind, None] = {}
        self._stages: set[int] = set()
        self._read(gm.graph)

    @property
    def label(self) -> str:
        """The title of the rank's box: its number and those of its stages."""
        stages = sorted(self._stages)
        plural = "s" * (len(stages) > 1)
        return f"rank {self.rank} · stage{plural} {', '.join(map(str, stages))}"

    def _read(self, graph: fx.Graph) -> None:
        actions = actions_of(graph)
        of_action: dict[Action, _RankBox] = {}
        made: dict[fx.Node, _RankBox | None] = {}  # the last box that a value comes from
        waiting: dict[fx.Node, list[Transfer]] = {}  # what has arrived, and no box has used yet
        for node in graph.nodes:
            sources = sources_of(node)
            box = None
            if node in actions:
                action = actions[node]
                self._stages.add(action.stage)
                self.kinds.setdefault(action.kind)
                if action not in of_action:
                    of_action[action] = self._add(node, str(action), FILL[action.kind], action.kind)
                box = of_action[action]
            elif node.target in _BESIDE:
                text, note = _BESIDE[node.target]
                self.notes.setdefault(note)
                box = self._add(node, f"{text} {node.meta[STAGE]}")
            elif node.target is ops.transmit:
                self._leaves(node, made, waiting)
            elif node.target is ops.receive:
                waiting[node] = [edge_of(node)]
            elif node.op == "output":
                for source in sources:
                    if waiting.get(source):
                        box = box or self._add(node, "result")
            carried = [key for source in sources for key in waiting.get(source, ())]
            if node.target in (ops.receive, ops.transmit):
                continue
            if box is not None:
                for key in carried:
                    self.heads.setdefault(key, box)
            elif carried:
                waiting[node] = carried
            before = [each for source in sources if (each := made.get(source)) is not None]
            made[node] = box or max(before, key=self.order.__getitem__, default=None)
        for node in graph.find_nodes(op="call_function", target=ops.receive):
            if edge_of(node) not in self.heads:
                self.heads[edge_of(node)] = self._add(node, _short(node))
            key = edge_of(node)
            self.arriving[key] = _line_of(node, self.heads[key])

    def _leaves(
        self,
        node: fx.Node,
        made: Mapping[fx.Node, _RankBox | None],
        waiting: Mapping[fx.Node, list[Transfer]],
    ) -> None:
        """Find the box at which a transfer begins."""
        sources = sources_of(node)
        found = [box for source in sources if (box := made.get(source)) is not None]
        arrived = [key for source in sources for key in waiting.get(source, ())]
        if found:
            tail = max(found, key=self.order.__getitem__)
        else:
            tail = self._add(node, _short(node))
            for key in arrived:
                self.heads.setdefault(key, tail)
        self.tails[edge_of(node)] = tail, _line_of(node, tail)

    def _add(
        self, node: fx.Node, text: str, fill: str = _OTHER, kind: Kind | None = None
    ) -> _RankBox:
        box = _RankBox(f"rank_{self.rank}_{node.name}", text, fill, node.name, kind)
        self.boxes.append(box)
        self.order[box] = self.places[node]
        return box


def _line_of(node: fx.Node, box: _RankBox) -> Line:
    """The kind of line for a transfer, at one end of which is this box."""
    if box.kind is None or origin(node) == "output":
        return _OTHERS
    return _VALUES if box.kind is Kind.FORWARD else _GRADIENTS


def _short(node: fx.Node) -> str:
    name = origin(node)
    return name if len(name) <= 9 else f"{name[:8]}…"


def _notes(programs: Sequence[_RankBoxes]) -> list[str]:
    """Explain, below the legend, the labels and kinds of nodes that are drawn."""
    kinds = {kind: None for each in programs for kind in each.kinds}
    said = [meaning for kind, meaning in MEANING.items() if kind in kinds]
    others = {note: None for each in programs for note in each.notes}
    return [f"1F0: stage 1's forward of micro-batch 0; {', '.join(said)}", *others]


@dataclass
class _RankGrid:
    """The positions of boxes and lines, in points: x grows from left to right; y is 0 at the top
    and negative below, as Graphviz counts it."""

    rows: list[_RankRow]
    links: list[_RankLink]
    slots: dict[_RankBox, int] = field(default_factory=dict)

    height, pad, track, width, room = 24.0, 7.0, 5.0, 40.0, 16.0

    def place_by_needs(self) -> None:
        """Put each box into the first column that is behind those of all that it needs, and behind
        the boxes ahead of it in its row."""
        needs: dict[_RankBox, list[_RankBox]] = {}
        for link in self.links:
            needs.setdefault(link.head, []).append(link.tail)
        left = [list(row.boxes) for row in self.rows]
        free = [0] * len(self.rows)
        while any(left):
            ready = [
                i
                for i, boxes in enumerate(left)
                if boxes and all(need in self.slots for need in needs.get(boxes[0], ()))
            ]
            if not ready:
                raise ValueError(
                    "ranks wait for each other in a circle: see passes.verify.transfers"
                )
            for i in ready:
                box = left[i].pop(0)
                before = (self.slots[need] + 1 for need in needs.get(box, ()))
                self.slots[box] = max([free[i], *before])
                free[i] = self.slots[box] + 1

    def place_in_order(self, order: Mapping[_RankBox, float]) -> None:
        """Give each box a column of its own, in this order."""
        boxes = [box for row in self.rows for box in row.boxes]
        self.slots = {box: i for i, box in enumerate(sorted(boxes, key=order.__getitem__))}

    @cached_property
    def row_of(self) -> dict[_RankBox, int]:
        return {box: i for i, row in enumerate(self.rows) for box in row.boxes}

    @cached_property
    def head(self) -> float:
        return max(width_of(row.label) for row in self.rows) + 30

    @cached_property
    def tracks(self) -> dict[_RankLink, tuple[int, int]]:
        """The gap and the track in which each line runs. Gap ``i`` is between the rows ``i`` and
        ``i + 1``; its tracks keep lines apart that are in it at the same time."""
        ends: dict[int, list[int]] = {}
        found = {}
        for link in sorted(self.links, key=lambda link: (self.slots[link.tail], link.tail.name)):
            tail, head = self.row_of[link.tail], self.row_of[link.head]
            gap = tail if head > tail else tail - 1
            first, last = sorted((self.slots[link.tail], self.slots[link.head]))
            taken = ends.setdefault(gap, [])
            track = next((i for i, end in enumerate(taken) if end < first), len(taken))
            taken[track : track + 1] = [last]
            found[link] = gap, track
        return found

    def wide(self, box: _RankBox) -> float:
        """Return how wide a box is drawn; a transfer is a circle, of one size."""
        return _SMALL if self.rows[self.row_of[box]].is_thin else self.width

    @cached_property
    def columns(self) -> list[float]:
        """The x coordinate of the middle of each column."""
        widths = [0.0] * (1 + max(self.slots.values(), default=-1))
        for box, slot in self.slots.items():
            widths[slot] = max(widths[slot], self.wide(box))
        found, left = [], self.head
        for width in widths:
            found.append(left + width / 2)
            left += width + self.room
        return found

    def x(self, box: _RankBox) -> float:
        return self.columns[self.slots[box]]

    @cached_property
    def middles(self) -> list[float]:
        """The y coordinate of each row's middle, from the top row down; y grows upwards."""
        found, top = [], 0.0
        for i, row in enumerate(self.rows):
            size = (_SMALL if row.is_thin else self.height) + 2 * self.pad
            found.append(top - size / 2)
            used = [track for gap, track in self.tracks.values() if gap == i]
            top -= size + 20 + self.track * (1 + max(used, default=-1))
        return found

    def _side(self, row: int, way: int) -> float:
        """The y coordinate of the upper (1) or lower (-1) side of a row's boxes."""
        return self.middles[row] + way * self.half(row)

    def half(self, row: int) -> float:
        """Half the height of the boxes of a row."""
        return (_SMALL if self.rows[row].is_thin else self.height) / 2

    def aside(self, row: int, link: _RankLink) -> float:
        """How far from the middle of a box of a row a line leaves or enters it: lines that go up,
        or pass other rows, are farther away, so that they do not cover others."""
        if self.rows[row].is_thin:
            return 0
        down = self.row_of[link.head] - self.row_of[link.tail]
        return (3 if down > 0 else 7) + 8 * min(1, abs(down) - 1)

    def path(self, link: _RankLink) -> list[Point]:
        """The points of a line: it leaves the first box, runs along the gap beside that box's row,
        passes other rows between two columns, and enters the second box."""
        tail, head = self.row_of[link.tail], self.row_of[link.head]
        way = -1 if head > tail else 1  # -1: down, 1: up
        start = self.x(link.tail) + self.aside(tail, link), self._side(tail, way)
        end = self.x(link.head) - self.aside(head, link), self._side(head, -way)
        gap, track = self.tracks[link]
        level = self.middles[gap] - self.half(gap) - self.pad - 10 - self.track * track
        if abs(head - tail) == 1:
            return [start, (start[0], level), (end[0], level), end]
        between = self.x(link.head) - self.wide(link.head) / 2 - 5
        last = end[1] - way * (self.pad + 5)
        return [start, (start[0], level), (between, level), (between, last), (end[0], last), end]

    def drawn(self, name: str, notes: Sequence[str]) -> graphviz.Source:
        """Draw all rows and links, and write the notes below the legend."""
        picture = Picture(name, layout="nop2")
        for row in range(len(self.rows)):
            self._draw_row(picture, row)
        for i, link in enumerate(self.links):
            path = self.path(link)
            ends = link.tail.name, link.head.name
            tip = {"tooltip": graphviz.escape(link.tip)} if link.tip else {}
            picture.edge(*ends, link.line, pos=polyline(path), arrowsize="0.6", **tip)
            if link.note:
                way = 1 if path[-1][1] < path[-2][1] else -1
                at = path[-1][0] - 4, path[-1][1] + way * 12
                look = {"shape": "plaintext", "fontsize": "7", "width": "0.1", "height": "0.1"}
                picture.dot.node(
                    f"number {i}", link.note, pos=numbers(*at), margin="0", **look, **tip
                )
        picture.notes += notes
        below = self.middles[-1] - self.half(len(self.rows) - 1) - self.pad - 24
        return picture.source(legend_at=(0, below))

    def _draw_row(self, picture: Picture, row: int) -> None:
        y, reach = self.middles[row], self.half(row) + self.pad
        right = max(map(self.x, self.slots), default=self.head) + self.width / 2 + 12
        with picture.dot.subgraph(name=f"cluster_row_{row}") as cluster:
            cluster.attr(
                label=graphviz.escape(self.rows[row].label),
                lp=numbers(self.head / 2 - 4, y),
                bb=numbers(0, y - reach, right, y + reach),
                **CLUSTER,
            )
            for box in self.rows[row].boxes:
                is_thin = self.rows[row].is_thin
                cluster.node(
                    box.name,
                    graphviz.escape(box.text),
                    shape="circle" if is_thin else "box",
                    style="filled",
                    fillcolor=box.fill,
                    pos=numbers(self.x(box), y),
                    width=f"{(_SMALL if is_thin else self.width) / 72:.3f}",
                    height=f"{2 * self.half(row) / 72:.3f}",
                    fixedsize="true",
                    fontsize="7" if is_thin else "9",
                    tooltip=graphviz.escape(box.tip),
                )
