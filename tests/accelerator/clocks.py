"""Virtual time on the simulated accelerator: how long a program would take on given devices.

The real program runs, with its threads and queues. Each operator is charged to its stream with the
time that a device would take (``sim/clocks.h``), so that overlap, bubbles and needless waits show
in the makespan, which is the same in every run.

Each thread of the host has a virtual time. A thread that takes something which another thread has
handed over (``threads.py``) goes on no earlier than at the time when the other one did so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fxpipe.ir.devices import DeviceSpec


@dataclass(frozen=True)
class Speed:
    """How fast the devices are, and the links between them; each zero means: it takes no time."""

    flops_per_s: float = 0.0
    bytes_per_s: float = 0.0
    kernel_s: float = 0.0
    launch_s: float = 0.0
    link_bytes_per_s: float = 0.0
    link_latency_s: float = 0.0

    @staticmethod
    def of(device: DeviceSpec, launch_s: float = 0.0) -> Speed:
        """The speed of a device that plans know: ``launch_s`` is what an operator costs the host,
        where a device's own ``launch_s`` is what it costs the device at the least."""
        return Speed(
            device.flops_per_s,
            device.bytes_per_s,
            device.launch_s,
            launch_s,
            device.link_bytes_per_s,
            device.link_latency_s,
        )


@dataclass(frozen=True)
class Span:
    """What a stream did, and when."""

    device: int
    stream: int
    what: str
    start: float
    end: float


@contextmanager
def virtual_time(speed: Speed) -> Iterator[None]:
    """A context in which virtual time is counted, from zero. Call :func:`begin` right before the
    call that is to be measured."""
    begin(speed)
    try:
        yield
    finally:
        torch.ops.sim.clocks_stop()


def begin(speed: Speed) -> None:
    """Set the times of all threads and streams to zero, and the speed of all devices."""
    torch.ops.sim.clocks_start(
        speed.flops_per_s,
        speed.bytes_per_s,
        speed.kernel_s,
        speed.launch_s,
        speed.link_bytes_per_s,
        speed.link_latency_s,
    )


def makespan() -> float:
    """The time, in seconds, at which all streams have done their work."""
    time: float = torch.ops.sim.makespan()
    return time


def spans() -> list[Span]:
    """All work that took time, in the order in which it was launched."""
    return [Span(*each) for each in zip(*torch.ops.sim.spans(), strict=True)]
