"""The times at which lanes run their nodes: a stopwatch for each lane, on the clock of its device.

On the CPU the host's clock is used. On an accelerator the host only launches work, so events are
recorded on the lane's stream, and their times are read once the device has done the work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
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
    """Takes the times of one lane. ``begin``: when the run began, by ``time.perf_counter()``."""

    def __init__(self, lane: int, device: torch.device, begin: float) -> None:
        self.lane = lane
        self._stream = stream(stream_name(device, COMPUTE))
        self._taken: list[tuple[fx.Node, Any, Any]] = []
        self._begin: Any = begin
        self._offset = 0.0
        if self._stream is not None:
            torch.accelerator.synchronize(device)
            self._offset = time.perf_counter() - begin
            self._begin = self._now()

    def _now(self) -> Any:
        if self._stream is None:
            return time.perf_counter()
        event = torch.Event(self._stream.device, enable_timing=True)
        event.record(self._stream)
        return event

    def time(self, node: fx.Node, run: Callable[[], T]) -> T:
        """Call ``run()``, note its start and end for the node, and return its result."""
        start = self._now()
        value = run()
        self._taken.append((node, start, self._now()))
        return value

    def marks(self) -> list[Mark]:
        """The marks of all calls that were timed. Waits until the device has done them."""
        if self._stream is not None:
            torch.accelerator.synchronize(self._stream.device)
        return [
            Mark(self.lane, node, self._since(start), self._since(end))
            for node, start, end in self._taken
        ]

    def _since(self, moment: Any) -> float:
        if self._stream is None:
            seconds: float = moment - self._begin
            return seconds
        return self._offset + float(self._begin.elapsed_time(moment)) / 1e3


@dataclass
class Record:
    """The marks of one run of a program, from all lanes."""

    marks: list[Mark] = field(default_factory=list)
    begin: float = field(default_factory=time.perf_counter)

    def stopwatch(self, lane: int, device: torch.device) -> Stopwatch:
        """A stopwatch for a lane. It has to be made in the lane's thread, whose stream it uses."""
        return Stopwatch(lane, device, self.begin)
