"""Offloading: what a forward saves for its backward waits in the host's memory.

::

    forward   saves t1, t2, ...                                backward   asks for t2, t1, ...
                      `── out ── host's memory ── back ── t1, t2, ... ──'
                          [link to the host]     [link from the host]

The backward computes with the same bits, and nothing is computed twice: what it costs is the way
there and back. On an accelerator both copies run on links of their own, beside computation, and the
host's memory is pinned. On the CPU there is no other memory, so that a second buffer stands for it:
this saves nothing, and lets the same code be tried there.

::

    computing    F0 ───── F1 ───── F2           F2 waits until what F0 has saved is on the host
    link            `─ out 0   `─ out 1         its memory is F2's from then on

All memory on the device is the computing stream's, in the order in which the host launches: it is
given up at the next move, once the stream waits for the copy. So how far the host is ahead changes
nothing: two micro-batches' activations are there at one time, that of the running action and those
on their way.

Tensors that share memory travel together: what moves are the bytes that they span. What is alive
anyway (parameters, buffers) stays where it is, and so do tensors that are hardly larger than what
is noted of them, and those whose memory is not of one piece.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir.tensors import memory_of
from fxpipe.runtime.checkpointing.recomputation import (
    check_version,
    looks_of,
    said,
    uncompiled,
    version_in,
)
from fxpipe.runtime.streams import current, keep, link, on

SMALL = 1024
"""Bytes. A tensor that is smaller is not worth its way to the host and back."""

ALIGNED = 512
"""Bytes. What moves begins at a multiple of this, and lies at one afterwards: some kernels choose
their way by how a tensor lies in memory, and so might give other bits."""

_HOST = torch.device("cpu")
_moving: dict[torch.Stream, list[weakref.ref[Block]]] = {}
"""By a computing stream: the blocks that have begun to leave its device, and that it has not waited
for yet."""
_lock = threading.Lock()  # for what is above


class Block:
    """Bytes that move together.

    Args:
        on_device: where they are at first.
    """

    def __init__(self, on_device: Tensor) -> None:
        self.device, self.size = on_device.device, on_device.numel()
        self.on_device: Tensor | None = on_device
        self.on_host: Tensor | None = None
        self.link: torch.Stream | None = None  # that copies them, as long as nobody waits for it
        self.copied: torch.Event | None = None  # behind that copy
        self._lock = threading.Lock()  # two threads may want the bytes back

    def send(self, link: torch.Stream | None) -> None:
        """Begin to copy the bytes to the host; a device without streams gives them up at once."""
        assert self.on_device is not None
        pin = link is not None
        self.on_host = torch.empty(self.size, dtype=torch.uint8, device=_HOST, pin_memory=pin)
        with on(link):
            self.on_host.copy_(self.on_device, non_blocking=pin)
        if link is None:
            self.on_device = None
        self.link = link

    def give_up(self, computing: torch.Stream) -> None:
        """Give up the bytes on the device, since the computing stream waits for the copy now."""
        assert self.copied is not None
        computing.wait_event(self.copied)
        self.on_device = self.link = None

    def fetch(self, link: torch.Stream | None) -> None:
        """Begin to copy the bytes back to the device, unless this has begun already."""
        with self._lock:
            if self.on_device is not None:
                return
            assert self.on_host is not None
            back = torch.empty(self.size, dtype=torch.uint8, device=self.device)
            if link is not None and self.copied is not None:
                link.wait_event(self.copied)
            with on(link):
                back.copy_(self.on_host, non_blocking=True)
            if link is not None:
                self.copied = link.record_event()
            self.on_device, self.link = back, link

    def there(self) -> Tensor:
        """The bytes, back on the device; the stream that runs here waits until they are."""
        if self.on_device is None:
            _fetch([self], self.device)
        assert self.on_device is not None
        if self.copied is not None:
            for computing in current([self.device]):
                computing.wait_event(self.copied)
                keep(computing, self.on_device)
            self.link = None
        return self.on_device

    def __del__(self) -> None:
        if self.link is not None:  # nobody has waited for the copy
            keep(self.link, self.on_device)


class HostSlot:
    """Stands for one saved tensor in the autograd graph: the tensor, until it moves; then the block
    that has its bytes, and where it lies in it."""

    __slots__ = ("__weakref__", "at", "block", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version = version_in(tensor)
        self.block: Block | None = None
        self.at: tuple[Any, ...] = ()

    def put_into(self, block: Block, start: int) -> None:
        """Note that the tensor's bytes are in a block, which begins at ``start`` of its memory."""
        tensor, self.tensor = self.tensor, None
        assert tensor is not None
        offset = tensor.storage_offset() - start // tensor.itemsize
        self.block, self.at = block, (tensor.dtype, offset, tensor.size(), tensor.stride())

    def taken(self) -> Tensor:
        """The tensor. Raises RuntimeError if it has been written to since it was saved."""
        if self.block is None:
            assert self.tensor is not None
            look = said(looks_of(self.tensor))
            check_version(self.tensor, self.version, f"a tensor ({look})")
            return self.tensor
        dtype, offset, size, stride = self.at
        memory = self.block.there()
        empty = torch.empty(0, dtype=dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), offset, size, stride)


