"""Copy and wait: the nodes that cross devices and streams, with their mirror in the backward.

::

    forward    source  --- wait --- [copy stream]  copy  [copy stream] --- wait ---  target
    backward   source  <-- wait <-- [copy stream]  copy  [copy stream] <-- wait <--  target

Each is one autograd node for all its values. A gradient comes back in the dtype and on the device
of the tensor that was sent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpipe.runtime.dependency import flattened, gate
from fxpipe.runtime.engine import first
from fxpipe.runtime.streams import CALLER, current, device_of, keep, make_wait, on, stream


def moved(tensor: Tensor, device: torch.device | None, source: str, target: str) -> Tensor:
    """The tensor on a device, sent on the streams named. Where it is there already: itself."""
    if device is None or tensor.device == device:
        return tensor
    ends = stream(source), stream(target)
    with on(*ends):
        # To the CPU the host has to wait: there is no stream there that could.
        result = tensor.to(device, non_blocking=device.type != "cpu")
    keep(ends[0], tensor)
    return result


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: str, target: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.source, ctx.target = source, target
        ctx.homes = [t.device for t in tensors]
        # The caller's streams are the running thread's now. In the backward they will not be.
        ctx.callers = current(ctx.homes) if source == CALLER else []
        device = device_of(target)
        copies = (moved(t, device, source, target) for t in tensors)
        return tuple(c.view_as(c) for c in copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        homes = zip(grads, ctx.homes, strict=True)
        with on(*ctx.callers):
            back = [
                None if g is None else moved(g, home, ctx.target, ctx.source) for g, home in homes
            ]
        return (None, None, *back)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: str, target: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.source, ctx.target = source, target
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        make_wait(stream(ctx.source), stream(ctx.target), grads)
        return (None, None, *grads)


def copy(values: Any, source: str, target: str) -> Any:
    """The values on the target stream's device, sent from the source stream to the target's.

    On the same device the result shares the memory of what was sent.
    """
    values = gate(values, lambda *tensors: first(_Copy.apply(source, target, *tensors)))  # type: ignore[no-untyped-call]
    device = device_of(target)
    leaves, build = flattened(values)  # those that carry gradient are there by now
    return build([moved(x, device, source, target) if isinstance(x, Tensor) else x for x in leaves])


def wait(values: Any, source: str, target: str) -> Any:
    """The values, for use on the target stream: it waits for the source stream.

    In the backward the source stream waits for the target's.
    """
    make_wait(stream(target), stream(source), values)
    return gate(values, lambda *tensors: first(_Wait.apply(source, target, *tensors)))  # type: ignore[no-untyped-call]
