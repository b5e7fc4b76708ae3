"""Coarsen: clusters of nodes, by which a large DAG becomes a small one with nearly as good cuts.

::

    a ─ b ─ c ─┬─ d ─ e ─┬─ h          abc ─┬─ de ─┬─ h       rows of nodes become one node,
               └─ f ─ g ─┘                  └─ fg ─┘          none too heavy

Rows of nodes are merged first, which keeps branches apart. Where that leaves too many nodes, runs
of a topological order are merged which follows each branch to its end. Neither can make a cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from passes.partition.cut.contract import contracted, topological
from passes.partition.cut.dag import OUTSIDE, Dag


def orders(dag: Dag) -> list[list[int]]:
    """Several topological orders: that of the program, depth first, breadth first, one by which few
    bytes are alive at any time, and others; most of them also from the end to the beginning."""
    n = dag.size
    after = dict(enumerate(dag.after))
    before = dict(enumerate(dag.before))
    level = _levels(dag.before, range(n))
    height = _levels(dag.after, reversed(range(n)))
    weight = dag.weight.tolist()
    found = [list(range(n)), depth_first(dag), _frugal(dag)]
    found += [_depth_first(dag.before, dag.after, reversed(range(n)))[::-1]]
    keys: list[Callable[[int], float]] = [level.__getitem__, lambda v: -weight[v]]
    found += [topological(after, key) for key in keys]
    keys = [height.__getitem__, lambda v: -weight[v], lambda v: -v]
    found += [topological(before, key)[::-1] for key in keys]
    return list(map(list, dict.fromkeys(map(tuple, found))))


def _frugal(dag: Dag) -> list[int]:
    """The order that takes, at each step, the node that leaves the fewest bytes still needed."""
    made = np.zeros(dag.size)
    users_left = [len(value.users) for value in dag.values]
    uses: list[list[int]] = [[] for _ in range(dag.size)]
    for i, value in enumerate(dag.values):
        if value.source != OUTSIDE:
            made[value.source] += value.volume
        for user in value.users:
            uses[user].append(i)

    def growth(node: int) -> float:
        freed = sum(dag.values[i].volume for i in uses[node] if users_left[i] == 1)
        return float(made[node] - freed)

    waiting = [len(b) for b in dag.before]
    ready = [v for v in range(dag.size) if not waiting[v]]
    found = []
    while ready:
        node = min(ready, key=lambda v: (growth(v), v))
        ready.remove(node)
        found.append(node)
        for i in uses[node]:
            users_left[i] -= 1
        for following in dag.after[node]:
            waiting[following] -= 1
            if not waiting[following]:
                ready.append(following)
    return found


def depth_first(dag: Dag) -> list[int]:
    """The topological order that continues, where it can, with a node that has just become
    ready."""
    return _depth_first(dag.after, dag.before, range(dag.size))


def _depth_first(
    after: Sequence[Sequence[int]], before: Sequence[Sequence[int]], nodes: Iterable[int]
) -> list[int]:
    waiting = [len(b) for b in before]
    stack = [v for v in nodes if not waiting[v]][::-1]
    found = []
    while stack:
        node = stack.pop()
        found.append(node)
        for following in reversed(after[node]):
            waiting[following] -= 1
            if not waiting[following]:
                stack.append(following)
    return found


def _levels(before: Sequence[Sequence[int]], nodes: Iterable[int]) -> list[int]:
    level = [0] * len(before)
    for v in nodes:
        level[v] = 1 + max((level[u] for u in before[v]), default=-1)
    return level


def coarsened(dag: Dag, order: Sequence[int], pieces: int, parts: Sequence[object]) -> list[int]:
    """A cluster for each node: ``pieces`` runs of a topological order, of about equal weight.

    Nodes whose ``parts`` differ are not merged.
    """
    share = _shares(dag)
    cluster, current, full, last = [0] * dag.size, -1, 0.0, None
    for node in order:
        if last is None or full + share[node] > 1 / pieces or parts[node] != parts[last]:
            current, full = node, 0.0
        cluster[node] = current
        full += share[node]
        last = node
    return cluster


def rows(dag: Dag, pieces: int, parts: Sequence[object]) -> list[int]:
    """A cluster for each node: rows in which each node has one successor, which has no other
    predecessor. No row is more than the fraction 1 / ``pieces`` of the graph."""
    share = _shares(dag)
    cluster, full = list(range(dag.size)), list(share)
    for node in range(dag.size):
        if len(dag.before[node]) == 1:
            (previous,) = dag.before[node]
            head = cluster[previous]
            fits = full[head] + share[node] <= 1 / pieces and parts[node] == parts[head]
            if fits and len(dag.after[previous]) == 1:
                cluster[node] = head
                full[head] += share[node]
    return cluster


def without_pendants(dag: Dag, light: float, kept: Collection[int]) -> list[int]:
    """A cluster for each node, by which a light node with a single edge joins the node at the other
    end of that edge.

    Where there are many such nodes (counters, masks), they alone make too many downsets. ``light``:
    the seconds that all of them may take together. Nodes in ``kept`` join no other.
    """
    cluster = list(range(dag.size))
    before = [set(b) for b in dag.before]
    after = [set(a) for a in dag.after]
    by_weight = sorted(range(dag.size), key=lambda v: (dag.weight[v], v))
    fits = np.cumsum(dag.weight[by_weight]) <= light
    waiting = [v for v, is_light in zip(by_weight, fits, strict=True) if is_light and v not in kept]
    is_light = set(waiting)
    alone: int | None = None  # nodes without any edge go together
    for node in waiting:
        neighbours = before[node] | after[node]
        if len(neighbours) > 1 or node not in is_light:
            continue
        is_light.discard(node)
        if not neighbours:
            alone = node if alone is None else alone
            cluster[node] = alone
            continue
        (other,) = neighbours
        cluster[node] = other
        before[other].discard(node)
        after[other].discard(node)
        if other in is_light:
            waiting.append(other)  # it may have a single edge now
    for node in range(dag.size):
        while cluster[cluster[node]] != cluster[node]:
            cluster[node] = cluster[cluster[node]]
    return cluster


def _shares(dag: Dag) -> list[float]:
    """The share of each node in the whole graph: the mean of its share of the time and its share of
    the number of nodes."""
    total = dag.weight.sum()
    even = np.full(dag.size, 1 / dag.size)
    shares: list[float] = (0.5 * (dag.weight / total if total > 0 else even) + 0.5 * even).tolist()
    return shares


def around(
    dag: Dag, stage: Sequence[int], order: Sequence[int], fine: int
) -> tuple[Dag, list[int]]:
    """The DAG that is coarse except near the boundaries of the stages.

    In each stage the first and the last ``fine`` nodes (by ``order``) stay single. From there to
    the middle of the stage, runs of two, four, eight nodes and so on are merged.
    """
    position = [0] * dag.size
    for i, node in enumerate(order):
        position[node] = i
    cluster = list(range(dag.size))
    members: dict[int, list[int]] = {}
    for node in sorted(range(dag.size), key=position.__getitem__):
        members.setdefault(stage[node], []).append(node)
    for nodes in members.values():
        half = len(nodes) // 2
        for side in nodes[:half], nodes[half:][::-1]:
            for run in _growing(len(side), fine):
                for i in run:
                    cluster[side[i]] = side[run.start]
    return contracted(dag, cluster)


def _growing(count: int, fine: int) -> list[range]:
    runs, start, length = [], 0, 1
    while start < count:
        runs.append(range(start, min(start + length, count)))
        start += length
        if start >= fine:
            length *= 2
    return runs
