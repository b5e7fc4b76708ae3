"""Solve: the best cut of a DAG into stages, with a bound that says how good it is.

Small or narrow graphs are solved exactly, by a search over all their downsets. For other graphs the
search runs over the beginnings of several topological orders, and then over the downsets near the
boundaries of the best cut so far, as long as that improves it. Large graphs are coarsened first,
and made fine again near the boundaries.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from passes.partition.cut.bounds import gap, lower_bound
from passes.partition.cut.coarsen import (
    around,
    coarsened,
    depth_first,
    orders,
    rows,
    without_pendants,
)
from passes.partition.cut.contract import contracted
from passes.partition.cut.dag import Dag, Machine, Prices, prices
from passes.partition.cut.downsets import (
    Family,
    all_downsets,
    downsets_near,
    members,
    prefixes,
    united,
)
from passes.partition.cut.pins import cut_by_pins, stages_allowed
from passes.partition.cut.search import EQUAL, Search, TooMuch

DOWNSETS = 20_000  # a graph with more downsets than these is not solved exactly
WORK = 5e9  # the most multiplications of one search
LARGE = 400  # a graph with more nodes than these is coarsened
VISITS = 200  # the most boundaries that one inexact search may look at
NEAR = 8000  # the most downsets near all boundaries together that one search looks at
PATIENCE = 4  # the search ends after so many rounds without an improvement
LIGHT = 1e-3  # of the bound: the time of all nodes together that the exact path leaves aside
FINE = 12  # the nodes on each side of a boundary that are not coarsened

T = TypeVar("T")


@dataclass(frozen=True)
class Effort:
    """Limits on the time that solving takes. ``downsets=0`` switches the exact path off.
    ``is_readable``: of cuts that are about as fast, one is looked for whose boundaries are easy to
    read."""

    downsets: int = DOWNSETS
    work: float = WORK
    large: int = LARGE
    near: int = NEAR
    patience: int = PATIENCE
    is_readable: bool = True


QUICK = Effort(downsets=1000, work=1e8, near=100, patience=1, is_readable=False)
"""Finds a cut that is nearly as fast in a small part of the time: enough to tell what fits."""


@dataclass(frozen=True)
class Cut:
    """The stage of each node, what that costs, and how good it is.

    ``bound``: the slowest stage of every cut takes at least so many seconds. ``is_exact``: the
    search has covered all cuts (except, perhaps, for the stages of very light nodes with a single
    edge), so that the bound is the time of the fastest cut.
    """

    stage: tuple[int, ...]
    prices: Prices
    bound: float
    is_exact: bool

    @property
    def gap(self) -> float:
        """The slowest stage is at most this fraction slower than the best possible."""
        return gap(self.prices.slowest, self.bound)


@dataclass(frozen=True)
class Task:
    """The part of the problem that stays the same while the DAG is coarsened and refined."""

    machine: Machine
    slack: float = 0.0
    pins: Mapping[int, int] = field(default_factory=dict)
    effort: Effort = Effort()
    enough: float = np.inf  # seconds, as for :class:`Search`
    bound: float = 0.0  # seconds; no cut is faster
    limit: float = np.inf  # seconds; slower cuts are not considered


def solve(
    dag: Dag,
    machine: Machine,
    *,
    slack: float = 0.0,
    pins: Mapping[int, int] | None = None,
    effort: Effort | None = None,
    limit: float = np.inf,
) -> Cut | None:
    """The cut whose slowest stage is fastest or, with a slack, a cut that is nearly as fast.

    The objective is lexicographic. First, the slowest stage takes at most ``1 + slack`` times as
    long as that of the fastest cut. Second, the bytes that are sent, plus the penalties of the
    DAG's units, are as few as possible. Both are exact if the result says ``is_exact``.

    Args:
        pins: the stages of some nodes.
        limit: seconds; cuts whose slowest stage takes longer are not considered.

    The result is None if no cut fits the memory, the pins and the limit or, for a graph that is not
    solved exactly, if the search has found none that does.
    """
    if dag.size < machine.stages or not _may_fit(dag, machine):
        return None
    if pins and stages_allowed(dag, pins, machine.stages) is None:
        return None
    bound = lower_bound(dag, machine)
    if bound > limit * (1 + EQUAL):
        return None
    enough = min(bound * (1 + slack), limit)
    task = Task(machine, slack, pins or {}, effort or Effort(), enough, bound, limit)
    found = _in_order(dag, task) or _by_pins(dag, task)
    answer = _exact(dag, task, found)
    if answer is not None:
        return answer.cut
    found = _searched_for(dag, task, found)
    if dag.size <= task.effort.large:
        answer = _exact(dag, task, found)  # a better cut leaves fewer downsets to search
        if answer is not None:
            return answer.cut
    if slack and found is not None and not _is_enough(dag, task, found):
        # The bound cannot be reached: the slack is one of the fastest cut that has been found.
        slowest = prices(dag, machine, found).slowest
        task = replace(task, enough=min(slowest * (1 + slack), limit))
        found = _better(dag, task, _searched_for(dag, task, found), found)
    if found is None or not (priced := prices(dag, machine, found)).slowest <= limit * (1 + EQUAL):
        return None
    return Cut(found, priced, bound, False)


def _searched_for(dag: Dag, task: Task, found: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The best cut that the inexact search finds; ``found`` is the best one so far."""
    if dag.size <= task.effort.large:
        return _improved(dag, task, _lines(dag, task, found))
    if found is not None and _is_enough(dag, task, found):
        return found
    return _better(dag, task, _multilevel(dag, task), found)


