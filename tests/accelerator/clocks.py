"""Virtual time on the simulated accelerator: how long a program would take on given devices.

The real program runs, with its threads and queues. Each operator is charged to its stream with the
time that a device would take (``sim/clocks.h``), so that overlap, bubbles and needless waits show
in the makespan, which is the same in every run.

Each thread of the host has a virtual time. A thread that takes something out of a queue goes on no
earlier than at the time when another thread has put it there; a thread of the autograd engine
begins at the time when the backward is called.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.ir.devices import DeviceSpec
from fxpipe.runtime import lanes


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


class _Queue:
    """A queue that hands over the time of whoever has put something into it."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[float, Any]] = SimpleQueue()

    def put(self, item: Any) -> None:
        self._queue.put((torch.ops.sim.host_time(), item))

    def get(self) -> Any:
        time, item = self._queue.get()
        torch.ops.sim.host_joins(time)
        return item


class _Inbox(lanes.Inbox):
    """An inbox that hands over, with each value, the time of the lane that has posted it.

    A value's time counts when the value is taken, and not when it comes out of the queue, where
    others that are used later may be ahead of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queue = SimpleQueue()

    def post(self, node: fx.Node | None, value: Any) -> None:
        super().post(node, (torch.ops.sim.host_time(), value))

    def take(self, node: fx.Node) -> Any:
        time, value = super().take(node)
        torch.ops.sim.host_joins(time)
        return value


class _Event(threading.Event):
    """An event that hands over the time of whoever has set it."""

    time = 0.0

    def set(self) -> None:
        self.time = torch.ops.sim.host_time()
        super().set()

    def wait(self, timeout: float | None = None) -> bool:
        is_set = super().wait(timeout)
        torch.ops.sim.host_joins(self.time)
        return is_set


class _Threading:
    """The module ``threading``, but for its events."""

    Event = _Event

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


def _backward(run: Any) -> Any:
    """The function that starts the autograd engine, with virtual time: the engine begins at the
    time of its caller, and the caller goes on when the engine has finished."""

    def timed(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        tasks: set[int] = set()
        hooks = []
        for output in outputs:
            device = getattr(output, "device", None)
            if device is not None and device.type == "sim":
                torch.ops.sim.backward_begins(device.index)
            node = output.grad_fn if isinstance(output, Tensor) else output.node
            if node is not None:
                hooks.append(
                    node.register_prehook(lambda _: tasks.add(torch._C._current_graph_task_id()))
                )
        try:
            result = run(outputs, *args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        for task in tasks:
            torch.ops.sim.host_joins(torch.ops.sim.backward_ended(task))
        return result

    return timed


@contextmanager
def virtual_time(speed: Speed) -> Iterator[None]:
    """A context in which virtual time is counted, from zero. Lanes that were started before do not
    hand their times over: compile within it, and call :func:`begin` right before the call that is
    to be measured."""
    graph = torch.autograd.graph
    before = lanes.SimpleQueue, lanes.threading, lanes.Inbox
    run_backward = graph._engine_run_backward
    lanes.SimpleQueue, lanes.threading, lanes.Inbox = _Queue, _Threading(), _Inbox  # type: ignore[misc,assignment]
    graph._engine_run_backward = torch.autograd._engine_run_backward = _backward(run_backward)
    begin(speed)
    try:
        yield
    finally:
        torch.ops.sim.clocks_stop()
        lanes.SimpleQueue, lanes.threading, lanes.Inbox = before  # type: ignore[misc]
        graph._engine_run_backward = torch.autograd._engine_run_backward = run_backward


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
