"""Copy and wait: the nodes that cross devices and streams, with their mirror in the backward.

::

    forward    source  --- wait --- [link]  copy  [link] --- wait ---  target
    backward   source  <-- wait <-- [link]  copy  [link] <-- wait <--  target

A copy, or a wait, is one autograd node for all its values. A gradient comes back in the dtype and
on the device of the tensor that was sent, over the link of the other direction. The copy's autograd
node belongs to that link's stream. So the autograd engine makes that stream wait for the work that
makes the gradient, and makes the work that uses the gradient wait for that stream.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir._torch import lean
from fxpipe.runtime.dependency import flattened, gate
from fxpipe.runtime.engine import first
from fxpipe.runtime.streams import (
    CALLER,
    COPY,
    await_callers,
    await_made,
    device_of,
    is_of_cpu,
    keep_pace,
    link,
    made,
    on,
    read_callers,
    stream,
)


def moved(tensor: Tensor, device: torch.device | None, source: str) -> Tensor:
    """Send a tensor to a device, over the link from the device where it is.

    If the tensor is on that device already, or if the device is None, it is returned itself.

    Args:
        source: the name of the stream that it comes from. The caller's tensors have separate links,
            which wait for the work that the caller has launched before the run, and no other.
    """
    if device is None or tensor.device == device:
        return tensor
    ends = link(tensor.device, device, source == CALLER)
    for end in ends:
        (await_callers if source == CALLER else await_made)(end, tensor)
    with on(*ends):
        # For a copy to the CPU the host has to wait, since the CPU has no stream that could.
        result = tensor.to(device, non_blocking=device.type != "cpu")
    made(result, ends[1])
    if source == CALLER:
        read_callers(tensor, ends[0] or ends[1])
    return result


def on_the_way_back(home: torch.device, device: torch.device | None) -> Any:
    """A context that makes the link from ``device`` back to ``home`` the current stream.

    Autograd runs the backward of a node on the stream on which the node was made. So a node made in
    this context sends gradients home over that link.
    """
    return _AS_IT_IS if device is None or home == device else on(link(device, home)[0])


_AS_IT_IS = nullcontext()


@lean
class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: str, target: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.homes = [t.device for t in tensors]
        copies = (moved(t, device_of(target), source) for t in tensors)
        return tuple(c.view_as(c) for c in copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        homes = zip(grads, ctx.homes, strict=True)
        return (None, None, *(None if g is None else moved(g, home, COPY) for g, home in homes))


@lean
class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: str, target: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.source, ctx.target = source, target
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        keep_pace(stream(ctx.source) or stream(ctx.target))
        await_made(stream(ctx.source), grads)
        return (None, None, *grads)


def copy(values: Any, source: str, target: str) -> Any:
    """Send values from the devices where they are to the target stream's device.

    On the same device the result shares the memory of what was sent. On the CPU a value that is
    there already is returned as it is. Several that carry gradient still go through one autograd
    node, so that their gradients go back together.
    """
    device = device_of(target)
    leaves, build = flattened(values)
    is_there = is_of_cpu(target) and all(x.is_cpu for x in leaves if isinstance(x, Tensor))

    def sent(*tensors: Tensor) -> tuple[Tensor, ...]:
        with on_the_way_back(tensors[0].device, device):
            copies: tuple[Tensor, ...] = first(_Copy.apply(source, target, *tensors))  # type: ignore[no-untyped-call]
        for tensor, copied in zip(tensors, copies, strict=True):
            if device is not None and tensor.device != device:
                made(copied, link(tensor.device, device, source == CALLER)[1])
        return copies

    if is_there:
        return gate(values, sent, least=2)
    leaves, build = flattened(gate(values, sent))  # tensors that carry gradient are moved now
    return build([moved(x, device, source) if isinstance(x, Tensor) else x for x in leaves])


def wait(values: Any, source: str, target: str) -> Any:
    """Let the target stream wait until the source stream has made the values. Returns the values.

    A copy stream stands for the streams of several links; each of these waits when it is given
    values to copy, and not here. On the CPU nothing has to wait; but if several values carry
    gradient, no gradient goes back before all have come.
    """

    is_on_host = is_of_cpu(source) and is_of_cpu(target)
    if is_on_host and not torch.is_grad_enabled():
        return values

    def waited(*tensors: Tensor) -> tuple[Tensor, ...]:
        return first(_Wait.apply(source, target, *tensors))  # type: ignore[no-untyped-call]

    if is_on_host:
        return gate(values, waited, least=2)
    computing, waiting = stream(source), stream(target)
    keep_pace(computing or waiting)
    await_made(waiting, values)
    values = gate(values, waited)
    if waiting is None:
        made(values, computing)
    return values
