"""Streams by name, on any kind of device.

A stream is named by its device and what it is for: ``"cuda:1/compute"`` is the stream on which the
running thread computes on that device, ``"cuda:1/copy"`` one that fxpipe keeps for copies.
``"caller"`` is wherever the inputs are and the thread that called computes. On the CPU there are no
streams: a thread does one thing after the other, and hand-over between threads waits by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

COMPUTE, COPY, CALLER = "compute", "copy", "caller"


def stream_name(device: torch.device | str, role: str) -> str:
    """``"cuda:1/copy"`` of the device ``cuda:1`` and the role ``copy``."""
    return f"{device}/{role}"


@cache
def device_of(name: str) -> torch.device | None:
    """The device of a stream; None for the caller's, which is wherever the inputs are."""
    return None if name == CALLER else torch.device(name.split("/")[0])


@cache
def _copy_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def stream(name: str) -> torch.Stream | None:
    """The stream of that name in this thread; None on the CPU, and on any device without."""
    device = device_of(name)
    if device is None or device.type == "cpu":
        return None
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or device.type != accelerator.type:
        return None
    if name.endswith(COPY):
        return _copy_stream(device)
    return torch.accelerator.current_stream(device)


def current(devices: Iterable[torch.device]) -> list[torch.Stream]:
    """The streams on which the running thread computes, as far as the devices have any."""
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


def make_wait(waiting: torch.Stream | None, awaited: torch.Stream | None, values: Any) -> None:
    """What ``waiting`` does from now on comes after what ``awaited`` has been given so far.

    The values' memory is kept until ``waiting`` is done with it.
    """
    if waiting is None or awaited is None or waiting == awaited:
        return
    waiting.wait_stream(awaited)
    keep(waiting, values)


def keep(stream: torch.Stream | None, values: Any) -> None:
    """Do not reuse the values' memory before the stream has done what it has been given so far."""
    if stream is None:
        return
    for tensor in pytree.tree_leaves(values):
        if isinstance(tensor, Tensor) and tensor.device == stream.device and tensor.numel():
            tensor.record_stream(stream)
