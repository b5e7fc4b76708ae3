"""The order in which the actions of a schedule can run, and the earliest start of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from fxpipe.schedule.actions import Action, Entry

E = TypeVar("E", bound=Entry)

NeedsOf = Callable[[Action], Iterable[Action]]
"""The actions that must be done, here or in other lanes, before an action starts."""


def run_order(lanes: Sequence[Sequence[E]], needs_of: NeedsOf) -> list[tuple[int, E]]:
    """Let all lanes advance until each is done or waits, and tell in which order they did it.

    Each lane takes its entries in the given order. In a round, every lane whose next entry has all
    that it needs from the rounds before does this one entry; so a single thread can run the
    entries in the returned order. An entry that is missing from the result waits forever: a lane
    whose entries are not all there is stuck at the first of them.

    Args:
        needs_of: what an action waits for. The parts of one :class:`Overlap` do not wait for each
            other.

    Returns:
        Pairs of a lane and an entry of it.
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
    """The actions that the parts of an entry wait for, other than each other."""
    return {need for action in entry.parts for need in needs_of(action)}.difference(entry.parts)


def earliest_starts(
    order: Iterable[tuple[int, E]], needs_of: NeedsOf, duration: Callable[[E], float]
) -> Iterator[tuple[int, E, float]]:
    """The entries of a :func:`run_order` again, each with the time at which it can start.

    An entry starts as soon as its lane is free and all that it needs has ended; what travels
    between lanes takes no time.
    """
    free: dict[int, float] = {}
    ends: dict[Action, float] = {}
    for lane, entry in order:
        start = max(free.get(lane, 0.0), *(ends[need] for need in needed(entry, needs_of)), 0.0)
        yield lane, entry, start
        free[lane] = start + duration(entry)
        ends.update(dict.fromkeys(entry.parts, free[lane]))
