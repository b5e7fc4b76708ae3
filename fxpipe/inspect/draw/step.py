"""The drawing of the step graph: a grid with a row for each lane, time across, and a box for each
action.

An action is in the first column in which its lane is free and all actions that it needs are done.
All actions count as equally long, so that the columns show the order which the graph enforces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import graphviz  # type: ignore[import-untyped]
from torch import fx

from fxpipe import ops
from fxpipe.inspect.draw.picture import (
    CLUSTER,
    SKIP_COLOURS,
    THICK,
    Line,
    Picture,
    Point,
    numbers,
    polyline,
    sources_of,
    width_of,
)
from fxpipe.ir.graph import ACTION, MICROBATCH, STAGE
from fxpipe.schedule import Action, Kind

# The colours of the timeline (fxpipe.schedule.gantt), lighter.
FILL = {
    Kind.FORWARD: "#CCE3F0",
    Kind.BACKWARD: "#F7DFCC",
    Kind.BACKWARD_INPUT: "#FBEBCC",
    Kind.WEIGHT_GRAD: "#CCECE3",
    Kind.RECOMPUTE: "#F5E4ED",
}
MEANING = {
    Kind.FORWARD: "F: forward",
    Kind.BACKWARD: "B: backward",
    Kind.BACKWARD_INPUT: "I: gradients of the inputs",
    Kind.WEIGHT_GRAD: "W: gradients of the weights",
    Kind.RECOMPUTE: "R: activations again, by a second forward or from the host",
}
# No boxes are drawn for these operators: they count as part of an action of one of these kinds.
_WITH: dict[Callable[..., Any], tuple[Kind, ...]] = {
    ops.loss: (Kind.FORWARD,),
    ops.loss_backward: (Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT),
}
_VALUES = Line("values for the next stage")
_GRADIENTS = Line("gradients for the stage before", style="dashed")
_LOSS = "the loss is part of the last stage's forward and backward"


def draw_step(
    gm: fx.GraphModule, devices: Sequence[str], placement: Sequence[int] | None = None
) -> graphviz.Source:
    """Draw the step graph: a row for each lane, a column for each unit of time, and lines for
    values and gradients that go from one action to another.

    Args:
        devices: the names of the devices, one for each stage.
        placement: the lane of each stage; None if every stage has a lane of its own.
    """
    lanes = tuple(placement if placement is not None else range(len(devices)))
    grid = _StepGrid(gm.graph, devices, lanes)
    picture = Picture("step", layout="nop2")
    for lane in range(1 + max(lanes)):
        _draw_lane(picture, grid, lane)
    for link in grid.links:
        line = grid.lines[link]
        picture.edge(
            str(link.tail), str(link.head), line, pos=polyline(grid.path(link)), arrowsize="0.6"
        )
    kinds = dict.fromkeys(action.kind for action in grid.slots)
    said = [meaning for kind, meaning in MEANING.items() if kind in kinds]
    picture.notes += [f"1F0: stage 1's forward of micro-batch 0; {', '.join(said)}", _LOSS]
    return picture.source(legend_at=grid.below)


@dataclass(frozen=True)
class _StepLink:
    """A line between two actions in different lanes: ``head`` needs a result of ``tail``."""

    tail: Action
    head: Action

    @property
    def is_back(self) -> bool:
        return self.head.stage < self.tail.stage

    @property
    def ends(self) -> tuple[int, int]:
        """The stages of the two actions, the earlier one first."""
        low, high = sorted((self.tail.stage, self.head.stage))
        return low, high


class _StepGrid:
    """The positions of boxes and lines, in points: x grows from left to right; y is 0 at the top
    and negative below, as Graphviz counts it."""

    height = 24.0  # the height of a box
    pad = 7.0  # the margin between the boxes of a row and its frame
    track = 5.0  # the distance between parallel lines in the gap between two rows

    def __init__(self, graph: fx.Graph, devices: Sequence[str], placement: Sequence[int]) -> None:
        self.placement = placement
        self.needs = _needs(graph)
        self.slots = _slots(self.needs, placement)
        self.links = [
            _StepLink(need, action)
            for action, needs in self.needs.items()
            for need in needs
            if placement[need.stage] != placement[action.stage]
        ]
        ends = sorted({link.ends for link in self.links})
        self.skips = [(low, high) for low, high in ends if high > low + 1]
        self.lines = {link: self._line(link) for link in self.links}
        self.labels = []
        for lane in range(1 + max(placement)):
            own = [stage for stage, where in enumerate(placement) if where == lane]
            said = f"stage{'s' * (len(own) > 1)} {', '.join(map(str, own))}"
            self.labels.append(f"{said} · {devices[own[0]]}")
        self.head = max(map(width_of, self.labels)) + 30

    @property
    def width(self) -> float:
        """The width of a box, in points, with room for all lines that enter and leave it."""
        return 2 * max(15.0, 7.0 + 8 * len(self.skips))

    @property
    def room(self) -> float:
        """The distance between the boxes of a row, in points, through which skips pass the row."""
        return max(14.0, 16.0 * len(self.skips))

    def _line(self, link: _StepLink) -> Line:
        """How a link is drawn: the skips between two stages and their gradients have one colour,
        which differs from that of other pairs of stages."""
        if link.ends not in self.skips:
            return _GRADIENTS if link.is_back else _VALUES
        low, high = link.ends
        colour = SKIP_COLOURS[self.skips.index(link.ends) % len(SKIP_COLOURS)]
        if link.is_back:
            return Line(f"gradients of skips, stage {high} to {low}", "dashed", colour, THICK)
        return Line(f"skips, stage {low} to {high}", "solid", colour, THICK)

    def _aside(self, link: _StepLink) -> float:
        """The distance, in points, by which a line leaves a box to the right of the box's middle,
        and enters the next box to the left of that box's middle."""
        first = 5.0 + 4 * len(self.skips) if link.is_back else 2.0
        return first + 4 * (1 + self.skips.index(link.ends) if link.ends in self.skips else 0)

    def lane(self, action: Action) -> int:
        return self.placement[action.stage]

    @cached_property
    def tracks(self) -> dict[_StepLink, tuple[int, int]]:
        """The gap and the track in which each line runs. Gap ``i`` is between the rows of lanes
        ``i`` and ``i + 1``; its tracks keep lines apart that are in it at the same time."""
        ends: dict[int, list[float]] = {}
        found = {}
        for link in sorted(self.links, key=lambda link: (self.slots[link.tail], str(link.tail))):
            gap = self.lane(link.tail) - (self.lane(link.head) < self.lane(link.tail))
            first, last = self.slots[link.tail], self.slots[link.head]
            taken = ends.setdefault(gap, [])
            track = next((i for i, end in enumerate(taken) if end < first), len(taken))
            taken[track : track + 1] = [last]
            found[link] = gap, track
        return found

    def gap(self, lane: int) -> float:
        """The height of the gap below a lane, in points."""
        used = [track for gap, track in self.tracks.values() if gap == lane]
        return 20 + self.track * (1 + max(used, default=-1))

    def y(self, lane: int) -> float:
        """The y coordinate of the middle of a lane's row, in points."""
        above = sum(self.gap(i) for i in range(lane))
        return -(lane + 0.5) * (self.height + 2 * self.pad) - above

    def x(self, action: Action) -> float:
        return self.head + self.slots[action] * (self.width + self.room) + self.width / 2

    @property
    def right(self) -> float:
        """The x coordinate at which the rows end, in points."""
        return max(map(self.x, self.slots), default=0) + self.width / 2 + 12

    @property
    def below(self) -> Point:
        """The point (x, y) below everything that has been drawn."""
        last = 1 + max(self.placement)
        return 0, self.y(last - 1) - self.height / 2 - self.pad - 24

    def path(self, link: _StepLink) -> list[Point]:
        """The points of a line: it leaves the first box, runs along the gap beside that box's row,
        passes other rows between two columns, and enters the second box."""
        way = -1 if self.lane(link.head) > self.lane(link.tail) else 1  # -1: down, 1: up
        aside = self._aside(link)
        start = self.x(link.tail) + aside, self.y(self.lane(link.tail)) + way * self.height / 2
        end = self.x(link.head) - aside, self.y(self.lane(link.head)) - way * self.height / 2
        gap, track = self.tracks[link]
        level = self.y(gap) - self.height / 2 - self.pad - 10 - self.track * track
        if abs(self.lane(link.head) - self.lane(link.tail)) == 1:
            return [start, (start[0], level), (end[0], level), end]
        rank = 2 * self.skips.index(link.ends) + link.is_back if link.ends in self.skips else 0
        between = self.x(link.head) - self.width / 2 - 4 - 8 * rank
        last = end[1] - way * (self.pad + 5)
        return [
            start,
            (start[0], level),
            (between, level),
            (between, last),
            (end[0], last),
            end,
        ]


