"""Counts the FLOPs that operators compute, the bytes that they move, and the memory that they need,
while they run: for pass "cost" they do so on fake tensors."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxpipe.ir._torch import TorchDispatchMode
from fxpipe.ir.devices import DeviceSpec
from fxpipe.ir.flops import flops_of, is_product, moved
from fxpipe.ir.precision import uses_tf32
from fxpipe.ir.tensors import memory_bytes, memory_of, tensor_bytes, tensors_of

AMOUNTS = "flops", "bytes", "operators", "memory", "products"
"""The parts of a load that are amounts."""


@dataclass
class Load:
    """The FLOPs that operators compute, the bytes that they move, how many operators run, the most
    bytes of tensors that they have made and that are there at the same time, and the bytes of the
    results of products."""

    flops: int = 0
    bytes: int = 0
    operators: int = 0
    is_half: bool = False  # whether some operator computes in 16 bits
    is_full: bool = False  # whether some product of float32 may not be computed in TF32
    memory: int = 0
    products: int = 0

    def times(self, count: int) -> Load:
        """The load of ``count`` repetitions."""
        amounts = {name: getattr(self, name) * count for name in AMOUNTS}
        return replace(self, **amounts)

    def fixed(self, larger: Load, more: float) -> Load:
        """The part of the load that does not grow with the rows, which each micro-batch has in full
        however few rows it has: all weights are read, gradients of weights are as large as for many
        rows, and every operator is launched.

        ``larger`` is the load of ``more`` times as many further rows. What grows faster than the
        rows has no such part.
        """

        def part(amount: int, grown: int) -> int:
            return round(min(max(amount - (grown - amount) / more, 0), amount))

        amounts: Any = {n: part(getattr(self, n), getattr(larger, n)) for n in AMOUNTS}
        return replace(self, **amounts)

    def of_all(self, fixed: Load, times: float, chunks: int) -> Load:
        """The load of ``chunks`` micro-batches, which have ``times`` as many rows as the one that
        has this load, if each has the part ``fixed`` in full."""
        amounts: Any = {}
        for name in AMOUNTS:
            part = getattr(fixed, name)
            amounts[name] = round((getattr(self, name) - part) * times) + part * chunks
        return replace(self, **amounts)

    def seconds(self, device: DeviceSpec) -> float:
        """Seconds on a device by the roofline model (Williams et al. 2009).

        The time is the longer of computing FLOPs and moving bytes, plus the launches of operators.
        """
        full = device.full_flops_per_s if self.is_full else None
        rate = device.half_flops_per_s if self.is_half else full
        computing = self.flops / (rate or device.flops_per_s)
        return max(computing, self.bytes / device.bytes_per_s) + self.operators * device.launch_s


CONVOLUTIONS = {torch.ops.aten.convolution, torch.ops.aten.convolution_backward}


class Living:
    """Counts the bytes of the tensors that operators make, as long as they are there.

    Attributes:
        now, most: the bytes that are there at present, and the most so far.
    """

    def __init__(self) -> None:
        self.now = self.most = 0
        self._there: dict[int, weakref.finalize[..., Any]] = {}

    def note(self, result: Any, given: Any) -> set[int]:
        """Note what an operator has made of what it was ``given``, whose memory it may return.
        Returns the memories that are new."""
        known = {memory_of(tensor) for tensor in tensors_of(given)}
        for tensor in tensors_of(result):
            memory = memory_of(tensor)
            if memory not in known and memory not in self._there and tensor.layout == torch.strided:
                size = memory_bytes(tensor)
                self.now += size
                storage = tensor.untyped_storage()
                self._there[memory] = weakref.finalize(storage, self._forget, memory, size)
        self.most = max(self.most, self.now)
        return {memory_of(tensor) for tensor in tensors_of(result)} - known

    def _forget(self, memory: int, size: int) -> None:
        del self._there[memory]
        self.now -= size


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that counts the operators that run in it, their FLOPs, and the bytes that they read
    and write. Views move no bytes, and are not counted. ``rest`` counts operators other than
    products, and ``products`` has the memories of the results of products."""

    def __init__(self, load: Load, rest: Load | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.load, self.rest = load, rest or Load()
        self.memory = Living()
        self.products = set[int]()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.load.memory = self.memory.most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        work, of_products, results = _performed(func, args, kwargs, result)
        others = [one - other for one, other in zip(work, of_products, strict=True)]
        is_half = any(t.dtype.itemsize == 2 for t in tensors_of(result))
        for load, (flops, size, operators) in (self.load, work), (self.rest, others):
            load.flops += flops
            load.bytes += size
            load.operators += operators
            load.is_half |= bool(operators) and is_half
            load.is_full |= bool(flops) and not uses_tf32(func.overloadpacket in CONVOLUTIONS)
        self.load.products += results
        made = self.memory.note(result, (args, kwargs))
        is_kept = is_product(func, args, kwargs)
        self.products = self.products | made if is_kept else self.products - made
        return result


NOTHING = 0, 0, 0


def _performed(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[Any, Any, int]:
    """The FLOPs of an operator, the bytes that it reads and writes, and how many operators it is;
    the same for the products in it; and the bytes of their results. A view is no operator."""
    if func is torch.ops.fxpipe.made.default:
        *_, work, (*of_products, results) = args
        return work, of_products, results
    size = moved(func, args, kwargs, result)
    work = flops_of(func, args, kwargs, result), size or 0, int(size is not None)
    if is_product(func, args, kwargs):
        return work, work, tensor_bytes(result)
    return work, NOTHING, 0
