"""A Triton kernel, for the part "triton"; imported only where Triton is installed."""

import triton
import triton.language as tl


@triton.jit
def tripled_kernel(x, output, count, BLOCK: tl.constexpr):
    """output = 3 x, for ``count`` values."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    tl.store(output + offsets, 3.0 * tl.load(x + offsets, mask=inside), mask=inside)
