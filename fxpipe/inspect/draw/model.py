"""The drawing of a graph node by node: of the model graph, or of a part of another graph."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import graphviz  # type: ignore[import-untyped]
from torch import fx

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
    origin,
    sources_of,
    type_text,
)
from fxpipe.inspect.draw.places import Place, are_beside, drawing_order, in_words, places_of
from fxpipe.ir.graph import MICROBATCH, VALUE, is_work
from fxpipe.ir.printing import operator_name
from fxpipe.ir.tensors import tensor_bytes
from fxpipe.ir.text import human_bytes

BOXES = 80  # a graph of more nodes than this has its modules folded
PART_BOXES = 240  # the same limit for graphs with micro-batches, which have no modules to fold

_SKIP = Line("skip: a value that passes over stages", color=SKIP_COLOURS[0], penwidth=THICK)
_NUMBER = Line("value that is no tensor", color=GREY, penwidth="0.6", arrowhead="vee")
_NAMED = Line("value of the box that has this name", color=GREY, penwidth="0.6", arrowhead="vee")
_ELSEWHERE = Line(
    "from and to parts of the graph that are not drawn", style="dotted", arrowhead="vee"
)
_SMALL = {"fontsize": "8", "height": "0.2", "margin": "0.05,0.02"}
Edges = dict[tuple[str, str], Line]
"""Edges, by the names of the boxes that they connect."""

_OUTPUTS = 8  # if more boxes than this lead to the output, one line is drawn for each stage
_LINES = 3  # a number that more boxes than this use has its name drawn at each, and no lines


def draw_model(
    gm: fx.GraphModule,
    *,
    stage: int | None = None,
    microbatch: int | None = None,
    boxes: int | None = None,
) -> graphviz.Source:
    """Draw a graph with a box for each node: its name, the function that it calls, and the shape of
    its value.

    Nodes of one stage form a cluster, and values that skip stages stand out. Pipeline and step
    graphs can be drawn as well: each micro-batch of a stage is a cluster then, and so are the
    forward and the backward of a training step. Clusters are below each other in the order in which
    they run; the micro-batches of a stage are beside each other.

    Args:
        stage, microbatch: draw the nodes of these only, and where their values come from and go to.
        boxes: the most boxes; in larger graphs modules are folded. None stands for 80, or for 240
            in graphs with micro-batches, which have no modules to fold.

    Raises:
        ValueError: if no node is of that stage and micro-batch.
    """
    if boxes is None:
        boxes = PART_BOXES if any(MICROBATCH in n.meta for n in gm.graph.nodes) else BOXES
    return _DrawnNodes(gm, Place(stage, microbatch), boxes).source()


class _DrawnNodes:
    def __init__(self, gm: fx.GraphModule, wanted: Place, limit: int) -> None:
        self.picture = Picture("model", nodesep="0.25", ranksep="0.35")
        self.wanted = wanted
        self.places = places_of(gm.graph)
        kept = [node for node in gm.graph.nodes if self._is_wanted(self.places[node])]
        if not kept:
            raise ValueError(f"no node is of {wanted}: there are {in_words(self.places.values())}")
        self.boxes = fold([n for n in kept if is_work(n)], limit, self.places.__getitem__)
        self.box_of = {node: box for box in self.boxes for node in box.nodes}
        for node in kept:
            self._settle(node)
        self.kept = kept
        self.clusters: dict[Place, list[Box]] = {}
        for box in dict.fromkeys(self.box_of[node] for node in kept):
            self.clusters.setdefault(self._place(box), []).append(box)
        self.outputs = {box.name for box in self.boxes if box.nodes[0].op == "output"}
        self.named = self._named()
        self.outside: dict[str, list[str]] = {}  # the name of an oval -> its lines of text

    def _place(self, box: Box) -> Place:
        return self.places[box.nodes[0]]

    def _is_wanted(self, place: Place) -> bool:
        pairs = zip(self.wanted[:2], place[:2], strict=True)
        return all(wish is None or wish == is_there for wish, is_there in pairs)

    def _settle(self, node: fx.Node) -> None:
        """Give an input, output or parameter a box; a parameter of a folded box joins that box."""
        if node in self.box_of:
            return
        if node.op == "get_attr":
            first = next((self.box_of[u] for u in node.users if u in self.box_of), None)
            if first is not None and first.is_folded:
                self.box_of[node] = first
                return
        self.box_of[node] = box = Box((node,))
        self.boxes.append(box)

    def _named(self) -> set[fx.Node]:
        """The values that are drawn as their name at each box that uses them, and not as lines,
        which would be long or many: numbers that many boxes use or that are made outside the drawn
        part, and values that another micro-batch uses, which is drawn beside theirs."""
        found = set()
        for node, place in self.places.items():
            users = [user for user in node.users if user in self.box_of]
            boxes = {self.box_of[user].name for user in users}
            is_here = node in self.box_of
            if is_here and any(are_beside(place, self.places[user]) for user in users):
                found.add(node)
            if _is_number(node) and (not is_here or len(boxes) > _LINES):
                found.add(node)
        return found

    def source(self) -> graphviz.Source:
        edges, labels = self._together(self._edges())
        for place, boxes in self.clusters.items():
            if place == Place(None, None):
                self._draw(self.picture.dot, boxes)
                continue
            with self.picture.dot.subgraph(name=_cluster(place)) as cluster:
                cluster.attr(**CLUSTER)
                _draw_title(cluster, place, self._firsts(place, edges))
                self._draw(cluster, boxes)
        for oval, text in self.outside.items():
            self.picture.oval(oval, *text)
        for (tail, head), line in edges.items():
            is_straight = line is not _SKIP and head not in self.outputs
            weight = "1" if is_straight else "0"
            self.picture.edge(tail, head, line, weight=weight, **labels.get((tail, head), {}))
        self._arrange(edges)
        if any(box.is_folded for box in self.boxes):
            nodes = sum(len(box.nodes) for box in self.boxes)
            self.picture.notes.append(
                f"double frame: several nodes as one ({nodes:,} nodes in {len(self.boxes)} boxes)"
            )
        if any(box.is_folded and self._uses_named(box) for box in self.boxes):
            self.picture.notes.append("the numbers that a double frame uses are not drawn")
        if any(MICROBATCH in n.meta and type_text(n.meta.get(VALUE)) for n in self.box_of):
            self.picture.notes.append("shapes are those of the whole mini-batch")
        return self.picture.source()

    def _draw(self, dot: graphviz.Digraph, boxes: Iterable[Box]) -> None:
        for box in boxes:
            if box.is_folded:
                _draw_folded(dot, box)
            else:
                draw_node(dot, box.nodes[0])
            for node in self._named_at(box):
                dot.node(_name_at(node, box), label(node.name), style="dotted", **_SMALL)

    def _named_at(self, box: Box) -> list[fx.Node]:
        """The values whose names are drawn at a box that uses them; none at a folded box."""
        return [] if box.is_folded else self._uses_named(box)

    def _uses_named(self, box: Box) -> list[fx.Node]:
        used = (source for node in box.nodes for source in node.all_input_nodes)
        return [n for n in dict.fromkeys(used) if n in self.named and n not in box.nodes]

    def _edges(self) -> Edges:
        """The edges between boxes. Several edges between the same two are drawn as one, of the
        thickest kind among them."""
        found: Edges = {}
        for box in self.boxes:
            for node in self._named_at(box):
                found[_name_at(node, box), box.name] = _NAMED
        for node in self.kept:
            head = self.box_of[node]
            for source in sources_of(node):
                if source in self.named:
                    continue
                if source not in self.box_of:
                    oval = self._outside(f"from {self.places[source]}", source, head)
                    found[oval, head.name] = _ELSEWHERE
                elif (tail := self.box_of[source]) is not head:
                    ends = tail.name, head.name
                    lines = self._line(source, node), found.get(ends, _NUMBER)
                    found[ends] = max(lines, key=lambda line: float(line.penwidth))
            for user in node.users:
                if user not in self.box_of and node in sources_of(user):
                    oval = self._outside(f"to {self.places[user]}", node, head)
                    found[head.name, oval] = _ELSEWHERE
        return found

    def _together(self, edges: Edges) -> tuple[Edges, dict[tuple[str, str], dict[str, str]]]:
        """The edges to draw, and the labels of those that have one. Where very many boxes lead to
        the output, the lines that come from one stage are drawn as one line, and its label says
        from how many boxes they come."""
        to_output = [ends for ends in edges if ends[1] in self.outputs]
        if len(to_output) <= _OUTPUTS:
            return edges, {}
        where = {box.name: self._place(box) for box in self.boxes}
        last = {where[tail]: (tail, head) for tail, head in to_output}
        counts = Counter(where[tail] for tail, _ in to_output)
        said = {
            last[place]: {"label": f"  of {count} boxes"}
            for place, count in counts.items()
            if count > 1
        }
        kept = {
            ends: line
            for ends, line in edges.items()
            if ends not in to_output or ends in last.values()
        }
        return kept, said

    def _outside(self, where: str, value: fx.Node, box: Box) -> str:
        """The oval that stands for the rest of the graph where only a part is drawn: it names the
        values that the part takes from the rest, or gives to it."""
        # Graphviz would read what follows a colon in an edge's end as a port.
        oval = f"{where} / {self._place(box)}"
        names = self.outside.setdefault(oval, [where])
        if origin(value) not in names:
            names.append(origin(value))
        return oval

    # ---------------------------------------------------------------------------------- the layout

    def _arrange(self, edges: Edges) -> None:
        """Arrange the clusters of each micro-batch below each other, and the micro-batches beside
        each other. Forwards go down the stages, backwards go up."""
        columns: dict[int | None, list[Place]] = {}
        for place in self.clusters:
            if place != Place(None, None):
                columns.setdefault(place.microbatch, []).append(place)
        for column in columns.values():
            for upper, lower in pairwise(sorted(column, key=drawing_order)):
                for box in self._lasts(upper, edges):
                    self.picture.order(box.name, _title(lower))

    def _firsts(self, place: Place, edges: Edges) -> list[str]:
        """The first boxes of a cluster: those that need nothing from another box in it."""
        own = [box.name for box in self.clusters[place] if box.nodes[0].op != "get_attr"]
        later = {head for tail, head in edges if tail in own}
        return [name for name in own if name not in later]

    def _lasts(self, place: Place, edges: Edges) -> list[Box]:
        """The last boxes of a cluster: those that no other box in it needs."""
        own = {box.name for box in self.clusters[place]}
        earlier = {tail for tail, head in edges if head in own}
        return [box for box in self.clusters[place] if box.name not in earlier]

    def _line(self, source: fx.Node, user: fx.Node) -> Line:
        if _is_number(source):
            return _NUMBER
        return _SKIP if self._is_skip(source, user) else DATA

    def _is_skip(self, source: fx.Node, user: fx.Node) -> bool:
        """Whether a value passes over stages on its way to a user: an activation over later stages,
        or a gradient over earlier ones."""
        target = self.places[user].stage
        if target is None:
            return False
        known = [s for n in (source, *source.users) if (s := self.places[n].stage) is not None]
        if (made := self.places[source].stage) is not None and made > target:
            return min(s for s in known if s > target) - 1 > target
        before = [s for s in known if s < target]
        return bool(before) and max(before) + 1 < target


def _is_number(node: fx.Node) -> bool:
    return node.meta.get(VALUE) is not None and not tensor_bytes(node.meta[VALUE])


def _cluster(place: Place) -> str:
    return "cluster_" + str(place).replace(", ", "_").replace(" ", "_")


# These names have spaces, so that they differ from the names of all fx nodes.


def _title(place: Place) -> str:
    return f"title of {place}"


def _name_at(node: fx.Node, box: Box) -> str:
    return f"{node.name} at {box.name}"


def _draw_title(dot: graphviz.Digraph, place: Place, firsts: Iterable[str]) -> None:
    """Draw the title of a cluster as a node beside the cluster's first boxes, and not as its label:
    Graphviz leads lines around nodes, but through labels of clusters."""
    dot.node(_title(place), str(place), shape="plaintext", fontsize="11", margin="0", height="0.2")
    for name in firsts:
        dot.edge(_title(place), name, style="invis", minlen="0")


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
    """Draw one node: inputs and outputs as ovals, all others as boxes."""
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