def solve_in_order(
    dag: Dag,
    machine: Machine,
    *,
    slack: float = 0.0,
    pins: Mapping[int, int] | None = None,
    enough: float = np.inf,
    limit: float = np.inf,
) -> tuple[int, ...] | None:
    """The cut whose slowest stage is fastest, among those that are contiguous in the order of the
    nodes; see :func:`solve`.

    A slower cut that sends fewer bytes is taken only if its slowest stage takes at most ``enough``
    seconds.
    """
    if dag.size < machine.stages:
        return None
    return _in_order(dag, Task(machine, slack, pins or {}, enough=enough, limit=limit))


def can_fit(
    dag: Dag,
    machine: Machine,
    pins: Mapping[int, int] | None = None,
    effort: Effort | None = None,
) -> bool:
    """Whether there is a cut that fits the memory and the pins, however slow.

    For large graphs only cuts in the order of the nodes are tried, since one of these nearly always
    fits if any cut does; a False may be wrong for them, and where ``effort`` limits the search.
    """
    machine = replace(machine, bandwidth=None, latency=None)  # links take no memory
    if dag.size < machine.stages or not _may_fit(dag, machine):
        return False
    if solve_in_order(dag, machine, pins=pins) is not None:
        return True
    return dag.size <= LARGE and solve(dag, machine, pins=pins, effort=effort) is not None


def _in_order(dag: Dag, task: Task) -> tuple[int, ...] | None:
    everywhere = prefixes(range(dag.size)) if dag.size <= 10 * task.effort.large else None
    if dag.size <= task.effort.large and everywhere is not None:
        return _searched(dag, task, everywhere)
    found = _multilevel(dag, task, in_order=True)
    if found is None or everywhere is None:
        return found
    # Cuts that are about as fast have their boundaries near those of this one: there are few.
    return _searched(dag, task, everywhere, found) or found


def _by_pins(dag: Dag, task: Task) -> tuple[int, ...] | None:
    """A cut that keeps the pins and fits the memory, from which a search can begin."""
    found = cut_by_pins(dag, task.pins, task.machine.stages) if task.pins else None
    return found if found and prices(dag, task.machine, found).fits(task.machine) else None


