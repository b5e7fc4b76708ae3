"""Downsets: the sets of nodes that may lie before a stage boundary.

::

    a ─ b ─┐          {}  {a}  {a b}  {a c}  {a b c}  {a b c d}
    └── c ─ d         a downset has, with each of its nodes, all predecessors of the node

A cut into k stages is a chain of k + 1 downsets, from the empty one to that of all nodes. A family
of downsets is a matrix of bools: a row for each downset, and a column for each node.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice, zip_longest

import numpy as np
from numpy.typing import NDArray

from passes.partition.cut.dag import Dag

Family = NDArray[np.bool_]
WORD = 64


def all_downsets(dag: Dag, limit: int) -> Family | None:
    """Every downset, or None if there are more than ``limit``.

    They are made node by node, in topological order: to each downset of the nodes so far the next
    node may be added or not, if the downset has all its predecessors. So each is made once.
    """
    return _grown(dag, np.zeros(dag.size, dtype=bool), range(dag.size), limit)


def downsets_near(dag: Dag, downset: NDArray[np.bool_], limit: int, rng: random.Random) -> Family:
    """Downsets that differ from the given one in nodes near its border.

    Nodes are drawn from the border inwards and outwards, as many as give no more than ``limit``.
    """
    inner = _peeled(downset, dag.before, dag.after, rng)
    outer = _peeled(~downset, dag.after, dag.before, rng)
    turns = (node for pair in zip_longest(inner, outer) for node in pair if node is not None)
    nodes = list(islice(turns, limit))

    def grown(count: int) -> Family | None:
        base = downset.copy()
        base[nodes[:count]] = False
        return _grown(dag, base, sorted(nodes[:count]), limit)

    family, low, high = downset[None, :], 0, len(nodes) + 1
    while high - low > 1:
        middle = min((low + high) // 2, 2 * low + 4)
        larger = grown(middle)
        if larger is None:
            high = middle
        else:
            low, family = middle, larger
    return family


def _peeled(
    part: NDArray[np.bool_],
    inner: Sequence[Sequence[int]],
    outer: Sequence[Sequence[int]],
    rng: random.Random,
) -> Iterator[int]:
    """The nodes of a part in an order that leads away from its border: each node comes after all
    nodes that lie between it and the border."""
    inside = [int(n) for n in np.flatnonzero(part)]
    left = {n: sum(bool(part[m]) for m in outer[n]) for n in inside}
    ready = [n for n, count in left.items() if not count]
    while ready:
        # Nodes that have been ready for long tend to be taken first, so that the nodes taken form
        # a ball around the border; the draw makes it another ball each time.
        node = ready.pop(min(rng.randrange(len(ready)), rng.randrange(len(ready))))
        yield node
        for other in inner[node]:
            if other in left:
                left[other] -= 1
                if not left[other]:
                    ready.append(other)


def _grown(dag: Dag, base: NDArray[np.bool_], free: Sequence[int], limit: int) -> Family | None:
    """All downsets that consist of ``base`` and some of the free nodes; None if there are more than
    ``limit``."""
    words = -(-dag.size // WORD)
    sets = np.zeros((min(limit, 64), words), dtype=np.uint64)
    sets[0] = _packed(base[None, :])[0]
    count = 1
    for node in free:
        may = np.ones(count, dtype=bool)
        needed: dict[int, int] = {}
        for u in dag.before[node]:
            needed[u // WORD] = needed.get(u // WORD, 0) | (1 << (u % WORD))
        for word, bits in needed.items():
            mask = np.uint64(bits)
            may &= (sets[:count, word] & mask) == mask
        taking = np.flatnonzero(may)
        total = count + len(taking)
        if total > limit:
            return None
        if total > len(sets):
            larger = np.zeros((min(limit, max(total, 2 * len(sets))), words), dtype=np.uint64)
            larger[:count] = sets[:count]
            sets = larger
        sets[count:total] = sets[taking]
        sets[count:total, node // WORD] |= np.uint64(1 << (node % WORD))
        count = total
    return _unpacked(sets[:count], dag.size)


def _packed(family: Family) -> NDArray[np.uint64]:
    words = -(-family.shape[1] // WORD)
    bits = np.zeros((len(family), words * WORD), dtype=np.uint8)
    bits[:, : family.shape[1]] = family
    return np.packbits(bits, axis=1, bitorder="little").view("<u8").astype(np.uint64)


def _unpacked(sets: NDArray[np.uint64], size: int) -> Family:
    octets = np.ascontiguousarray(sets.astype("<u8")).view(np.uint8)
    return np.unpackbits(octets, axis=1, count=size, bitorder="little").astype(bool)


def prefixes(order: Sequence[int]) -> Family:
    """The downsets that are the beginnings of a topological order."""
    n = len(order)
    family = np.zeros((n + 1, n), dtype=bool)
    place = np.empty(n, dtype=np.int64)
    place[np.asarray(order, dtype=np.int64)] = np.arange(n)
    family[:] = place[None, :] < np.arange(n + 1)[:, None]
    return family


def united(*families: Family) -> Family:
    """The union of families, without duplicates, sorted by size. The order does not depend on that
    of the families."""
    sets = np.unique(_packed(np.concatenate(families)), axis=0)
    family = _unpacked(sets, families[0].shape[1])
    smaller_first: Family = family[np.argsort(family.sum(axis=1), kind="stable")]
    return smaller_first


def members(family: Family, part: Family) -> NDArray[np.bool_]:
    """For each member of a family whether it is a member of another family too."""
    known = {row.tobytes() for row in _packed(part)}
    return np.array([row.tobytes() in known for row in _packed(family)], dtype=bool)
