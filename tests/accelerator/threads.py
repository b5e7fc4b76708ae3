"""What a thread of the host hands to another: when it is, and what it has waited for.

::

    thread 0    waits for a stream ── put ────────────────────────────
                                         `── what it knows, and when
    thread 1                                  `── get ── launches     comes after that wait

A thread that takes something from another one goes on no earlier than that one was when it put it
there (``clocks.py``), and what it launches from then on comes after what that one has waited for
(``sim/races.h``). Threads that hand nothing to each other know nothing of each other. So what a
thread knows is handed over by the queues, inboxes and events of lanes; from a thread to one that it
starts, and back to one that joins it; and to the autograd engine's threads and back when a backward
begins and ends.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.runtime import lanes

# A time, how many steps there were until then, and how far each stream has been waited for.
Known = tuple[float, int, list[int]]


def gives() -> Known:
    """What this thread knows now."""
    known: Known = torch.ops.sim.host_gives()
    return known


def takes(known: Known) -> None:
    """This thread learns what another one knew."""
    torch.ops.sim.host_takes(*known)


class _Queue:
    """A queue that hands over what whoever has put something into it knew then."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Known, Any]] = SimpleQueue()

    def put(self, item: Any) -> None:
        self._queue.put((gives(), item))

    def get(self) -> Any:
        known, item = self._queue.get()
        takes(known)
        return item

    def get_nowait(self) -> Any:
        known, item = self._queue.get_nowait()
        takes(known)
        return item


class _Inbox(lanes.Inbox):
    """An inbox that hands over, with each value, what the lane knew that has posted it."""

    def __init__(self, bell: Any) -> None:
        super().__init__(bell)
        self.take = self._taken

    def post(self, node: fx.Node, value: Any) -> None:
        super().post(node, (gives(), value))

    def _taken(self, node: fx.Node) -> Any:
        known, value = self.arrived.pop(node)
        takes(known)
        return value


class _Event(threading.Event):
    """An event that hands over what whoever has set it knew then."""

    known: Known | None = None

    def set(self) -> None:
        self.known = gives()
        super().set()

    def wait(self, timeout: float | None = None) -> bool:
        is_set = super().wait(timeout)
        if is_set and self.known is not None:
            takes(self.known)
        return is_set


class _Threading:
    """The module ``threading``, but for its events."""

    Event = _Event

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


def _start(start: Any) -> Any:
    """``Thread.start``, by which a thread knows what the one knew that has started it."""

    def watched(thread: Any) -> None:
        known, run = gives(), thread.run

        def run_knowing() -> None:
            takes(known)
            try:
                run()
            finally:
                thread.known_at_its_end = gives()

        thread.run = run_knowing
        start(thread)

    return watched


def _join(join: Any) -> Any:
    """``Thread.join``, after which the caller knows what the thread knew at its end."""

    def watched(thread: Any, timeout: float | None = None) -> None:
        join(thread, timeout)
        known = getattr(thread, "known_at_its_end", None)
        if known is not None and not thread.is_alive():
            takes(known)

    return watched


def _backward(run: Any) -> Any:
    """The function that starts the engine. Its threads know what its caller knew, and the caller
    knows in the end what they have learnt."""

    def watched(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        known, tasks, hooks = gives(), set[int](), []

        def begin(_: Any) -> None:
            tasks.add(torch._C._current_graph_task_id())
            takes(known)

        for output in outputs:
            device = getattr(output, "device", None)
            if device is not None and device.type == "sim":
                torch.ops.sim.backward_begins(device.index)
            node = output.grad_fn if isinstance(output, Tensor) else output.node
            if node is not None:
                hooks.append(node.register_prehook(begin))
        try:
            return run(outputs, *args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
            for task in tasks:
                takes(torch.ops.sim.backward_ended(task))

    return watched


def watch() -> None:
    """From now on threads hand over what they know, for as long as the process lives."""
    lanes.SimpleQueue, lanes.threading, lanes.Inbox = _Queue, _Threading(), _Inbox  # type: ignore[misc,assignment]
    thread: Any = threading.Thread
    thread.start, thread.join = _start(thread.start), _join(thread.join)
    graph = torch.autograd.graph
    graph._engine_run_backward = torch.autograd._engine_run_backward = _backward(
        graph._engine_run_backward
    )
