"""When lanes do what: a stopwatch for each lane, on the clock of its device.

On the CPU that is the host's clock. On an accelerator the host only hands work over, so events are
recorded on the lane's stream, and read when all is done.
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
    """From when to when a lane has run a node, in seconds since the run began."""

    lane: int
    node: fx.Node
    start: float
    end: float


class Stopwatch:
    """Takes the times of one lane."""

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
        """What ``run()`` gives; the time it takes is noted."""
        start = self._now()
        value = run()
        self._taken.append((node, start, self._now()))
        return value

    def marks(self) -> list[Mark]:
        """All that has been noted."""
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
    """The marks of one run."""

    marks: list[Mark] = field(default_factory=list)
    begin: float = field(default_factory=time.perf_counter)

    def stopwatch(self, lane: int, device: torch.device) -> Stopwatch:
        """One for a lane; to be made in its thread."""
        return Stopwatch(lane, device, self.begin)
