"""Downsets: the sets of nodes that may lie before a stage boundary.

::

    a ─ b ─┐          {}  {a}  {a b}  {a c}  {a b c}  {a b c d}
    └── c ─ d         a downset has, with each of its nodes, all predecessors of the node

A cut into k stages is a chain of k + 1 downsets, from the empty one to that of all nodes. A family
of downsets is a matrix of bools: a row for each downset, and a column for each node.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
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
    every = _Grown(dag, np.zeros(dag.size, dtype=bool), limit)
    return every.family if all(map(every.add, range(dag.size))) else None


def downsets_near(dag: Dag, downset: NDArray[np.bool_], limit: int, rng: random.Random) -> Family:
    """Downsets that differ from the given one in nodes near its border.

    Nodes are drawn from the border inwards and outwards, as many as give no more than ``limit``.
    """
    inner = _peeled(downset, dag.before, dag.after, rng)
    outer = _peeled(~downset, dag.after, dag.before, rng)
    turns = (node for pair in zip_longest(inner, outer) for node in pair if node is not None)
    near = _Grown(dag, downset, limit)
    for node in list(islice(turns, limit)):
        # All nodes between this one and the border have been freed before it.
        if not (near.remove(node) if downset[node] else near.add(node)):
            break
    return near.family


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


class _Grown:
    """Downsets that are made of the first one by freeing nodes, one after the other: the node is
    added to each downset so far, or taken out of it. There are no more than ``limit``."""

    def __init__(self, dag: Dag, first: NDArray[np.bool_], limit: int) -> None:
        self.dag, self.limit, self.count = dag, limit, 1
        self.sets = np.zeros((min(limit, 64), -(-dag.size // WORD)), dtype=np.uint64)
        self.sets[0] = _packed(first[None, :])[0]

    def add(self, node: int) -> bool:
        """Add the node to each downset that has all its predecessors. False, and nothing changes,
        if that makes too many."""
        may = np.ones(self.count, dtype=bool)
        for word, mask in _masks(self.dag.before[node]):
            may &= (self.sets[: self.count, word] & mask) == mask
        return self._changed(np.flatnonzero(may), node)

    def remove(self, node: int) -> bool:
        """Take the node out of each downset that has none of its successors, as :meth:`add`
        does."""
        may = np.ones(self.count, dtype=bool)
        for word, mask in _masks(self.dag.after[node]):
            may &= (self.sets[: self.count, word] & mask) == 0
        return self._changed(np.flatnonzero(may), node)

    def _changed(self, which: NDArray[np.int64], node: int) -> bool:
        """Make a downset of each of these by adding the node, or by taking it out."""
        total = self.count + len(which)
        if total > self.limit:
            return False
        if total > len(self.sets):
            room = min(self.limit, max(total, 2 * len(self.sets)))
            larger = np.zeros((room, self.sets.shape[1]), dtype=np.uint64)
            larger[: self.count] = self.sets[: self.count]
            self.sets = larger
        self.sets[self.count : total] = self.sets[which]
        self.sets[self.count : total, node // WORD] ^= np.uint64(1 << (node % WORD))
        self.count = total
        return True

    @property
    def family(self) -> Family:
        """All downsets that have been made, as the rows of a matrix."""
        return _unpacked(self.sets[: self.count], self.dag.size)


def _masks(nodes: Iterable[int]) -> Iterator[tuple[int, np.uint64]]:
    """The words that have these nodes, each with their bits."""
    bits: dict[int, int] = {}
    for node in nodes:
        bits[node // WORD] = bits.get(node // WORD, 0) | (1 << (node % WORD))
    return ((word, np.uint64(mask)) for word, mask in bits.items())


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
