"""Happens-before, by vector clocks.

::

    lane 0    a ──── b ─┐ (wait, send, wait)        clock of a: (1, 0)    of b: (2, 0)
    lane 1         c ───└─ d                        clock of c: (0, 1)    of d: (2, 2)

    a happens before d, since d knows of 2 events of lane 0 and a is the first of these;
    b and c happen in no order: neither knows of the other.

A lane counts its events: the nodes whose work goes to its compute stream, one after the other. The
clock of an event says for each lane how many of that lane's events happen before it. An event knows
what the one before it in its lane knows, and what the values know that its lane has waited for.
(Fidge, "Timestamps in message-passing systems that preserve the partial ordering", 1988; Mattern,
"Virtual time and global states of distributed systems", 1989.) Comparing two events takes one
comparison of numbers, so that a graph is checked in time linear in its nodes, times its lanes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import fx

Clock = tuple[int, ...]


class Event(NamedTuple):
    """The work of a node in a lane. ``clock`` says how many events of each lane happen before this
    one; the event itself is among them."""

    node: fx.Node
    lane: int
    clock: Clock

    def is_before(self, later: Event) -> bool:
        """Whether this event happens before another one, or is the same."""
        return self.clock[self.lane] <= later.clock[self.lane]


class Clocks:
    """The clocks of all lanes, while the nodes of a graph are visited in the graph's order.

    ``lanes``: how many there are; the caller's thread is one of them.
    """

    def __init__(self, lanes: int) -> None:
        self.start: Clock = (0,) * lanes
        self._now = [self.start] * lanes

    def event(self, node: fx.Node, lane: int, known: Iterable[Clock]) -> Event:
        """The next event of a lane, which has waited for values with these clocks."""
        every = {self._now[lane], *known}
        now = [*map(max, *every)] if len(every) > 1 else [*every.pop()]
        now[lane] += 1
        clock = self._now[lane] = tuple(now)
        return Event(node, lane, clock)
