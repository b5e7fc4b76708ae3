"""Streams by name, on any kind of device, and the events after which a value may be used.

``"cuda:1/compute"`` is the stream on which the running thread computes on that device.
``"cuda:1/copy"`` stands for the streams of the links that end there: each pair of devices has two
links, one for each direction, so that no copy waits for another that goes elsewhere::

    cuda:0                                      cuda:1
    compute ── a ──•event                       compute ─────────────── uses a
                    `─ link 0→1, its end here ═ link 0→1, its end there ─•event
               link 1→0 ═══════════════════════ link 1→0

``"caller"`` stands for the streams on which the thread that calls the pipeline computes, on the
devices of its inputs. On the CPU there are no streams: a thread does one thing after the other, and
a lane waits for the values that another thread hands over.

**A stream waits for values, and not for another stream.** If it waited for all work that another
stream has been given so far, it would wait for too much: for the next micro-batch's forward as
well, if the host has launched that already. So an event is recorded behind the work that makes a
value, and kept with the value.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fxpipe.ir._torch import pytree

COMPUTE, COPY, CALLER = "compute", "copy", "caller"


def stream_name(device: torch.device | str, role: str) -> str:
    """The name of a stream: ``"cuda:1/copy"`` for the device ``cuda:1`` and the role ``copy``."""
    return f"{device}/{role}"


@cache
def device_of(name: str) -> torch.device | None:
    """The device of a stream; None for the caller's, which is wherever the inputs are."""
    return None if name == CALLER else torch.device(name.split("/")[0])


def has_streams(device: torch.device | None) -> bool:
    """Whether work on the device goes to streams: it does on accelerators only."""
    if device is None or device.type == "cpu":
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and device.type == accelerator.type


def is_captured(device: torch.device) -> bool:
    """Whether what this thread launches on the device is recorded for a graph (of CUDA, say),
    instead of being done."""
    if not has_streams(device):
        return False
    ask = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def stream(name: str) -> torch.Stream | None:
    """The stream of that name: the one on which this thread computes on the name's device.

    None on the CPU and any other device without streams, and for the name of a copy stream, which
    stands for the streams of several links.
    """
    device = device_of(name)
    if device is None or name.endswith(COPY) or not has_streams(device):
        return None
    return torch.accelerator.current_stream(device)


Ends = tuple[torch.Stream | None, torch.Stream | None]


def link(source: torch.device, target: torch.device, of_inputs: bool = False) -> Ends:
    """The streams of a link, at its source and at its target; None where a device has none.

    ``of_inputs``: the link for what the caller gives, which must not queue behind what stages send.
    """
    return _link(source, target, of_inputs)


@cache  # it would keep calls apart that give the same argument by name, by place, or by default
def _link(source: torch.device, target: torch.device, of_inputs: bool) -> Ends:
    ends = (device if has_streams(device) else None for device in (source, target))
    one, other = (None if device is None else torch.Stream(device) for device in ends)
    return one, other


def beside(devices: Iterable[torch.device]) -> Any:
    """A context in which autograd nodes are made that must not hold up what is computed.

    The engine lets the stream on which a node was made wait for the gradients that the node gets,
    before its backward. So that the compute stream need not wait for them, such a node is made on
    a stream aside, on which nothing is computed.
    """
    return on(*(_aside(device) for device in dict.fromkeys(devices) if has_streams(device)))


