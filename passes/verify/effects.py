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

from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import fx

from passes.verify.clocks import Event
from passes.verify.errors import VerifyError

Memory = tuple[str, Hashable]  # what kind of memory, and which: ("parameter", its id)


@dataclass
class _Uses:
    """The uses of some memory that a later use has to be compared with."""

    write: Event | None = None
    reads: dict[int, Event] = field(default_factory=dict)  # the last one of each lane


class MemoryUses:
    """The reads and writes of all memory, noted in the graph's order.

    ``names``: what to call memory in messages, "parameter weight" for instance. ``history``: for
    all memory the nodes that write to it, in order, each with those that read it afterwards.
    """

    def __init__(self) -> None:
        self.names: dict[Memory, str] = {}
        self.history: dict[Memory, list[tuple[fx.Node | None, list[fx.Node]]]] = {}
        self._uses: dict[Memory, _Uses] = {}

    def read(self, memory: Memory, by: Event) -> None:
        """Note that an event reads memory. Raises :class:`VerifyError` if it races a write."""
        uses = self._uses.setdefault(memory, _Uses())
        self._compare(memory, uses.write, by)
        uses.reads[by.lane] = by
        self.history.setdefault(memory, [(None, [])])[-1][1].append(by.node)

    def write(self, memory: Memory, by: Event) -> None:
        """Note that an event writes to memory, or changes it in place. Raises :class:`VerifyError`
        if it races another use."""
        uses = self._uses.setdefault(memory, _Uses())
        for earlier in (uses.write, *uses.reads.values()):
            self._compare(memory, earlier, by)
        self._uses[memory] = _Uses(by)
        self.history.setdefault(memory, [(None, [])]).append((by.node, []))

    def last_write(self, memory: Memory) -> Event | None:
        """The last event so far that has written to memory."""
        return self._uses[memory].write if memory in self._uses else None

    def _compare(self, memory: Memory, earlier: Event | None, later: Event) -> None:
        if earlier is not None and not earlier.is_before(later):
            raise VerifyError(
                f"both nodes use the {self.names.get(memory, memory[0])}, one of them writes to "
                "it, and no edge says which of them comes first",
                later.node,
                earlier.node,
                "an edge between them",
            )
