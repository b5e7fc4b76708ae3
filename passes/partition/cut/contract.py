"""Contract: the DAG in which clusters of nodes are one node each.

::

    a ─ b ─┬─ c ─┬─ e        ab ─┬─ c ─┬─ e        seconds and bytes are summed, what several nodes
           └─ d ─┘               └─ d ─┘           make for the same users becomes one value
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import networkx as nx
import numpy as np

from passes.partition.cut.dag import OUTSIDE, Dag, Floats, Kept, Unit, Value


def contracted(dag: Dag, cluster: Sequence[int]) -> tuple[Dag, list[int]]:
    """The DAG of the clusters, and for each node of ``dag`` the node of the new DAG that has it.

    Clusters whose edges form a cycle become one.
    """
    pairs = dict.fromkeys(
        (cluster[u], cluster[v]) for u, v in dag.edges if cluster[u] != cluster[v]
    )
    first: dict[int, int] = {}
    for node, c in enumerate(cluster):
        first.setdefault(c, node)
    after: dict[int, list[int]] = {c: [] for c in first}
    for a, b in pairs:
        after[a].append(b)
    found = topological(after, first.__getitem__)
    if len(found) < len(first):
        quotient: nx.DiGraph[int] = nx.DiGraph(list(pairs))
        circles = nx.strongly_connected_components(quotient)
        joined = {c: min(circle) for circle in circles for c in circle}
        return contracted(dag, [joined.get(c, c) for c in cluster])
    place = {c: i for i, c in enumerate(found)}
    return _renumbered(dag, [place[c] for c in cluster], len(place))


def _renumbered(dag: Dag, home: list[int], size: int) -> tuple[Dag, list[int]]:
    merged: dict[tuple[int, tuple[int, ...], bool], Value] = {}
    for value in dag.values:
        source = OUTSIDE if value.source == OUTSIDE else home[value.source]
        users = tuple(sorted({home[user] for user in value.users} - {source}))
        if users:
            key = source, users, value.once
            same = merged.get(key, Value(source, users, count=0))
            merged[key] = Value(
                source,
                users,
                same.size + value.size,
                same.volume + value.volume,
                same.count + value.count,
                value.once,
            )
    where = np.asarray(home)

    def summed(weights: Floats) -> Floats:
        return np.bincount(where, weights, minlength=size).astype(np.float64)

    saved = summed(dag.saved)
    several: dict[tuple[int, ...], float] = {}
    for kept in dag.kept:
        nodes = tuple(sorted({home[node] for node in kept.nodes}))
        if len(nodes) == 1:
            saved[nodes[0]] += kept.size
        else:
            several[nodes] = several.get(nodes, 0.0) + kept.size
    units: dict[tuple[int, ...], float] = {}
    for unit in dag.units:
        nodes = tuple(sorted({home[node] for node in unit.nodes}))
        if len(nodes) > 1:
            units[nodes] = units.get(nodes, 0.0) + unit.penalty
    order = dict.fromkeys((home[u], home[v]) for u, v in dag.order if home[u] != home[v])
    small = Dag(
        seconds=np.stack([summed(row) for row in dag.seconds]),
        forward=np.stack([summed(row) for row in dag.forward]),
        again=np.stack([summed(row) for row in dag.again]),
        values=tuple(merged.values()),
        order=tuple(order),
        fixed=summed(dag.fixed),
        saved=saved,
        products=summed(dag.products),
        kept=tuple(Kept(*item) for item in several.items()),
        units=tuple(Unit(*item) for item in units.items()),
    )
    return small, home


def topological(after: dict[int, list[int]], key: Callable[[int], float]) -> list[int]:
    """A topological order of the graph; of the nodes that are ready, the one of least key first."""
    waiting = dict.fromkeys(after, 0)
    for successors in after.values():
        for node in successors:
            waiting[node] += 1
    ready = [(key(node), node) for node, count in waiting.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for successor in after[node]:
            waiting[successor] -= 1
            if not waiting[successor]:
                heapq.heappush(ready, (key(successor), successor))
    return order


def grouped(size: int, groups: Iterable[Sequence[int]]) -> list[int]:
    """A cluster for each of ``size`` nodes. Nodes of a group are in one cluster, and so are groups
    that have a node in common."""
    parent = list(range(size))

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for group in groups:
        for a, b in pairwise(group):
            parent[max(root(a), root(b))] = min(root(a), root(b))
    return [root(node) for node in range(size)]
