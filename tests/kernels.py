"""Matrix kernels whose last bits depend on the shape, as those of some CPUs do.

Which kernel computes a matrix product or a convolution is chosen by shape: with AVX-512 and AMX the
product of eight rows differs in its last bits from the same product four rows at a time; on other
CPUs it may not. So a test that compares the bits of a pipeline with the model on the whole
mini-batch passes on one CPU and fails on the next; it has to compare with the loop over
micro-batches. Within :func:`by_shape` every CPU behaves like the first kind, and such a test fails
everywhere. With ``FXPIPE_TEST_KERNELS=by_shape`` in the environment all tests run so.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot")
CONVOLUTIONS = (
    *("mkldnn_convolution", "_slow_conv2d_forward", "slow_conv3d_forward"),
    *("slow_conv_transpose2d", "slow_conv_transpose3d", "convolution_backward"),
)


@contextmanager
def by_shape() -> Iterator[None]:
    """A context in which matrix products and convolutions on the CPU round by their shapes.

    The same shapes always give the same bits; an element is off by at most one unit in the last
    place, so that comparisons with a tolerance hold.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name in PRODUCTS + CONVOLUTIONS:
                library.impl(name, _rounded(name), "CPU", with_keyset=True)
        yield
    finally:
        library._destroy()


def _rounded(name: str) -> Any:
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def run(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        result = kernel.call_boxed(keys, *args, **kwargs)
        shapes = str([tuple(arg.shape) for arg in args if isinstance(arg, Tensor)])
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
                _nudge(tensor, int(hashlib.sha1(shapes.encode()).hexdigest()[:12], 16))
        return result

    return run


def _nudge(tensor: Tensor, seed: int) -> None:
    """Half of the elements, chosen by the seed, grow by about one unit in the last place."""
    bits = (torch.arange(tensor.numel(), device="cpu") * 0x9E3779B1 + seed) >> 16 & 1
    tensor.mul_(1 + bits.reshape(tensor.shape).double() * torch.finfo(tensor.dtype).eps)
