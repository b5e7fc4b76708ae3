"""The order in which the actions of a schedule can run, and the earliest start of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from fxpipe.schedule.actions import Action, Entry

E = TypeVar("E", bound=Entry)

NeedsOf = Callable[[Action], Iterable[Action]]
"""A function that gives the actions that must be done, in any lane, before an action starts."""


def run_order(lanes: Sequence[Sequence[E]], needs_of: NeedsOf) -> list[tuple[int, E]]:
    """Let all lanes advance until each has done its entries or is stuck, and return the order in
    which entries were done.

    Each lane does its entries in the given order. In each round, a lane does its next entry if the
    rounds before have done all actions that the entry needs. So a single thread can run the entries
    in the returned order. If an entry is not in the result, its lane is stuck at that entry or at
    an earlier one.

    Args:
        lanes: the entries of each lane.
        needs_of: gives the actions that an action waits for. The parts of one :class:`Overlap` do
            not wait for each other.

    Returns:
        Pairs of a lane and one of its entries.
    """
    done: set[Action] = set()
    left = [deque(entries) for entries in lanes]
    order: list[tuple[int, E]] = []
    while ready := [
        (lane, entries[0])
        for lane, entries in enumerate(left)
        if entries and done.issuperset(needed(entries[0], needs_of))
    ]:
        for lane, entry in ready:
            left[lane].popleft()
            done.update(entry.parts)
        order += ready
    return order


def needed(entry: Entry, needs_of: NeedsOf) -> set[Action]:
    """The actions that an entry waits for. The parts of one entry do not wait for each other."""
    return {need for action in entry.parts for need in needs_of(action)}.difference(entry.parts)


def earliest_starts(
    order: Iterable[tuple[int, E]], needs_of: NeedsOf, duration: Callable[[E], float]
) -> Iterator[tuple[int, E, float]]:
    """The entries of a :func:`run_order` with their lanes and the times at which they can start.

    An entry starts as soon as its lane is free and the actions that it needs have ended. Copies
    between lanes take no time.
    """
    free: dict[int, float] = {}
    ends: dict[Action, float] = {}
    for lane, entry in order:
        start = max(free.get(lane, 0.0), *(ends[need] for need in needed(entry, needs_of)), 0.0)
        yield lane, entry, start
        free[lane] = start + duration(entry)
        ends.update(dict.fromkeys(entry.parts, free[lane]))