@cache
def _aside(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def current(devices: Iterable[torch.device]) -> list[torch.Stream]:
    """The streams on which the running thread computes, one for each device that has streams."""
    found = (stream(stream_name(device, COMPUTE)) for device in dict.fromkeys(devices))
    return [each for each in found if each is not None]


@contextmanager
def on(*streams: torch.Stream | None) -> Iterator[None]:
    """Run on these streams, each current on its device; the current device stays as it is."""
    real = [s for s in streams if s is not None]
    before = current(s.device for s in real)
    if before == real:
        yield
        return
    device = torch.accelerator.current_device_index()
    try:
        for s in real:
            torch.accelerator.set_stream(s)
        torch.accelerator.set_device_index(device)
        yield
    finally:
        for s in before:
            torch.accelerator.set_stream(s)
        torch.accelerator.set_device_index(device)


# ------------------------------------------------------------------- from when on a value is there

_EVENTS: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The event of a tensor: once it has come, the tensor has been made."""


def made(values: Any, by: torch.Stream | None) -> None:
    """Record that the tensors among the values are made once a stream has done its work so far."""
    if by is None:
        return
    event = by.record_event()
    for tensor in _tensors(values):
        _EVENTS[tensor] = event


def pass_on(known: Tensor, other: Tensor) -> None:
    """Record that another tensor is made when the ``known`` one is, unless it has its own event.

    The other one is a view of the known one, or travels beside it.
    """
    event = _event(known) if _EVENTS else None
    if event is not None and other not in _EVENTS:
        _EVENTS[other] = event


def _event(tensor: Tensor) -> torch.Event | None:
    event: torch.Event | None = _EVENTS.get(tensor)  # type: ignore[no-untyped-call]
    return event


def await_made(waiting: torch.Stream | None, values: Any) -> None:
    """Let a stream wait, from now on, until the values have been made.

    Their memory is kept until the stream is done with it. A value without an event was made by this
    thread's own streams, whose order already puts its use after its making.
    """
    if waiting is None:
        return
    tensors = _tensors(values)
    for event in dict.fromkeys(map(_event, tensors)):
        if event is not None:
            waiting.wait_event(event)
    keep(waiting, tensors)


def keep(stream: torch.Stream | None, values: Any) -> None:
    """Do not reuse the values' memory before the stream has done what it has been given so far."""
    if stream is None:
        return
    for tensor in _tensors(values):
        if tensor.device == stream.device and tensor.numel():
            tensor.record_stream(stream)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


# In each thread, ``given``: what the caller has handed over for the run; and ``passed``: by compute
# stream, the events of its last crossings.
_here = threading.local()

AHEAD = 4
"""How many crossings of a compute stream the host may launch ahead of the device. A stage crosses
twice, when its values arrive and when they leave, so that two stages' work is in the queue."""


def keep_pace(computing: torch.Stream | None) -> None:
    """Note that values cross to or from a compute stream, and let the host thread wait for the
    crossing that is ``AHEAD`` back.

    What two streams use is free again only once both have *done* what they were given (see
    :func:`keep`), and not, as memory of one stream, once they have been *given* it. So a host
    thread that ran ahead without bound would need memory for all micro-batches, whatever the
    schedule. No value is waited for here: the order of the streams does not depend on it.
    """
    if computing is None:
        return
    passed: dict[torch.Stream, deque[torch.Event]] = _here.__dict__.setdefault("passed", {})
    events = passed.setdefault(computing, deque())
    events.append(computing.record_event())
    if len(events) > AHEAD:
        events.popleft().synchronize()


# --------------------------------------------------------------------------------------- hand-over


class HandOver:
    """The caller's tensors in a run: from when on they may be read, and until when they are.

    Args:
        streams: those on which the caller computes. Copies of what it gives wait for the work that
            these have at the start of the run. If they waited for the streams instead, they would
            wait for work that stages have been given since.
    """

    def __init__(self, streams: Iterable[torch.Stream]) -> None:
        self._begun = {stream.device: stream.record_event() for stream in streams}
        self._reads: list[tuple[torch.device, torch.Event]] = []

    def begun(self, device: torch.device) -> torch.Event | None:
        """The event at which what the caller has on the device is made; None if that is unknown."""
        return self._begun.get(device)

    def is_read(self, tensor: Tensor, by: torch.Stream) -> None:
        """Note that the copies which a stream has been given so far read a tensor."""
        self._reads.append((tensor.device, by.record_event()))

    def give_back(self) -> None:
        """Wait until the caller's tensors have been read, so that it may write to them again.

        Its streams wait for what is on devices, and the host for what is in its own memory: from
        pinned memory a device reads when it gets there, and not when the copy is launched. Only
        copies are waited for, and they wait for no computation.
        """
        for device, event in self._reads:
            if has_streams(device):
                torch.accelerator.current_stream(device).wait_event(event)
            else:
                event.synchronize()
        self._reads.clear()


@contextmanager
def handed_over(given: HandOver) -> Iterator[None]:
    """A context in which this thread takes part in a run, to which the caller has given tensors."""
    before = getattr(_here, "given", None)
    _here.given = given
    try:
        yield
    finally:
        _here.given = before


def await_callers(waiting: torch.Stream | None, tensor: Tensor) -> None:
    """The stream waits for a tensor that the caller has given, and keeps its memory."""
    if waiting is None:
        return
    given = _given()
    event = _event(tensor) or (given.begun(tensor.device) if given else None)
    if event is not None:
        waiting.wait_event(event)
    else:
        for computing in current([tensor.device]):
            waiting.wait_stream(computing)
    keep(waiting, tensor)


def read_callers(tensor: Tensor, by: torch.Stream | None) -> None:
    """Note that a stream has been given a copy of the caller's tensor.

    The caller gets it back at the end of the run (:meth:`HandOver.give_back`); outside of a run,
    at once.
    """
    if by is None:
        return
    given = _given()
    reading = given or HandOver([])
    reading.is_read(tensor, by)
    if given is None:
        reading.give_back()


def _given() -> HandOver | None:
    given: HandOver | None = getattr(_here, "given", None)
    return given
