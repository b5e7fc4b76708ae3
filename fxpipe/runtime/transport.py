"""Transport: how values get from one rank, a process of a group, to another."""

from __future__ import annotations

from typing import Any, Protocol

Edge = tuple[int, int]
"""The rank that transmits, and the rank that receives."""


class Arrival(Protocol):
    """What is being received."""

    def wait(self) -> Any:
        """The values, once they are here."""


class Transport(Protocol):
    """What a rank's graph is given to send and receive with."""

    def transmit(self, values: Any, edge: Edge, number: int) -> None:
        """Send values as the ``number``-th transfer of an edge in this run."""

    def receive(self, edge: Edge, number: int) -> Arrival:
        """Begin to receive the ``number``-th transfer of an edge in this run."""
