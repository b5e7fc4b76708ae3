"""Counts the FLOPs that operators compute and the bytes that they move, while pass "cost" runs them
on fake tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from fxpipe.ir._torch import TorchDispatchMode
from fxpipe.ir.devices import DeviceSpec
from fxpipe.ir.tensors import tensor_bytes, tensors_of


@dataclass
class Load:
    """The FLOPs that operators compute, the bytes that they move, and how many operators run."""

    flops: int = 0
    bytes: int = 0
    operators: int = 0
    is_half: bool = False  # whether some operator computes in 16 bits

    def times(self, count: int, launches: int | None = None) -> Load:
        """The load of ``count`` repetitions; operators are launched ``launches`` times, if that is
        another number."""
        operators = self.operators * (count if launches is None else launches)
        return Load(self.flops * count, self.bytes * count, operators, self.is_half)

    def seconds(self, device: DeviceSpec) -> float:
        """Seconds on a device by the roofline model (Williams et al. 2009).

        The time is the longer of computing FLOPs and moving bytes, plus the launches of operators.
        """
        rate = device.half_flops_per_s if self.is_half else None
        computing = self.flops / (rate or device.flops_per_s)
        return max(computing, self.bytes / device.bytes_per_s) + self.operators * device.launch_s


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    heads = query[1]
    count: Any = sdpa_flop_count
    return count(query, _of_heads(key, heads), _of_heads(value, heads))


def _attention_backward_flops(
    gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any
) -> Any:
    heads = query[1]
    count: Any = sdpa_backward_flop_count
    return count(gradient, query, _of_heads(key, heads), _of_heads(value, heads))


def _of_heads(shape: Any, heads: int) -> Any:
    """The shape of keys or values as if each query head had its own (grouped-query attention)."""
    return (shape[0], heads, *shape[2:])


ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}
"""FLOP formulas for the CPU's attention kernels, which ``FlopCounterMode`` does not know."""


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that counts the operators that run in it, their FLOPs, and the bytes that they read
    and write. Views move no bytes, and are not counted."""

    def __init__(self, load: Load) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.load = load
        self.flops = FlopCounterMode(display=False, custom_mapping=ATTENTION)

    def __enter__(self) -> Any:
        self.flops.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.flops.__exit__(*error)  # type: ignore[no-untyped-call]
        self.load.flops = self.flops.get_total_flops()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        moves = not func.is_view and func is not torch.ops.aten._unsafe_view.default
        if moves and tensors_of(result):  # queries, such as prim.device, give no tensor
            self.load.operators += 1
            self.load.bytes += tensor_bytes((args, kwargs, result))
            self.load.is_half |= any(t.dtype.itemsize == 2 for t in tensors_of(result))
        return result
