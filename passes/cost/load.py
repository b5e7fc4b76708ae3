"""Counts the FLOPs that operators compute, the bytes that they move, and the memory that they need,
while pass "cost" runs them on fake tensors."""

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


@dataclass(frozen=True)
class Update:
    """What the step of an optimizer takes.

    Attributes:
        memory: the bytes that it needs only while it runs, for each byte of the parameters, where
            it steps all of them at once.
        bytes: the bytes that it reads and writes, for each byte of the parameters.
        operators: how many operators it launches: for all parameters, or for each.
        is_at_once: whether it steps all parameters at once where it can, as on accelerators.
    """

    memory: float = 0.0
    bytes: float = 0.0
    operators: int = 0
    is_at_once: bool = True

    def seconds(self, size: float, count: int, device: DeviceSpec) -> float:
        """Seconds for parameters of so many bytes on a device. ``count`` is their number.

        All operators move about as much. So either all of them take longer than it takes to launch
        them, or none does.
        """
        is_at_once = self.is_at_once and device.host_bytes_per_s
        launches = self.operators * (min(count, 1) if is_at_once else count)
        return max(self.bytes * size / device.bytes_per_s, launches * device.launch_s)


NO_UPDATE = Update()  # of an optimizer that takes nothing


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
        flops = flops_of(func, args, kwargs, result)
        is_full = bool(flops) and not uses_tf32(func.overloadpacket in CONVOLUTIONS)
        is_kept = is_product(func, args, kwargs)
        loads = [self.load] if is_kept else [self.load, self.rest]
        for load in loads:
            load.flops += flops
            load.is_full |= is_full
        if func is torch.ops.fxpipe.computed.default:
            _, _, operators, size = args
            for load in loads:
                load.operators += operators
                load.bytes += size
        if (size := moved(func, args, kwargs, result)) is not None:
            is_half = any(t.dtype.itemsize == 2 for t in tensors_of(result))
            for load in loads:
                load.operators += 1
                load.bytes += size
                load.is_half |= is_half
            self.load.products += tensor_bytes(result) * is_kept
            made = self.memory.note(result, (args, kwargs))
            self.products = self.products | made if is_kept else self.products - made
        return result
