"""Bounds: lower bounds on the time of the slowest stage, which hold for every cut.

The result is the largest of four bounds. The first is the total work divided evenly among the
stages, and the second the time of the heaviest node. The third is what the last stage takes beside
its nodes, and one of those that no other node uses, since it has one. The fourth takes the graph
for a row of atoms and fluid: an atom is a node that is ordered before or after every other node (in
a residual net most nodes are), which cannot be divided; the nodes between two atoms count as a
fluid, which can be divided anywhere. The row fits a limit if the stages, filled one after the other
up to the limit, have room for it; the bound is the smallest limit that it fits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from passes.partition.cut.dag import Dag, Floats, Machine

PRECISION = 1e-6


def lower_bound(dag: Dag, machine: Machine) -> float:
    """Seconds that the slowest stage of any cut takes at least."""
    rows, more = machine.fastest(dag), np.asarray(machine.more)
    last = min((float(rows[-1, node]) for node, after in enumerate(dag.after) if not after))
    low = max(least_share(dag, machine), last + float(more[-1]))
    sums = np.concatenate([np.zeros((len(rows), 1)), rows.cumsum(axis=1)], axis=1)
    is_atom = np.array(_atoms(dag), dtype=bool)
    high = max(low, float((rows.sum(axis=1) + more).min()))
    if _fits(sums, more, is_atom, low * (1 + PRECISION)):
        return low
    while high > low * (1 + PRECISION):
        middle = (low + high) / 2
        if _fits(sums, more, is_atom, middle):
            high = middle
        else:
            low = middle
    return low


def least_share(dag: Dag, machine: Machine) -> float:
    """Seconds that the busiest of several lanes works at least, whatever parts of the graph each of
    them has: it is the larger one of the first two bounds. The stages of ``machine`` are the lanes.
    """
    rows, more = machine.fastest(dag), np.asarray(machine.more)
    heaviest = float(rows.min(axis=0).max(initial=0.0))
    return max(_shared_out(rows, more), heaviest, float(more.max()))


def _shared_out(rows: Floats, more: Floats) -> float:
    """The bound that the total work sets, if it can be divided freely among the stages.

    For any weights of the stages that sum to one, the sum over nodes of the least weighted time
    is a bound (linear programming duality); with weights that are the stages' speeds it is the
    even share where their times are in proportion.
    """
    totals = rows.sum(axis=1)
    if not totals.min() > 0:
        return 0.0
    speed = (1 / totals) / (1 / totals).sum()
    return float((rows * speed[:, None]).min(axis=0).sum() + speed @ more)


def _atoms(dag: Dag) -> list[bool]:
    """For each node whether it is ordered before or after every other one.

    In a topological order this is so if each earlier node is used by some node no later than this
    one, and each later node uses some node no earlier than this one.
    """
    n = dag.size
    first_use = [min(after, default=n) for after in dag.after]
    last_need = [max(before, default=-1) for before in dag.before]
    reaches, latest = [True] * n, -1
    for i in range(n):
        reaches[i] = latest <= i
        latest = max(latest, first_use[i])
    needs, earliest = [True] * n, n
    for i in reversed(range(n)):
        needs[i] = earliest >= i
        earliest = min(earliest, last_need[i])
    return [a and b for a, b in zip(reaches, needs, strict=True)]


def _fits(sums: Floats, more: Floats, is_atom: NDArray[np.bool_], limit: float) -> bool:
    """Whether the row of atoms and fluid fits into the stages, if none takes longer than ``limit``.

    ``sums[s, i]``: the seconds that the nodes before the i-th take on stage s; ``more[s]``: those
    that the stage takes beside.
    """
    n = len(is_atom)
    node, part = 0, 0.0  # how far the stages so far have come: into this node, by this fraction
    for row, beside in zip(sums, more, strict=True):
        end = row[node] + part * (row[node + 1] - row[node]) + limit - beside
        node = int(np.searchsorted(row, end, side="right")) - 1
        if node >= n:
            return True
        part = 0.0 if is_atom[node] else float((end - row[node]) / (row[node + 1] - row[node]))
    return False


def gap(slowest: float, bound: float) -> float:
    """The fraction of the bound by which the slowest stage of a cut is slower than the bound."""
    return max(0.0, slowest / bound - 1) if bound > 0 else (0.0 if slowest <= 0 else float(np.inf))
