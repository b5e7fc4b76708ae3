"""Which memory the nodes of a graph read and write, and whether happens-before orders them.

::

    lane 0    backward (writes the gradient of weight) ──┐
    lane 3    backward (writes it, too) ── wait, send ───└── accumulate        in order: no race

Memory that nodes share is a parameter, its gradient, a buffer, or an input that is written back.
Two nodes that touch the same memory, one of which writes to it, have to be in order: for each write
all reads and writes before it in the graph happen before it, and for each read all writes do. It is
enough to compare a write with the write before it and the reads since, and a read with the last
write (Flanagan and Freund, "FastTrack", 2009), so that the time is linear.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import fx

from passes.verify.clocks import Event
from passes.verify.errors import VerifyError

Memory = tuple[str, Hashable]  # what kind of memory, and which: ("parameter", its id)
History = list[tuple[fx.Node | None, list[fx.Node]]]
"""The nodes that write to some memory, in order, each with those that read it afterwards."""


@dataclass(slots=True)
class _Uses:
    """The uses of some memory that a later use has to be compared with, and all uses in order."""

    write: Event | None = None
    reads: dict[int, Event] = field(default_factory=dict)  # the last one of each lane
    history: History = field(default_factory=lambda: [(None, [])])


class MemoryUses:
    """The reads and writes of all memory, noted in the graph's order.

    ``names``: what to call memory in messages, "parameter weight" for instance.
    """

    def __init__(self) -> None:
        self.names: dict[Memory, str] = {}
        self._uses: defaultdict[Memory, _Uses] = defaultdict(_Uses)

    @property
    def history(self) -> dict[Memory, History]:
        """For all memory that is used, its uses."""
        return {memory: uses.history for memory, uses in self._uses.items()}

    def read(self, memory: Memory, by: Event) -> None:
        """Note that an event reads memory. Raises :class:`VerifyError` if it races a write."""
        uses = self._uses[memory]
        if uses.write is not None:
            self._compare(memory, uses.write, by)
        uses.reads[by.lane] = by
        uses.history[-1][1].append(by.node)

    def write(self, memory: Memory, by: Event) -> None:
        """Note that an event writes to memory, or changes it in place. Raises :class:`VerifyError`
        if it races another use."""
        uses = self._uses[memory]
        if uses.write is not None:
            self._compare(memory, uses.write, by)
        for earlier in uses.reads.values():
            self._compare(memory, earlier, by)
        uses.write = by
        uses.reads.clear()
        uses.history.append((by.node, []))

    def last_write(self, memory: Memory) -> Event | None:
        """The last event so far that has written to memory."""
        return self._uses[memory].write if memory in self._uses else None

    def _compare(self, memory: Memory, earlier: Event, later: Event) -> None:
        if not earlier.is_before(later):
            raise VerifyError(
                f"both nodes use the {self.names.get(memory, memory[0])}, one of them writes to "
                "it, and no edge says which of them comes first",
                later.node,
                earlier.node,
                "an edge between them",
            )
