"""Folding: the nodes of a module are drawn as one box, where a graph has more nodes than a reader
can take in.

::

    embed  h.0.ln  h.0.attn.q  h.0.attn.k  ...  h.11.mlp  head        702 nodes
    embed  [ h.0 · 56 nodes ]  ...  [ h.11 · 56 nodes ]  head          20 boxes

Only nodes that follow each other are folded, so that there are no cycles between boxes: a
module that is called twice is two boxes. Where a module has very many in it, neighbours are folded
together: ``h.0 … h.7``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil

from torch import fx

from fxpipe.ir.cost import Cost, total
from fxpipe.ir.graph import COST

Path = tuple[str, ...]

MANY = 4  # if more getitem nodes than this take one result apart, they are folded into one box


@dataclass(frozen=True)
class Box:
    """Nodes that are drawn as one box. ``paths`` are the paths of the modules that the nodes belong
    to, in the order of the nodes."""

    nodes: tuple[fx.Node, ...]
    paths: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        """The name of the first node in the box, which identifies the box."""
        return self.nodes[0].name

    @property
    def is_folded(self) -> bool:
        return len(self.nodes) > 1

    @property
    def path(self) -> str:
        """The path of the module whose nodes these are; empty if they belong to no module, or to
        several."""
        return ".".join(self.paths[0]) if len(self.paths) == 1 else ""

    @property
    def title(self) -> str:
        """The text of the box: ``h.3``, or ``h.0 … h.7`` for several modules. Nodes that belong to
        no module are named instead."""
        names = [".".join(path) for path in self.paths if path] or [n.name for n in self.nodes]
        return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"

    @property
    def cost(self) -> Cost:
        return total(node.meta.get(COST, Cost()) for node in self.nodes)


def fold(nodes: Sequence[fx.Node], limit: int, place: Callable[[fx.Node], Hashable]) -> list[Box]:
    """Fold nodes by their modules into at most ``limit`` boxes, if the modules allow that.

    If the nodes are few enough, no module is folded; only the ``getitem`` nodes that take one
    result apart become one box, if they are many.

    Args:
        nodes: the nodes to draw, in the order in which they run.
        limit: the most boxes to draw.
        place: tells where a node is drawn; nodes of different places are never in one box.
    """
    single = _taken_apart(nodes)
    if len(single) <= limit:
        return single
    finer: list[Box] = []
    for depth in range(max(len(path_of(node)) for node in nodes), -1, -1):
        boxes = _at(depth, nodes, place)
        if len(boxes) <= limit:
            break
        finer = boxes
    return _packed(finer, limit // 2, place) if finer and 4 * len(boxes) < limit else boxes


def _taken_apart(nodes: Sequence[fx.Node]) -> list[Box]:
    """One box for each node, except that ``getitem`` nodes which take one result apart share a box
    if they are many."""
    found = []
    for maker, run in groupby(nodes, _maker):
        parts = tuple(run)
        if maker is not None and len(parts) > MANY:
            found.append(Box(parts))
        else:
            found += [Box((node,), (path_of(node),)) for node in parts]
    return found


def _maker(node: fx.Node) -> fx.Node | None:
    """For a ``getitem`` node the node whose result it takes apart; None for any other."""
    return node.all_input_nodes[0] if node.target is operator.getitem else None


def _at(depth: int, nodes: Sequence[fx.Node], place: Callable[[fx.Node], Hashable]) -> list[Box]:
    def module(node: fx.Node) -> tuple[Hashable, Path]:
        return place(node), path_of(node)[:depth]

    return [Box(tuple(run), (path,)) for (_, path), run in groupby(nodes, module)]


def _packed(boxes: Sequence[Box], wanted: int, place: Callable[[fx.Node], Hashable]) -> list[Box]:
    """Join neighbouring boxes whose modules have one parent and whose place is the same, equally
    many at a time, so that about ``wanted`` boxes are left."""

    def parent(box: Box) -> tuple[Hashable, Path]:
        return place(box.nodes[0]), box.paths[0][:-1]

    found = []
    share = ceil(len(boxes) / wanted)
    for _, run in groupby(boxes, parent):
        siblings = list(run)
        for start in range(0, len(siblings), share):
            part = siblings[start : start + share]
            nodes = tuple(node for box in part for node in box.nodes)
            found.append(Box(nodes, tuple(dict.fromkeys(box.paths[0] for box in part))))
    return found


def path_of(node: fx.Node) -> Path:
    """The names of the modules that a node is in, the outermost first."""
    paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values() if path]
    return tuple(paths[-1].split(".")) if paths else ()
