"""The times at which lanes run their nodes: a stopwatch for each lane, on the clock of its device.

On the CPU the host's clock is used. On an accelerator the host only launches work, so events are
recorded on the lane's stream, and their times are read when the run has ended::

    caller       waits for the devices ─ begin                                   reads the times
    stream 0                               •event  •event [ node ] •event  ...
    stream 1                               •event        •event [ node ] •event  ...

No lane waits for its device while it is measured: its host thread would launch work later than it
does otherwise, and so would other lanes on the same device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx

from fxpipe.runtime.streams import COMPUTE, stream, stream_name

T = TypeVar("T")


@dataclass(frozen=True)
class Mark:
    """When a lane started and ended a node, in seconds since the run of the program began."""

    lane: int
    node: fx.Node
    start: float
    end: float


class Stopwatch:
    """Takes the times of one lane.

    Args:
        stream: where the lane computes; None for the CPU.
        begin: when the run began: an event of the stream's device, or by ``time.perf_counter()``.
    """

    def __init__(self, lane: int, stream: torch.Stream | None, begin: Any) -> None:
        self.lane = lane
        self._stream = stream
        self._begin = begin
        self._taken: list[tuple[fx.Node, Any, Any]] = []

    def time(self, node: fx.Node, run: Callable[[], T]) -> T:
        """Call ``run()``, note its start and end for the node, and return its result."""
        start = _now(self._stream)
        value = run()
        self._taken.append((node, start, _now(self._stream)))
        return value

    def marks(self) -> list[Mark]:
        """The marks of all calls that were timed. Waits until the device has done them."""
        if self._stream is not None:
            self._stream.synchronize()
        return [
            Mark(self.lane, node, self._since(start), self._since(end))
            for node, start, end in self._taken
        ]

    def _since(self, moment: Any) -> float:
        if self._stream is None:
            seconds: float = moment - self._begin
            return seconds
        return float(self._begin.elapsed_time(moment)) / 1e3


def _now(stream: torch.Stream | None) -> Any:
    if stream is None:
        return time.perf_counter()
    event = torch.Event(stream.device, enable_timing=True)
    event.record(stream)
    return event


class Record:
    """The times of one run of a program, from all lanes."""

    def __init__(self) -> None:
        self._stopwatches: list[Stopwatch] = []
        self._added: list[Mark] = []
        self._events: dict[torch.device, torch.Event] = {}
        self._begin = time.perf_counter()

    def begin(self, streams: Iterable[torch.Stream]) -> None:
        """Wait until these streams have done their earlier work, and note that the run begins."""
        streams = list(streams)
        for each in streams:
            each.synchronize()
        self._begin = time.perf_counter()
        self._events = {each.device: _now(each) for each in streams}

    def stopwatch(self, lane: int, device: torch.device) -> Stopwatch:
        """A stopwatch for a lane. It has to be made in the lane's thread, whose stream it uses."""
        computing = stream(stream_name(device, COMPUTE))
        begin = self._begin if computing is None else self._events[computing.device]
        stopwatch = Stopwatch(lane, computing, begin)
        self._stopwatches.append(stopwatch)
        return stopwatch

    def add(self, marks: Iterable[Mark]) -> None:
        """Add marks that other processes have taken."""
        self._added += marks

    @property
    def marks(self) -> list[Mark]:
        """When each lane started and ended each node. Waits until the devices are done."""
        own = [mark for stopwatch in self._stopwatches for mark in stopwatch.marks()]
        return [*self._added, *own]
