"""How long a call keeps a device busy.

::

    host     filler ─ begin ─ the call's kernels ─ end          launches all of it at once
    device   [ filler ........................ ] • [ kernels ] •

An accelerator's host only launches kernels, and for small ones that takes longer than the device
needs to run them. So the device is given other work first, for as long as the host needs to launch
the call: then the time between the two events is that of the call's kernels, one right after the
other, as they run in a step whose host is ahead.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")

FILLER_S = 1e-4  # the least time that one product for the filler takes
LONG_S = 1e-2
"""A device that is done with products of this length when the host has launched them computes while
it is given work, within the launch. It takes up the first kernel of a call at once, whatever ran
before, so it is given no filler."""
COUNTED = 3  # products of which the time of one is an equal part
SIDES = [2**n for n in range(8, 14)]  # of the matrices that may be the filler
SPARE = 1.5  # how many times as long as the host needs to launch a call the device is kept busy


class HostTimer:
    """Times calls on the CPU by its clock."""

    def time(self, key: Any, run: Callable[[], T]) -> tuple[T, float]:
        """The result of a call, and the seconds that it takes. Calls that do the same, in another
        round, have the same ``key``."""
        start = time.perf_counter()
        result = run()
        return result, time.perf_counter() - start


class DeviceTimer(HostTimer):
    """Times calls on an accelerator by the device's clock. The first call with a key is timed with
    the host's launches, which tells how long the device is to be kept busy the next time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._launching: dict[Any, float] = {}
        self._filler, self._filler_s = self._calibrated()

    def time(self, key: Any, run: Callable[[], T]) -> tuple[T, float]:
        """As :meth:`HostTimer.time`; the caller's stream waits for nothing else meanwhile."""
        busy = SPARE * self._launching[key] if key in self._launching else 0.0
        torch.accelerator.synchronize(self.device)
        for _ in range(math.ceil(busy / self._filler_s) if self._filler_s < math.inf else 0):
            torch.mm(self._filler, self._filler)
        started = time.perf_counter()
        begin = self._event()
        result = run()
        end = self._event()
        launching = time.perf_counter() - started
        # The least: a call for which the host waits also waits for the filler.
        self._launching[key] = min(launching, self._launching.get(key, launching))
        end.synchronize()
        return result, begin.elapsed_time(end) / 1e3

    def _calibrated(self) -> tuple[torch.Tensor, float]:
        """A matrix whose square takes long enough, and the seconds that it takes; infinitely many
        for a device that needs no filler.

        Products that the device ends before the host has launched the next one do not tell how
        long one takes, but how long the host needs. So one goes ahead, and the others count only if
        the device had not come to them when all were launched.
        """
        for side in SIDES:
            filler = torch.zeros(side, side, device=self.device)
            torch.mm(filler, filler)  # the first one of a size also loads its kernel
            torch.accelerator.synchronize(self.device)
            torch.mm(filler, filler)
            begin = self._event()
            for _ in range(COUNTED):
                torch.mm(filler, filler)
            end = self._event()
            is_ahead = not begin.query()
            end.synchronize()
            taken = begin.elapsed_time(end) / 1e3 / COUNTED
            if is_ahead and taken >= FILLER_S:
                break
            if taken >= LONG_S:
                return filler, math.inf
        return filler, max(taken, 1e-6)

    def _event(self) -> torch.Event:
        event = torch.Event(self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device))
        return event


def timer_of(device: torch.device | None) -> HostTimer:
    """The timer for calls on a device; None: the CPU."""
    if device is None or device.type in ("cpu", "meta"):
        return HostTimer()
    return DeviceTimer(device)
