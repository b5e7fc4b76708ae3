"""Search: the best cut whose every boundary belongs to a given family of downsets.

If the family has all downsets of the DAG, the result is the best of all cuts; if it has the
beginnings of one topological order, the result is the best cut that is contiguous in that order.

The search has two parts. Dynamic programming over downsets runs from the last stage to the first,
and computes for each boundary how fast the remaining stages can be at best (the method is that of
Tarnawski et al., "Efficient algorithms for device placement of DNN graph operators", 2020). Branch
and bound then runs from the first stage to the last, with these values as its bound. If all links
are alike, the bound is exact, so that the first descent gives the answer. Where they differ, the
bound assumes for each value the best link that it may use.

The compute time of a stage between the downsets I and J is a difference of two sums; its traffic is
a matrix product: a value with d users has one column for each number c < d of users that may lie
before the first boundary, with the entry ``[made in I, c users in I] * [more than c users in J]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from passes.partition.cut.dag import OUTSIDE, ROOM, Dag, Floats, Ints, Machine, prices
from passes.partition.cut.downsets import Family

EQUAL = 1e-9  # relative: sums of the same floats in different orders differ by less than this
BLOCK = 1 << 19  # the number of pairs of downsets that are compared in one step, for memory


@dataclass(frozen=True)
class SearchResult:
    """A cut, as the stage of each node, and a lower bound for the slowest stage of all cuts of the
    family."""

    stage: tuple[int, ...]
    bound: float
    is_proven: bool  # whether the search has looked at all cuts that could be better


class TooMuch(Exception):
    """The search would exceed its limit of steps, or has reached it without finding any cut."""


@dataclass
class Search:
    """The search for the best cut of one DAG on one machine, over one family of downsets.

    Args:
        limit: cuts whose slowest stage takes more seconds than this are not considered.
        pins: the stage of each node that has to be in a certain stage.
        enough: a slower cut that sends fewer bytes is taken only if its slowest stage takes at most
            this many seconds.
        places: ``[downset, boundary]``: whether a downset may be that boundary. None: each downset
            may be any boundary.
        work: the most multiplications that the dynamic program may take.
        visits: the most boundaries that the branch and bound may look at.
    """

    dag: Dag
    machine: Machine
    family: Family
    limit: float = np.inf
    pins: Mapping[int, int] = field(default_factory=dict)
    places: NDArray[np.bool_] | None = None
    enough: float = np.inf
    work: float = np.inf
    visits: int = 2000

    def __post_init__(self) -> None:
        self.bits = self.family.astype(np.float64)
        self.fastest = self.machine.fastest(self.dag)  # [stage, node]
        self.more = np.asarray(self.machine.more)  # [stage]
        self.weights = self.bits @ self.fastest.T  # [downset, stage]
        self.forward = self.bits @ self.dag.forward.T  # [downset, row]
        self.again = self.bits @ self.dag.again.T
        rows = [s % len(self.dag.seconds) for s in range(self.machine.stages)]
        self.once = self.bits @ self.dag.seconds[rows].T  # [downset, stage]
        self.least = self.weights - self.once  # of what is run again
        self.fixed, self.saved = self.bits @ self.dag.fixed, self.bits @ self.dag.saved
        self.products = self.bits @ self.dag.products
        self.count = self.family.sum(axis=1)
        self.small_bits = self.family.astype(np.float32)
        self.by_node = np.ascontiguousarray(self.family.T)
        self._columns()
        self.boundaries = self._boundaries()
        steps = sum(len(a) * len(b) for a, b in pairwise(self.boundaries))
        if steps * (self.dag.size / 4 + 2 * len(self.column)) > self.work:
            raise TooMuch

    # ------------------------------------------------------------------------------- what is where

    def _columns(self) -> None:
        """Make the columns: one for each value and number of its users that lie before a
        boundary."""
        values = [v for v in self.dag.values if len(v.users) > (v.source == OUTSIDE)]
        self.column = np.array([i for i, v in enumerate(values) for _ in v.users], dtype=np.int64)
        self.level = np.array([c for v in values for c in range(len(v.users))], dtype=np.int64)
        self.given = np.array([v.source == OUTSIDE for v in values], dtype=bool)
        self.source = np.array([max(v.source, 0) for v in values], dtype=np.int64)
        self.size = np.array([v.size for v in values])
        self.volume = np.array([v.volume for v in values])
        self.tensors = np.array([v.count for v in values], dtype=np.float64)
        is_once = np.array([v.once for v in values], dtype=bool)
        self.taken_in = np.where(is_once, 0.0, self.size)
        self.stays = np.where(is_once, self.volume, 0.0)
        self.used = used = self._counted([v.users for v in values])
        self.made = self.family[:, self.source] | self.given[None, :]
        self.live = self.made & (used < np.array([len(v.users) for v in values])[None, :])
        # ``[downset, column]``: whether the next user is in a downset, or the value only.
        self.has_next = used[:, self.column] > self.level
        self.crosses = self.made[:, self.column] & (used[:, self.column] == self.level)
        # An input of the model goes straight to its first user, so that this way costs nothing.
        self.moves = np.where(self.given[self.column] & (self.level == 0), 0.0, 1.0)
        self._kept()
        self._units()
        inputs = [v for v in self.dag.values if v.source == OUTSIDE]
        self.inputs = np.array([v.size for v in inputs])
        self.begun = (self._counted([v.users for v in inputs]) > 0).astype(np.float64)

    def _counted(self, groups: Sequence[Sequence[int]]) -> NDArray[np.int32]:
        """``[downset, group]``: how many nodes of each group a downset has."""
        counted = np.zeros((len(groups), len(self.family)), dtype=np.int32)
        for i, nodes in enumerate(groups):
            self.by_node[list(nodes)].sum(axis=0, out=counted[i], dtype=np.int32)
        return np.ascontiguousarray(counted.T)

    def _kept(self) -> None:
        """Make the columns for memory that several nodes keep for the backward, as :meth:`_columns`
        does for values."""
        kept = self.dag.kept
        self.keepers = self._counted([k.nodes for k in kept])
        self.keeper = np.array([i for i, k in enumerate(kept) for _ in k.nodes], dtype=np.int64)
        self.rank = np.array([c for k in kept for c in range(len(k.nodes))], dtype=np.int64)
        self.kept_size = np.array([k.size for k in kept for _ in k.nodes])

    def _units(self) -> None:
        """Make the columns for units, as :meth:`_kept` does for memory."""
        units = self.dag.units
        self.parts = self._counted([unit.nodes for unit in units])
        self.unit = np.array([i for i, u in enumerate(units) for _ in u.nodes], dtype=np.int64)
        self.part = np.array([c for u in units for c in range(len(u.nodes))], dtype=np.int64)
        self.penalty = np.array([u.penalty for u in units for _ in u.nodes])

    def _best_links(self, stage: int) -> tuple[Floats, Floats]:
        """The seconds of one hop of each value into a stage, and out of it, over the best links."""
        m = self.machine
        assert m.bandwidth is not None and m.latency is not None

        def seconds(bandwidth: Floats, latency: Floats) -> Floats:
            if not len(bandwidth):
                return np.zeros(len(self.size))
            found: Floats = self.volume / bandwidth.max() + self.tensors * latency.min()
            return found

        enter = seconds(m.bandwidth[:stage, stage], m.latency[:stage, stage])
        leave = seconds(m.bandwidth[stage, stage + 1 :], m.latency[stage, stage + 1 :])
        return enter, leave

    @cached_property
    def are_links_alike(self) -> bool:
        """Whether it makes no difference to a value between which stages it travels."""
        m = self.machine
        assert m.bandwidth is not None and m.latency is not None and m.apart is not None
        between = ~np.eye(m.stages, dtype=bool)
        return all(len(np.unique(each[between])) <= 1 for each in (m.bandwidth, m.latency, m.apart))

    def _boundaries(self) -> list[Ints]:
        """The downsets that may be the boundary before stage 0, 1, ...: those for which neither the
        stages before the boundary nor the stages after it exceed the limit, even at best."""
        k, rows, n = self.machine.stages, self.fastest, self.dag.size
        found: list[Ints] = [np.flatnonzero(self.count == 0)]
        for s in range(1, k):
            early, late = rows[:s].min(axis=0), rows[s:].min(axis=0)
            behind, ahead = self.bits @ early, self.bits @ late
            fits = (behind <= s * self.limit * (1 + EQUAL)) & (
                late.sum() - ahead <= (k - s) * self.limit * (1 + EQUAL) + EQUAL * late.sum()
            )
            fits &= (self.count >= s) & (self.count <= n - (k - s))
            for node, stage in self.pins.items():
                fits &= self.family[:, node] == (stage < s)
            if self.places is not None:
                fits &= self.places[:, s]
            where = np.flatnonzero(fits)
            found.append(where[np.argsort(self._weight(s, where), kind="stable")])
        found.append(np.flatnonzero(self.count == n))
        return found

    def _weight(self, stage: int, where: Ints) -> Floats:
        """The seconds that nodes before a boundary take, the way that takes least time."""
        weights: Floats = self.weights[where, stage]
        return weights

    # ------------------------------------------------------------------------------ what it costs

    def _between(
        self, stage: int, first: Ints, then: Ints, limit: float
    ) -> tuple[Floats, NDArray[np.bool_]]:
        """The seconds of a stage between the downsets ``[first, then]``, inf where there can be no
        such stage; and whether the stage is possible within the limit."""
        compute = self._weight(stage, then)[None, :] - self._weight(stage, first)[:, None]
        compute += self.more[stage]
        can = compute <= limit * (1 + EQUAL)
        can &= self.count[first][:, None] < self.count[then][None, :]
        can &= self._are_within(first, then)
        compute += self._taken_again(stage, first, then, can)
        can &= compute <= limit * (1 + EQUAL)
        if can.any() and len(self.column) and self._links_matter(stage):
            np.maximum(compute, self._link(stage, first, then), out=compute)
            can &= compute <= limit * (1 + EQUAL)
        times = np.maximum(compute, 0.0, out=compute)
        times[~can] = np.inf
        return times, can

    def _are_within(self, first: Ints, then: Ints) -> NDArray[np.bool_]:
        """Which of the downsets ``first`` are part of which of the downsets ``then``.

        A node that is in none of the former, or in all of the latter, cannot say otherwise, so that
        few nodes are left where the boundaries of a stage are near each other.
        """
        nodes = np.flatnonzero(self.family[first].any(axis=0) & ~self.family[then].all(axis=0))
        inside = self.small_bits[np.ix_(first, nodes)]
        outside = 1 - self.small_bits[np.ix_(then, nodes)]
        # OpenBLAS may say "invalid value" of products of finite numbers, which it computes right
        # (https://github.com/numpy/numpy/issues/24067).
        with np.errstate(invalid="ignore"):
            within: NDArray[np.bool_] = (inside @ outside.T) == 0
        return within

    def _links_matter(self, stage: int) -> bool:
        return any(seconds.any() for seconds in self._best_links(stage))

    def _waits(self, first: Ints) -> tuple[Ints, Floats]:
        """The columns of values that cross any of these boundaries, and a matrix that says which
        value crosses which boundary. The columns are few where the boundaries are near each other,
        since values that are made after all of them cross none."""
        waits = self.crosses[first]
        columns = np.flatnonzero(waits.any(axis=0))
        return columns, waits[:, columns].astype(np.float64)

    def _comes(self, then: Ints, columns: Ints) -> NDArray[np.bool_]:
        """Whether the next user of each column lies before the boundary ``then``."""
        comes: NDArray[np.bool_] = self.has_next[np.ix_(then, columns)]
        return comes

    def _link(self, stage: int, first: Ints, then: Ints) -> Floats:
        enter, leave = self._best_links(stage)
        columns, waits = self._waits(first)
        values, live = self.column[columns], self.live[then]
        going = live[:, values] * leave[values]  # the stage sends on a value that later stages use
        arriving = enter[values] * self.moves[columns] + going
        total: Floats = waits @ (self._comes(then, columns) * arriving).T
        leaving = np.flatnonzero(live.any(axis=0))
        made_here = ~self.made[np.ix_(first, leaving)]
        total += made_here.astype(np.float64) @ (live[:, leaving] * leave[leaving]).T
        return total

    def _sent(self, first: Ints, then: Ints, sizes: Floats | None = None) -> Floats:
        """The bytes that a stage between two downsets receives from other stages.

        ``sizes``: numbers, one for each value, that are summed in place of the values' bytes."""
        if not len(self.column):
            return np.zeros((len(first), len(then)))
        columns, waits = self._waits(first)
        each = (self.size if sizes is None else sizes)[self.column[columns]] * self.moves[columns]
        total: Floats = waits @ (self._comes(then, columns) * each).T
        return total

    def _disliked(self, stage: int, first: Ints, then: Ints) -> Floats:
        """By what cuts are compared that are equally fast: the bytes that a stage between two
        downsets receives, the penalties of the units of which it has a part, and that of having
        next to nothing to do."""
        total = self._sent(first, then)
        if self.machine.idle_penalty:
            seconds = self.once[then, stage][None, :] - self.once[first, stage][:, None]
            is_idle = seconds + self.more[stage] < self.machine.idle_below
            total = total + self.machine.idle_penalty * is_idle
        if len(self.part):
            waits = self.parts[first][:, self.unit] == self.part
            begun = np.flatnonzero(waits.any(axis=0))
            comes = self.parts[np.ix_(then, self.unit[begun])] > self.part[begun]
            total = total + waits[:, begun].astype(np.float64) @ (comes * self.penalty[begun]).T
        return total

    def _taken_again(
        self, stage: int, first: Ints, then: Ints, can: NDArray[np.bool_]
    ) -> Floats | float:
        """The seconds by which a stage between two downsets takes longer than it would by the way
        that takes least time, since its memory has room for other ways only; inf where it has room
        for none. They are computed where the stage ``can`` be."""
        m = self.machine
        assert m.memory is not None
        if np.isinf(m.memory[stage]):
            return 0.0
        found = np.full(can.shape, np.inf)
        where = np.nonzero(can)
        begin, end = first[where[0]], then[where[1]]
        fixed, saved, taken_in = (
            each[where] if isinstance(each, np.ndarray) else each
            for each in self._bytes(stage, first, then)
        )
        forward = self._of_row(self.forward, stage, begin, end)
        again = self._of_row(self.again, stage, begin, end)
        least = self._of_row(self.least, stage, begin, end)
        more = np.full(len(begin), np.inf)
        by_host = m.by_host[:, stage]
        # Ways that compute little again come first: where one of them fits, most others need not be
        # looked at.
        for way in np.lexsort((m.selective[:, stage], m.again[:, stage])):
            need = m.held[way, stage] * saved
            need += fixed
            if m.received[way, stage]:
                need += m.received[way, stage] * taken_in
            need += m.beside[way, stage]
            if m.products[way, stage]:
                need += m.products[way, stage] * (self.products[end] - self.products[begin])
            fits = need <= m.memory[stage] * ROOM
            takes = m.again[way, stage] * forward
            if m.selective[way, stage]:
                takes += m.selective[way, stage] * again
            takes -= least
            if by_host[way]:
                weights = self._weight(stage, end) - self._weight(stage, begin) + self.more[stage]
                takes = np.maximum(takes, by_host[way] * saved - weights)
            np.minimum(more, takes, out=more, where=fits)
            if not (more > 0).any():
                break  # no way takes less time
        found[where] = more
        return found

    def _of_row(self, sums: Floats, stage: int, begin: Ints, end: Ints) -> Floats:
        """The seconds of a stage from each downset in ``begin`` to the one beside it in ``end``,
        from sums over the nodes of downsets."""
        row = sums[:, stage % sums.shape[1]]
        between: Floats = row[end] - row[begin]
        return between

    def _bytes(self, stage: int, first: Ints, then: Ints) -> tuple[Floats, Floats, Floats | float]:
        """What a stage between two downsets occupies whatever the schedule, what it saves for the
        backward of a mini-batch, and what it receives for it."""
        m = self.machine
        assert m.apart is not None
        fixed = self.fixed[then][None, :] - self.fixed[first][:, None]
        saved = self.saved[then][None, :] - self.saved[first][:, None]
        if len(self.rank):
            waits = self.keepers[first][:, self.keeper] == self.rank
            kept = np.flatnonzero(waits.any(axis=0))
            comes = self.keepers[np.ix_(then, self.keeper[kept])] > self.rank[kept]
            saved = saved + waits[:, kept].astype(np.float64) @ (comes * self.kept_size[kept]).T
        # A value that stays takes memory, whichever of the stages on other devices sends it.
        if self.stays.any() and m.apart[:stage, stage].any():
            fixed = fixed + self._sent(first, then, self.stays)
        if not m.received[:, stage].any():
            return fixed, saved, 0.0
        taken_in = self._sent(first, then, self.taken_in)
        taken_in += ((1 - self.begun[first]) * self.inputs) @ self.begun[then].T
        return fixed, saved, taken_in

    # ------------------------------------------------------------------------------------ the walk

    def _blocks(self, stage: int) -> Iterator[tuple[slice, slice]]:
        """The pairs of boundaries between which a stage may lie, in blocks. Boundaries are sorted
        by the time of what lies before them, so that pairs that are too far apart are left out."""
        first, then = self.boundaries[stage], self.boundaries[stage + 1]
        if not len(first) or not len(then):
            return
        lower = self._weight(stage, first)
        upper = self._weight(stage, then)
        is_sorted = bool((np.diff(lower) >= 0).all() and (np.diff(upper) >= 0).all())
        rows = max(1, BLOCK // len(then))
        for start in range(0, len(first), rows):
            block = slice(start, min(start + rows, len(first)))
            here = slice(0, len(then))
            if is_sorted:
                tiny = EQUAL * (1 + abs(upper[-1]))
                low = int(np.searchsorted(upper, lower[block.start] - tiny))
                top = lower[block.stop - 1] + self.limit * (1 + EQUAL) + tiny
                here = slice(low, int(np.searchsorted(upper, top, side="right")))
            if here.stop > here.start:
                yield block, here

    def _backwards(self, limit: float, by_bytes: bool) -> list[Floats]:
        """For each boundary and downset, a lower bound for the stages after it: on the time of the
        slowest of them or, with ``by_bytes``, on the bytes that they receive, and on their
        penalties. No stage may take longer than ``limit``.
        """
        k = self.machine.stages
        best = [np.full(len(b), np.inf) for b in self.boundaries]
        best[k][:] = 0.0
        for stage in reversed(range(k)):
            first, then = self.boundaries[stage], self.boundaries[stage + 1]
            for rows, columns in self._blocks(stage):
                times, can = self._between(stage, first[rows], then[columns], limit)
                if not can.any():
                    continue
                after = best[stage + 1][columns][None, :]
                if by_bytes:
                    value = self._disliked(stage, first[rows], then[columns])
                    value += after
                    value[~can] = np.inf
                else:
                    value = np.maximum(times, after, out=times)
                best[stage][rows] = np.minimum(best[stage][rows], value.min(axis=1))
        return best

    def run(self, slack: float = 0.0) -> SearchResult | None:
        """The best cut, or None if there is none within ``limit``.

        Among all cuts whose slowest stage is slower than the best by at most the fraction
        ``slack``, it is one that sends the fewest bytes.
        """
        to_go = self._backwards(self.limit, by_bytes=False)
        bound = float(to_go[0][0]) if len(to_go[0]) else np.inf
        if np.isinf(bound):
            return None
        fastest = _Descent(self, to_go, self.limit, by_bytes=False)
        if fastest.best is None:
            if not fastest.is_done:
                raise TooMuch
            return None
        allowed = max(fastest.key, min(fastest.key * (1 + slack), self.limit, self.enough))
        return SearchResult(
            self.lightest(fastest.best, allowed),
            fastest.key if fastest.is_done else bound,
            fastest.is_done,
        )

    def lightest(self, known: tuple[int, ...], allowed: float) -> tuple[int, ...]:
        """The cut that sends fewest bytes of those whose slowest stage takes at most ``allowed``
        seconds; ``known`` is such a cut."""
        to_go = self._backwards(allowed, by_bytes=True)
        found = _Descent(self, to_go, allowed, by_bytes=True, best=known).best
        assert found is not None
        return found


class _Descent:
    """Branch and bound from the first boundary to the last; ``best`` is the best cut so far."""

    def __init__(
        self,
        search: Search,
        to_go: Sequence[Floats],
        limit: float,
        by_bytes: bool,
        best: tuple[int, ...] | None = None,
    ) -> None:
        self.search, self.to_go, self.limit, self.by_bytes = search, to_go, limit, by_bytes
        self.best = best
        self.key = np.inf if best is None else self._key(best)
        self.visits = 0
        self.is_done = True
        self._down([0], 0.0)

    def _down(self, path: list[int], so_far: float) -> None:
        s, search = len(path) - 1, self.search
        if s == search.machine.stages:
            self._arrive(path)
            return
        self.visits += 1
        if self.visits > search.visits:
            self.is_done = False
            return
        first = search.boundaries[s][path[-1] : path[-1] + 1]
        then = search.boundaries[s + 1]
        times, can = search._between(s, first, then, self.limit)
        after = self.to_go[s + 1]
        if self.by_bytes:
            value = so_far + search._disliked(s, first, then)[0] + after
        else:
            value = np.maximum(np.maximum(times[0], after), so_far)
        value = np.where(can[0], value, np.inf)
        for choice in np.argsort(value, kind="stable"):
            if not value[choice] < np.inf or self._is_no_better(float(value[choice])):
                return
            here = so_far
            if self.by_bytes:
                here = float(value[choice] - after[choice])
            # Where all links are alike, what a stage takes is known of its boundaries alone.
            is_known = search.are_links_alike
            partial = times[0][choice] if is_known else self._slowest([*path, int(choice)])
            if partial > self.limit * (1 + EQUAL):
                continue
            if not self.by_bytes:
                here = max(so_far, float(partial))
                if self._is_no_better(here):
                    continue
            self._down([*path, int(choice)], here)

    def _is_no_better(self, key: float) -> bool:
        return self.best is not None and key >= self.key * (1 - EQUAL)

    def _arrive(self, path: list[int]) -> None:
        self.best = self._labels(path)
        self.key = self._key(self.best)

    def _key(self, stage: tuple[int, ...]) -> float:
        found = prices(self.search.dag, self.search.machine, stage)
        return found.dislike if self.by_bytes else found.slowest

    def _slowest(self, path: list[int]) -> float:
        return prices(self.search.dag, self.search.machine, self._labels(path)).slowest

    def _labels(self, path: list[int]) -> tuple[int, ...]:
        label = np.full(self.search.dag.size, -1)
        for s, (i, j) in enumerate(pairwise(path)):
            a, b = self.search.boundaries[s][i], self.search.boundaries[s + 1][j]
            label[self.search.family[b] & ~self.search.family[a]] = s
        return tuple(int(x) for x in label)
