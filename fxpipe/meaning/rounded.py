"""A model whose operators round otherwise, to learn how much of a difference is rounding.

Kernels compute the same row with other last bits among other numbers of rows. In most models these
errors remain small. In some they are amplified, by a norm over numbers that are nearly equal, say,
so that a gradient is right in its first two digits only. In others nothing but errors is left: of
the difference of two equal sums, say. A difference that is no larger than what other last bits make
of a result says nothing about the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpipe.ir._torch import TorchDispatchMode
from fxpipe.ir.tensors import largest_of

aten = torch.ops.aten

RUNS = 3  # with other last bits each, of which the largest effect counts
NOISE = 4  # how many times larger than that effect a difference has to be

_BY_SHAPE = {
    *(aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv, aten.dot),
    *(aten.convolution, aten.convolution_backward),
    *(aten.mean, aten.sum, aten.var, aten.var_mean, aten.std, aten.norm, aten.linalg_vector_norm),
    *(aten.native_layer_norm, aten.native_group_norm),
    *(aten.exp, aten.log, aten.sin, aten.cos, aten.tanh, aten.sigmoid, aten.gelu, aten.silu),
}
"""The operators whose last bits depend on the shapes of their arguments: products of several
kernels, of which the shapes choose one; sums, whose order they choose; and functions, which other
code computes for the last few numbers than for those ahead of them."""


class Rounded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode in which half of the numbers that are products, sums or values of functions
    grow by one unit in the last place. ``seed`` chooses which half. Whole numbers stay as they are,
    since kernels of all shapes give them exactly.

    ``largest`` is the largest of these numbers, to which rounding errors are relative; ``dtypes``
    are the dtypes in which they are computed.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self.largest = 0.0
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket not in _BY_SHAPE:
            return found
        self._seed += 1
        if isinstance(found, Tensor):
            return self._nudged(found)
        return tuple(self._nudged(t) if isinstance(t, Tensor) else t for t in found)

    def _nudged(self, tensor: Tensor) -> Tensor:
        self.dtypes.add(tensor.dtype)
        if not tensor.is_floating_point():
            return tensor
        self.largest = max(self.largest, largest_of(tensor))
        places = torch.arange(tensor.numel(), device=tensor.device)
        bits = (places * 0x9E3779B1 + self._seed * 0x85EBCA6B) >> 16 & 1
        up = bits.view(tensor.shape).to(tensor.dtype) * torch.finfo(tensor.dtype).eps
        return torch.where(tensor == tensor.round(), tensor, tensor * (1 + up))
