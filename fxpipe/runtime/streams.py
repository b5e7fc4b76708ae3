"""Streams by name, on any kind of device, and the events after which a value may be used.

``"cuda:1/compute"`` is the stream on which the running thread computes on that device.
``"cuda:1/copy"`` stands for the copy streams of all links to that device. A link copies from one
device to another and has a stream on each of the two. Each pair of devices has a link for either
direction, so that no copy waits for a copy between other devices::

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
from contextlib import contextmanager, nullcontext
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


@cache
def is_of_cpu(name: str) -> bool:
    """Whether a stream's name is one of the CPU's, where nothing waits and nothing is copied."""
    device = device_of(name)
    return device is not None and device.type == "cpu"


def has_streams(device: torch.device | None) -> bool:
    """Whether work on the device goes to streams: it does on accelerators only."""
    if device is None or device.type == "cpu":
        return False
    return device.type in _ACCELERATOR or _is_of_accelerator(device)


_ACCELERATOR: set[str] = set()
"""The type of this process's accelerator, once a device of it has been asked for. A process has one
kind at most, and to ask PyTorch for it takes longer than the rest of :func:`has_streams`."""


def _is_of_accelerator(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and device.type == accelerator.type:
        _ACCELERATOR.add(device.type)
    return device.type in _ACCELERATOR


def is_captured(device: torch.device) -> bool:
    """Whether this thread's launches on the device are captured in a graph (a CUDA graph, say), and
    not executed."""
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

    ``of_inputs``: the link for the caller's inputs, which must not queue behind what stages send.
    """
    return _link(source, target, of_inputs)


@cache  # link() itself is not cached: link(a, b) and link(a, b, False) would be two links
def _link(source: torch.device, target: torch.device, of_inputs: bool) -> Ends:
    ends = (device if has_streams(device) else None for device in (source, target))
    one, other = (None if device is None else torch.Stream(device) for device in ends)
    return one, other


def beside(devices: Iterable[torch.device]) -> Any:
    """A context for making autograd nodes that compute nothing, so that nothing waits for them.

    Before a node's backward, the engine lets the stream on which the node was made wait for the
    node's incoming gradients. Were that the compute stream, its next kernels would wait as well.
    Within this context it is a stream aside, on which nothing is computed.
    """
    found = [_aside(device) for device in dict.fromkeys(devices) if has_streams(device)]
    return on(*found) if found else _AS_IT_IS


_AS_IT_IS = nullcontext()


@cache
def _aside(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def current(devices: Iterable[torch.device]) -> list[torch.Stream]:
    """The streams on which the running thread computes, one for each device that has streams."""
    found = [device for device in dict.fromkeys(devices) if has_streams(device)]
    return [torch.accelerator.current_stream(device) for device in found]


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


# ------------------------------------------------------------------------- when a value is computed

_EVENTS: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""For a tensor: the event that is recorded behind the work which computes the tensor."""


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

    Their memory is kept until the stream is done with it. A value without an event was made on this
    thread's own streams; these run in order, so that every use of it comes after its making.
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
    if type(values) is Tensor:
        return [values]
    if type(values) is tuple and {*map(type, values)} == {Tensor}:
        return list(values)  # by far the most frequent case, where a pytree takes longer
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


# Of each thread: ``given`` is the HandOver of the run that it takes part in, and ``passed`` has the
# events that keep_pace() has recorded last on each compute stream.
_here = threading.local()

AHEAD = 4
"""How many crossings of a compute stream (see keep_pace) the host may launch ahead of the device.
One run of a stage has two, as its values arrive and as they leave: the queue holds two runs."""


def keep_pace(computing: torch.Stream | None) -> None:
    """Note that values cross to or from a compute stream, and let the host thread wait until the
    device has reached the crossing ``AHEAD`` before this one.

    Memory that one stream uses can be reused as soon as the host has *launched* the last use. But
    memory that two streams use is free only when both have *done* their work (see :func:`keep`). So
    a host thread that ran ahead without bound would need memory for all micro-batches, whatever the
    schedule. This bounds memory only: values are right without it.
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
    """Keeps, for one run, when the caller's tensors may be read, and when they have been read.

    Args:
        streams: those on which the caller computes. A copy of the caller's tensor waits for the
            work that these have been given at the start of the run. If it waited for the streams
            themselves, it would wait for work that stages have been given since, as well.
    """

    def __init__(self, streams: Iterable[torch.Stream]) -> None:
        self._begun = {stream.device: stream.record_event() for stream in streams}
        self._reads: list[tuple[torch.device, torch.Event]] = []

    def begun(self, device: torch.device) -> torch.Event | None:
        """The event after which the caller's tensors on the device are computed; None if that is
        unknown."""
        return self._begun.get(device)

    def note_read(self, tensor: Tensor, by: torch.Stream) -> None:
        """Note that a stream has been given a copy that reads a tensor."""
        self._reads.append((tensor.device, by.record_event()))

    def give_back(self) -> None:
        """Wait until the caller's tensors have been read, so that the caller may write to them.

        For a tensor on an accelerator, the caller's stream waits. For a tensor in the host's memory
        the host waits: a copy from pinned memory reads when the device gets to it, and not when the
        host launches it. All these waits are for copies that themselves wait for no computation.
        """
        for device, event in self._reads:
            if has_streams(device):
                torch.accelerator.current_stream(device).wait_event(event)
            else:
                event.synchronize()
        self._reads.clear()


@contextmanager
def handed_over(given: HandOver) -> Iterator[None]:
    """A context in which this thread takes part in the run to which ``given`` belongs."""
    before = getattr(_here, "given", None)
    _here.given = given
    try:
        yield
    finally:
        _here.given = before


def await_callers(waiting: torch.Stream | None, tensor: Tensor) -> None:
    """Let a stream wait until a tensor that the caller has given is computed.

    Its memory need not be kept for the stream: the caller has the tensor until the run has ended,
    and then its own streams wait for what the stream reads (:func:`read_callers`).
    """
    if waiting is None:
        return
    given = _given()
    event = _event(tensor) or (given.begun(tensor.device) if given else None)
    if event is not None:
        waiting.wait_event(event)
    else:
        for computing in current([tensor.device]):
            waiting.wait_stream(computing)


def read_callers(tensor: Tensor, by: torch.Stream | None) -> None:
    """Note that a stream has been given a copy that reads one of the caller's tensors.

    The end of the run waits for that copy (:meth:`HandOver.give_back`). Outside of a run this
    function waits for it.
    """
    if by is None:
        return
    given = _given()
    reading = given or HandOver([])
    reading.note_read(tensor, by)
    if given is None:
        reading.give_back()


def _given() -> HandOver | None:
    given: HandOver | None = getattr(_here, "given", None)
    return given