class Offload:
    """What one call saves for its backward, on its way to the host and back.

    Only the autograd graph keeps what is saved, so that it is freed as the backward goes.

    Args:
        module: the module that is called, whose parameters and buffers stay.
        args: its arguments; parameters among them stay, too.
    """

    def __init__(self, module: nn.Module, args: Iterable[Any]) -> None:
        given = (arg for arg in args if isinstance(arg, nn.Parameter))
        lasting = (*module.parameters(), *module.buffers(), *given)
        self._lasting = {memory_of(each) for each in lasting}
        self._slots: list[weakref.ref[HostSlot]] = []
        self._blocks: list[weakref.ref[Block]] = []

    def saving(self) -> AbstractContextManager[None]:
        """A context for the call, which notes what autograd saves in it."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    @uncompiled
    def _pack(self, tensor: Tensor) -> HostSlot:
        slot = HostSlot(tensor.detach() if tensor.grad_fn is not None else tensor)
        if self._moves(tensor):
            self._slots.append(weakref.ref(slot))
        return slot

    def _moves(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and tensor.layout is torch.strided
            and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
            and memory_of(tensor) not in self._lasting
        )

    def out(self, device: torch.device, share: float = 1.0) -> None:
        """Begin to move to the host what has been saved on a device, where the call computes, or a
        share of these bytes: what has been saved first, since the backward needs it last."""
        slots, self._slots = _living(self._slots), []
        blocks = list(_blocks(slots, device, share))
        self._blocks += map(weakref.ref, blocks)
        computing, (leaving, _) = _computing(device), link(device, _HOST)
        if computing is not None and leaving is not None:
            _give_up(computing)
            leaving.wait_event(computing.record_event())
        for block in blocks:
            block.send(leaving)
        if computing is not None and leaving is not None:
            copied = leaving.record_event()
            for block in blocks:
                block.copied = copied
            with _lock:
                _moving[computing] = list(map(weakref.ref, blocks))

    def restore(self) -> None:
        """Begin to move back what the autograd graph still has, what has been saved last first, as
        the backward needs it. A backward that finds it on its way waits for it; one that comes
        before that moves it itself."""
        blocks = _living(reversed(self._blocks))
        if blocks:
            _fetch(blocks, blocks[0].device)


def _computing(device: torch.device) -> torch.Stream | None:
    return next(iter(current([device])), None)


def _give_up(computing: torch.Stream) -> None:
    """Give up the memory of what has moved to the host from the computing stream's device."""
    with _lock:
        blocks = _living(_moving.pop(computing, []))
    for block in blocks:
        block.give_up(computing)


def _fetch(blocks: Iterable[Block], device: torch.device) -> None:
    """Begin to move back those of the blocks, all of one device, that have not begun to."""
    computing, (_, arriving) = _computing(device), link(_HOST, device)
    if computing is not None and arriving is not None:
        _give_up(computing)
        arriving.wait_event(computing.record_event())  # their memory may be in use until then
    for block in blocks:
        block.fetch(arriving)


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    own = tensor.device
    return own.type == device.type and device.index in (None, own.index)


def _living(refs: Iterable[weakref.ref[Any]]) -> list[Any]:
    return [each for ref in refs if (each := ref()) is not None]


def _blocks(slots: Iterable[HostSlot], device: torch.device, share: float) -> Iterator[Block]:
    """Blocks with the bytes of tensors that move, as many as come nearest to a share of all; each
    tensor is in one of them then. One that has been written to since it was saved stays, and is
    refused when the backward asks for it."""
    memories: dict[int, list[tuple[int, int, HostSlot]]] = {}
    for slot in slots:
        tensor = slot.tensor
        if tensor is not None and _is_on(tensor, device) and version_in(tensor) == slot.version:
            begin, end = _span(tensor)
            memories.setdefault(memory_of(tensor), []).append((begin, end, slot))
    merged = [span for spans in memories.values() for span in _merged(spans)]
    for i in that_move([end - begin for begin, end, _ in merged], share):
        begin, end, own = merged[i]
        (tensor, *_) = (slot.tensor for slot in own)
        assert tensor is not None
        bytes_of = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        bytes_of.set_(tensor.untyped_storage(), begin, (end - begin,), (1,))
        block = Block(bytes_of)
        for slot in own:
            slot.put_into(block, begin)
        yield block


def that_move(sizes: Sequence[float], share: float) -> list[int]:
    """Which tensors of these sizes move, in the order in which they have been saved: as many of the
    first as come nearest to a share of all bytes, but none that is small. A plan counts with this
    what will move."""
    movable, found = [i for i, size in enumerate(sizes) if size >= SMALL], list[int]()
    left = share * sum(sizes[i] for i in movable)
    for i in movable:
        if left < sizes[i] / 2:
            break
        left -= sizes[i]
        found.append(i)
    return found


def _span(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its memory that a tensor spans, from the first to behind the last one; the first
    is a multiple of :data:`ALIGNED`."""
    first, steps = int(tensor.storage_offset()), zip(tensor.size(), tensor.stride(), strict=True)
    last = first + sum((int(n) - 1) * int(step) for n, step in steps)
    begin = first * tensor.itemsize // ALIGNED * ALIGNED
    return begin, (last + 1) * tensor.itemsize if tensor.numel() else begin


def _merged(spans: list[tuple[int, int, HostSlot]]) -> Iterator[tuple[int, int, list[HostSlot]]]:
    """The spans of one memory, those that overlap as one."""
    begin = end = 0
    own: list[HostSlot] = []
    for first, last, slot in sorted(spans, key=lambda span: span[:2]):
        if own and first < end:
            end = max(end, last)
            own.append(slot)
            continue
        if own:
            yield begin, end, own
        begin, end, own = first, last, [slot]
    if own:
        yield begin, end, own


@uncompiled
def _unpack(slot: HostSlot) -> Tensor:
    return slot.taken()