def _multilevel(dag: Dag, task: Task, in_order: bool = False) -> tuple[int, ...] | None:
    """A cut of a coarsened DAG, which is then improved several times, each time on a DAG that is
    fine near the boundaries of the last cut and coarse elsewhere."""
    effort = replace(task.effort, near=task.effort.near // 4, patience=1)  # there are many levels
    task = replace(task, effort=effort)
    parts = [task.pins.get(node) for node in range(dag.size)]
    pieces = task.effort.large // 2
    if in_order:
        small, home = contracted(dag, coarsened(dag, range(dag.size), pieces, parts))
    else:
        small, home = contracted(dag, rows(dag, pieces, parts))
        if small.size > task.effort.large:
            parts = _moved(parts, home, small.size)
            runs = coarsened(small, depth_first(small), pieces, parts)
            small, further = contracted(small, runs)
            home = [further[h] for h in home]
    found = _small(small, replace(task, pins=_pinned(task.pins, home)), None, in_order)
    if found is None:
        return None
    best = tuple(found[h] for h in home)
    for order in ([range(dag.size)] if in_order else [range(dag.size), depth_first(dag)]) * 2:
        if not in_order and _is_enough(dag, task, best):
            break
        small, home = around(dag, best, order, FINE)
        start = _moved(best, home, small.size)
        found = _small(small, replace(task, pins=_pinned(task.pins, home)), start, in_order)
        if found is not None:
            best = tuple(found[h] for h in home)
    return best


def _small(
    dag: Dag, task: Task, found: Sequence[int] | None, in_order: bool
) -> tuple[int, ...] | None:
    if in_order:
        return _searched(dag, task, prefixes(range(dag.size)), found)
    if found is None:
        found = _lines(dag, task, found)
    return _improved(dag, task, found)


def _moved(parts: Sequence[T], home: Sequence[int], size: int) -> list[T]:
    """For each of ``size`` clusters the part of its nodes, which all are in one part."""
    moved: list[T] = [parts[0]] * size
    for part, h in zip(parts, home, strict=True):
        moved[h] = part
    return moved


def _pinned(pins: Mapping[int, int], home: Sequence[int]) -> dict[int, int]:
    return {home[node]: stage for node, stage in pins.items()}


@dataclass(frozen=True)
class _Answer:
    cut: Cut | None


def _exact(dag: Dag, task: Task, found: Sequence[int] | None) -> _Answer | None:
    """The answer of the exact path; None where it would take too long."""
    if not task.effort.downsets or dag.size > 10 * task.effort.large:
        return None
    return _over_all(dag, task, found) or _exact_but_for_pendants(dag, task, found)


def _exact_but_for_pendants(dag: Dag, task: Task, found: Sequence[int] | None) -> _Answer | None:
    """The answer of the exact path for the DAG without its light nodes that have a single edge. A
    bound for that DAG is a bound for the whole one, too."""
    if not np.isinf(np.asarray(task.machine.memory)).all():
        return None
    light = LIGHT * lower_bound(dag, task.machine)
    cluster = without_pendants(dag, light, task.pins)
    home_of = np.asarray(cluster)
    is_pendant = home_of != np.arange(dag.size)
    if not is_pendant.any():
        return None
    bare = replace(
        dag,
        seconds=np.where(is_pendant, 0.0, dag.seconds),
        forward=np.where(is_pendant, 0.0, dag.forward),
        again=np.where(is_pendant, 0.0, dag.again),
    )
    small, home = contracted(bare, cluster)
    if small.size < task.machine.stages:
        return None
    start: list[int] | None = None
    if found is not None:
        start = _moved([found[c] for c in cluster], home, small.size)
        if len(set(start)) < task.machine.stages:  # a stage consisted of such nodes only
            start = None
    answer = _over_all(small, replace(task, pins=_pinned(task.pins, home)), start)
    if answer is None or answer.cut is None:
        return answer
    stage = tuple(answer.cut.stage[h] for h in home)
    return _Answer(replace(answer.cut, stage=stage, prices=prices(dag, task.machine, stage)))


def _over_all(dag: Dag, task: Task, found: Sequence[int] | None) -> _Answer | None:
    family = all_downsets(dag, min(task.effort.downsets, int(5e7) // dag.size))
    if family is None:
        return None
    limit = _limit(dag, task, found)
    try:
        search = Search(dag, task.machine, family, limit, task.pins, work=task.effort.work)
        result = search.run(task.slack)
    except TooMuch:
        return None
    if result is None:
        return _Answer(None)
    return _Answer(
        Cut(result.stage, prices(dag, task.machine, result.stage), result.bound, result.is_proven)
    )


def _limit(dag: Dag, task: Task, found: Sequence[int] | None) -> float:
    if found is None:
        return task.limit
    slowest = prices(dag, task.machine, found).slowest
    return min(slowest * (1 + task.slack), task.limit) * (1 + EQUAL)


def _lines(dag: Dag, task: Task, found: Sequence[int] | None) -> tuple[int, ...] | None:
    """The best cut whose boundaries are beginnings of several topological orders."""
    families = [prefixes(order) for order in orders(dag)]
    for family in families:
        found = _searched(dag, task, family, found) or found
    if found is None:  # no order fits the memory: begin at the cut that fits it best
        found = _roomiest(dag, task)
    found = _searched(dag, task, united(*families), found) or found
    return None if found is None else tuple(found)


def _roomiest(dag: Dag, task: Task) -> tuple[int, ...] | None:
    """A cut that fits the memory, from a search that looks at the memory only; None if this search
    finds none."""
    if np.isinf(np.asarray(task.machine.memory)).all():
        return None
    found = tightest(dag, task.machine, pins=task.pins, effort=task.effort)
    return found if found and prices(dag, task.machine, found).fits(task.machine) else None


def tightest(
    dag: Dag,
    machine: Machine,
    *,
    pins: Mapping[int, int] | None = None,
    effort: Effort | None = None,
) -> tuple[int, ...] | None:
    """The cut that minimises the fraction of its memory that the fullest device uses, which may be
    more than 1."""
    found = solve(_by_memory(dag, machine), Machine(machine.stages), pins=pins, effort=effort)
    return None if found is None else found.stage


def _by_memory(dag: Dag, machine: Machine) -> Dag:
    """The DAG with the fraction of a stage's memory that each node takes in place of its seconds.

    These fractions are lower bounds, as :func:`needed_at_least` says.
    """
    assert machine.memory is not None
    room = np.maximum(1.0, machine.memory - machine.beside.min(axis=0))
    return Dag(needed_at_least(dag, machine) / room[:, None], order=tuple(dag.edges))


def needed_at_least(dag: Dag, machine: Machine) -> NDArray[np.float64]:
    """``[stage, node]``: bytes that each node takes at each stage, of which a stage needs the sum
    at least: memory that several nodes keep counts for the first of them only, values that are
    brought to a stage do not count, and each stage goes the way that holds least."""
    saved = dag.saved.copy()
    for kept in dag.kept:
        saved[min(kept.nodes)] += kept.size
    needed: NDArray[np.float64] = (
        dag.fixed[None, :] + machine.held.min(axis=0)[:, None] * saved[None, :]
    )
    return needed


def _may_fit(dag: Dag, machine: Machine) -> bool:
    """Whether the lower bound leaves room: False means that every cut needs too much memory."""
    if np.isinf(np.asarray(machine.memory)).all():
        return True
    return lower_bound(_by_memory(dag, machine), Machine(machine.stages)) <= 1 + EQUAL


def _searched(
    dag: Dag,
    task: Task,
    family: Family,
    found: Sequence[int] | None = None,
    places: NDArray[np.bool_] | None = None,
) -> tuple[int, ...] | None:
    limit = _limit(dag, task, found)
    known = tuple(found) if found is not None and _is_as_fast_as_any(dag, task, found) else None
    if known is not None:
        limit = min(limit, task.enough)
    search = Search(dag, task.machine, family, limit, task.pins, places, task.enough, visits=VISITS)
    try:
        if known is not None:
            return search.lightest(known, limit)
        result = search.run(task.slack)
    except TooMuch:
        return None
    return None if result is None else result.stage


def _is_as_fast_as_any(dag: Dag, task: Task, stage: Sequence[int]) -> bool:
    """Whether no cut is faster than this one by more than the slack, so that only the bytes that it
    sends are left to improve."""
    slowest = prices(dag, task.machine, stage).slowest
    return slowest <= min(task.bound * (1 + task.slack), task.enough) * (1 + EQUAL)


def _improved(dag: Dag, task: Task, found: Sequence[int] | None) -> tuple[int, ...] | None:
    """The cut, improved by searches over the downsets near its boundaries, until these gain
    nothing.

    The nodes that count as near are drawn anew for each search, from a fixed seed.
    """
    if found is None:
        return None
    best, failures = tuple(found), 0
    rng = random.Random(0)
    lines = united(*map(prefixes, orders(dag)))
    near_one = max(1, task.effort.near // max(1, task.machine.stages - 1))
    while failures < task.effort.patience:
        label = np.asarray(best)
        near = [downsets_near(dag, label < s, near_one, rng) for s in range(1, task.machine.stages)]
        family = united(lines, *near)
        anywhere = members(family, lines)
        places = np.stack([anywhere, *(anywhere | members(family, part) for part in near)], axis=1)
        following = _searched(dag, task, family, best, places)
        if following is not None and _is_better(dag, task, following, best):
            best, failures = following, 0
        else:
            failures += 1
    return best


def _better(
    dag: Dag, task: Task, one: tuple[int, ...] | None, other: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    if one is None or other is None:
        return other if one is None else one
    return one if _is_better(dag, task, one, other) else other


def _is_enough(dag: Dag, task: Task, stage: Sequence[int]) -> bool:
    return prices(dag, task.machine, stage).slowest <= task.enough * (1 + EQUAL)


def _is_better(dag: Dag, task: Task, one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether the first of two cuts is faster or, if both are as fast as is wanted, sends less."""
    a, b = prices(dag, task.machine, one), prices(dag, task.machine, other)
    fast, other_fast = (max(p.slowest, task.enough) for p in (a, b))
    if fast < other_fast * (1 - EQUAL):
        return True
    return fast <= other_fast * (1 + EQUAL) and a.dislike < b.dislike
