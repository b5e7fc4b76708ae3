"""A graph node by node: the model graph, or a part of any other."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import NamedTuple

import graphviz  # type: ignore[import-untyped]
from torch import fx

from fxpipe.graph import MICROBATCH, VALUE, is_work, operator_name, tensor_bytes
from fxpipe.inspect.draw.fold import Box, fold
from fxpipe.inspect.draw.picture import (
    CLUSTER,
    DATA,
    GREY,
    SKIP_COLOURS,
    THICK,
    Line,
    Picture,
    label,
    type_text,
)
from fxpipe.inspect.text import human_bytes
from passes.skips import stage_of

BOXES = 80  # more than these are folded

_SKIP = Line("value that passes over stages", color=SKIP_COLOURS[0], penwidth=THICK)
_NUMBER = Line("value that is no tensor", color=GREY, penwidth="0.6", arrowhead="vee")
_ELSEWHERE = Line("from and to other parts", style="dotted", arrowhead="vee")
_SMALL = {"fontsize": "7", "height": "0.2", "margin": "0.05,0.02"}


class Place(NamedTuple):
    """Where a node is; None where it is not said."""

    stage: int | None
    microbatch: int | None

    def __str__(self) -> str:
        said = []
        if self.stage is not None:
            said.append(f"stage {self.stage}")
        if self.microbatch is not None:
            said.append(f"mb {self.microbatch}")
        return ", ".join(said) or "the caller"


def draw_model(
    gm: fx.GraphModule,
    *,
    stage: int | None = None,
    microbatch: int | None = None,
    boxes: int = BOXES,
) -> graphviz.Source:
    """The traced model, a box a node: its name, what it calls, and the shape that it gives.

    Where nodes have stages, each stage is a cluster, and values that pass over stages stand out.
    It draws the nodes of other graphs too, of which micro-batches are clusters as well.

    Args:
        stage, microbatch: draw the nodes of these only, and where their values come from and go to.
        boxes: of larger graphs, modules are folded, until there are no more boxes than these.

    Raises:
        ValueError: if no node is of that stage and micro-batch.
    """
    return _Nodes(gm, Place(stage, microbatch), boxes).source()


class _Nodes:
    def __init__(self, gm: fx.GraphModule, wanted: Place, limit: int) -> None:
        self.picture = Picture("model", nodesep="0.25", ranksep="0.35")
        self.wanted = wanted
        self.places = {node: _place(node) for node in gm.graph.nodes}
        kept = [node for node in gm.graph.nodes if self._is_wanted(self.places[node])]
        if not kept:
            raise ValueError(f"no node is of {wanted}: there are {_known(self.places.values())}")
        self.boxes = fold([n for n in kept if is_work(n)], limit, self.places.__getitem__)
        self.box_of = {node: box for box in self.boxes for node in box.nodes}
        for node in kept:
            self._settle(node)
        self.kept = kept

    def _is_wanted(self, place: Place) -> bool:
        pairs = zip(self.wanted, place, strict=True)
        return all(wish is None or wish == is_there for wish, is_there in pairs)

    def _settle(self, node: fx.Node) -> None:
        """What is no work has a box of its own; a parameter of folded nodes has none."""
        if node in self.box_of:
            return
        if node.op == "get_attr":
            first = next((self.box_of[u] for u in node.users if u in self.box_of), None)
            if first is not None and first.is_folded:
                self.box_of[node] = first
                return
        self.box_of[node] = box = Box((node,))
        self.boxes.append(box)

    def source(self) -> graphviz.Source:
        clusters: dict[Place, list[Box]] = {}
        for box in self.boxes:
            clusters.setdefault(self.places[box.nodes[0]], []).append(box)
        for place, boxes in sorted(clusters.items(), key=lambda item: _in_order(item[0])):
            if place == Place(None, None):
                self._draw(self.picture.dot, boxes)
                continue
            with self.picture.dot.subgraph(name=_cluster(place)) as cluster:
                cluster.attr(label=str(place), **CLUSTER)
                self._draw(cluster, boxes)
        for (tail, head), line in self._edges().items():
            weight = {"weight": "0"} if line is _SKIP else {}
            self.picture.edge(tail, head, line, **weight)
        if any(box.is_folded for box in self.boxes):
            nodes = sum(len(box.nodes) for box in self.boxes)
            self.picture.notes.append(
                f"double frame: several nodes as one ({nodes:,} nodes in {len(self.boxes)} boxes)"
            )
        if any(MICROBATCH in n.meta and type_text(n.meta.get(VALUE)) for n in self.box_of):
            self.picture.notes.append("shapes are those of the whole mini-batch")
        return self.picture.source()

    def _draw(self, dot: graphviz.Digraph, boxes: Iterable[Box]) -> None:
        for box in boxes:
            if box.is_folded:
                _draw_folded(dot, box)
            else:
                draw_node(dot, box.nodes[0])

    def _edges(self) -> dict[tuple[str, str], Line]:
        """Between boxes, one each: of several that it stands for, the thickest."""
        found: dict[tuple[str, str], Line] = {}
        for node in self.kept:
            head = self.box_of[node].name
            for source in node.all_input_nodes:
                if source in self.box_of:
                    tail = self.box_of[source].name
                    if tail != head:
                        lines = self._line(source, node), found.get((tail, head), _NUMBER)
                        found[tail, head] = max(lines, key=lambda line: float(line.penwidth))
                else:
                    found[self._outside(source.name, source), head] = _ELSEWHERE
            for user in node.users:
                if user not in self.box_of:
                    name = f"to {self.places[user]}"
                    found[head, self._outside(name, user)] = _ELSEWHERE
        return found

    def _line(self, source: fx.Node, user: fx.Node) -> Line:
        if source.meta.get(VALUE) is not None and not tensor_bytes(source.meta[VALUE]):
            return _NUMBER
        return _SKIP if self._is_skip(source, user) else DATA

    def _is_skip(self, source: fx.Node, user: fx.Node) -> bool:
        """Whether a value passes over stages that do not use it, or a gradient on its way back."""
        target = self.places[user].stage
        if target is None:
            return False
        known = [s for n in (source, *source.users) if (s := self.places[n].stage) is not None]
        if (made := self.places[source].stage) is not None and made > target:
            return min(s for s in known if s > target) - 1 > target
        before = [s for s in known if s < target]
        return bool(before) and max(before) + 1 < target

    def _outside(self, name: str, node: fx.Node) -> str:
        place = self.places[node]
        oval = f"{name} outside"
        text = name if name.startswith("to ") else f"{name}, from {place}"
        self.picture.oval(oval, text)
        return oval


def _known(places: Iterable[Place]) -> str:
    """Which stages and micro-batches there are to ask for."""
    stages, microbatches = (
        [value for value in values if value is not None] for values in zip(*places, strict=True)
    )
    said = [f"stages 0 to {max(stages)}"] if stages else []
    said += [f"micro-batches 0 to {max(microbatches)}"] if microbatches else []
    return " and ".join(said) or "none"


def _place(node: fx.Node) -> Place:
    """Where a node is drawn; a parameter where it is first used."""
    stage = stage_of(node)
    if stage is None and node.op == "get_attr":
        users = [user for user in node.users if stage_of(user) is not None]
        first = min(users, key=lambda user: user.meta["stage"], default=node)
        return Place(stage_of(first), first.meta.get(MICROBATCH))
    return Place(stage, node.meta.get(MICROBATCH))


def _in_order(place: Place) -> tuple[int, int]:
    return tuple(-1 if value is None else value for value in place)  # type: ignore[return-value]


def _cluster(place: Place) -> str:
    return "cluster_" + str(place).replace(", ", "_").replace(" ", "_")


def _draw_folded(dot: graphviz.Digraph, box: Box) -> None:
    cost, stack = box.cost, box.nodes[0].meta.get("nn_module_stack", {})
    kinds = [kind for path, kind in stack.values() if path and path == box.path]
    kind = "" if not kinds else getattr(kinds[0], "__name__", str(kinds[0]).rpartition(".")[2])
    text = label(
        f"{box.title} · {len(box.nodes)} nodes",
        kind,
        f"parameters {human_bytes(cost.param_bytes)}" if cost.param_bytes else "",
    )
    dot.node(box.name, text, style="rounded,filled", fillcolor="white", peripheries="2")


def draw_node(dot: graphviz.Digraph, node: fx.Node) -> None:
    """One node, as a box or an oval."""
    shape = type_text(node.meta.get(VALUE))
    if node.op in ("placeholder", "output"):
        dot.node(node.name, label(node.name, shape), shape="oval", style="solid")
    elif node.op == "get_attr":
        dot.node(node.name, label(str(node.target)), style="dotted", **_SMALL)
    elif node.target is operator.getitem and not shape:
        dot.node(node.name, label(node.name), style="rounded,filled", fillcolor="white", **_SMALL)
    else:
        called = operator_name(node)
        text = label(node.name, "" if called == node.name else called, shape)
        dot.node(node.name, text, style="rounded,filled", fillcolor="white")
