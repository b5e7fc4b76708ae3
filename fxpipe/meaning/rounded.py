"""A model whose operators round otherwise, to learn how much of a difference is rounding.

Kernels compute the same row with other last bits among other numbers of rows. In most models these
errors remain small. In some they are amplified, by a norm over numbers that are nearly equal, say,
so that a gradient is right in its first two digits only. A difference that is no larger than what
other last bits make of a result says nothing about the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpipe.ir._torch import TorchDispatchMode

aten = torch.ops.aten

_PRODUCTS = {
    *(aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv, aten.dot),
    *(aten.convolution, aten.convolution_backward),
}
"""The operators whose kernels are chosen by the shapes of their arguments."""


class Rounded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode in which half of the elements of each matrix product and convolution grow by
    one unit in the last place. ``seed`` chooses which half."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket not in _PRODUCTS:
            return found
        self._seed += 1
        if isinstance(found, Tensor):
            return self._nudged(found)
        return tuple(self._nudged(t) if isinstance(t, Tensor) else t for t in found)

    def _nudged(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        places = torch.arange(tensor.numel(), device=tensor.device)
        bits = (places * 0x9E3779B1 + self._seed * 0x85EBCA6B) >> 16 & 1
        up = bits.view(tensor.shape).to(tensor.dtype) * torch.finfo(tensor.dtype).eps
        return tensor * (1 + up)
