"""Folding: the nodes of a module as one box, where a graph has more nodes than can be read.

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

from fxpipe.ir.cost import Cost
from fxpipe.ir.graph import COST

Path = tuple[str, ...]

MANY = 4  # parts of one result: more than these are folded


@dataclass(frozen=True)
class Box:
    """Nodes that are drawn as one; ``paths``: of the modules that they are of, in order."""

    nodes: tuple[fx.Node, ...]
    paths: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        """The name of its first node, which no other box has."""
        return self.nodes[0].name

    @property
    def is_folded(self) -> bool:
        return len(self.nodes) > 1

    @property
    def path(self) -> str:
        """The path of its module; empty if its nodes are of no module, or of several."""
        return ".".join(self.paths[0]) if len(self.paths) == 1 else ""

    @property
    def title(self) -> str:
        """``h.3``, or the first and the last: of its modules, or of nodes that are no module's."""
        names = [".".join(path) for path in self.paths if path] or [n.name for n in self.nodes]
        return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"

    @property
    def cost(self) -> Cost:
        return sum((node.meta.get(COST, Cost()) for node in self.nodes), Cost())


def fold(nodes: Sequence[fx.Node], limit: int, place: Callable[[fx.Node], Hashable]) -> list[Box]:
    """At most ``limit`` boxes, if nodes have modules that can be folded.

    Where none has to be, only the parts of results that have many are.

    Args:
        nodes: in the order in which they run.
        limit: how many boxes there may be.
        place: nodes of different places are never in one box.
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
    """One box for each node, but a single one for all parts of a result that has many."""
    found = []
    for maker, run in groupby(nodes, _maker):
        parts = tuple(run)
        if maker is not None and len(parts) > MANY:
            found.append(Box(parts))
        else:
            found += [Box((node,), (path_of(node),)) for node in parts]
    return found


def _maker(node: fx.Node) -> fx.Node | None:
    """The node whose result this one is a part of."""
    return node.all_input_nodes[0] if node.target is operator.getitem else None


def _at(depth: int, nodes: Sequence[fx.Node], place: Callable[[fx.Node], Hashable]) -> list[Box]:
    def module(node: fx.Node) -> tuple[Hashable, Path]:
        return place(node), path_of(node)[:depth]

    return [Box(tuple(run), (path,)) for (_, path), run in groupby(nodes, module)]


def _packed(boxes: Sequence[Box], wanted: int, place: Callable[[fx.Node], Hashable]) -> list[Box]:
    """Join neighbours of one module and place, evenly, so that about ``wanted`` boxes are left."""

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