def _needs(graph: fx.Graph) -> dict[Action, tuple[Action, ...]]:
    """The actions that each action of a step graph needs results of; the keys are in the order of
    the graph."""
    made: dict[fx.Node, dict[Action, None]] = {}
    needs: dict[Action, dict[Action, None]] = {}
    actions = actions_of(graph)
    for node in graph.nodes:
        before = {a: None for source in sources_of(node) for a in made[source]}
        action = actions.get(node)
        if action is not None:
            needs[action] = {**needs.get(action, {}), **before}
            before = {action: None}
        made[node] = before
    return {action: tuple(n for n in found if n != action) for action, found in needs.items()}


def actions_of(graph: fx.Graph) -> dict[fx.Node, Action]:
    """The action that each node is part of. The loss is part of the last stage's forward, and the
    loss's backward is part of the last stage's backward or, if there is one, recomputation."""
    found = {node: node.meta[ACTION] for node in graph.nodes if ACTION in node.meta}
    made = set(found.values())
    for target, kinds in _WITH.items():
        for node in graph.find_nodes(op="call_function", target=target):
            at = node.meta[STAGE], node.meta[MICROBATCH]
            found[node] = next(a for a in (Action(at[0], k, at[1]) for k in kinds) if a in made)
    return found


def _slots(needs: dict[Action, tuple[Action, ...]], placement: Sequence[int]) -> dict[Action, int]:
    free = [0] * (1 + max(placement))
    slots: dict[Action, int] = {}
    for action, before in needs.items():
        lane = placement[action.stage]
        slots[action] = max([free[lane], *(slots[need] + 1 for need in before)])
        free[lane] = slots[action] + 1
    return slots


def _draw_lane(picture: Picture, grid: _StepGrid, lane: int) -> None:
    y, reach = grid.y(lane), grid.height / 2 + grid.pad
    with picture.dot.subgraph(name=f"cluster_lane_{lane}") as cluster:
        cluster.attr(
            label=graphviz.escape(grid.labels[lane]),
            lp=numbers(grid.head / 2 - 4, y),
            bb=numbers(0, y - reach, grid.right, y + reach),
            **CLUSTER,
        )
        for action in grid.slots:
            if grid.lane(action) == lane:
                _draw_action(cluster, grid, action)


def _draw_action(dot: graphviz.Digraph, grid: _StepGrid, action: Action) -> None:
    dot.node(
        str(action),
        str(action),
        style="filled",
        fillcolor=FILL[action.kind],
        pos=numbers(grid.x(action), grid.y(grid.lane(action))),
        width=f"{grid.width / 72:.3f}",
        height=f"{grid.height / 72:.3f}",
        fixedsize="true",
        fontsize="9",
    )
