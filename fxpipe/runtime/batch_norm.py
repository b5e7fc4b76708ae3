"""Batch norm whose running statistics are those of the mini-batch, not of its micro-batches.

::

    x_mb0 ── batch_norm ──┬── y_mb0
                          └── mean, variance, count ──┐
    x_mb1 ── batch_norm ──┬── y_mb1                   ├── update_statistics: running mean, ...
                          └── mean, variance, count ──┘

Each micro-batch is normalised by its own statistics, as in gradient accumulation; the running ones
are updated once, as if the mini-batch had come in one piece (torchgpipe calls this deferred batch
norm). What is updated is no part of what a checkpoint runs again, so no batch counts twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Statistics = tuple[Tensor, Tensor, int]
"""Mean and variance of each channel, and how many numbers a channel had."""


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The input normalised by its own statistics, and these, without gradient."""
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    dtype = weight.dtype if weight is not None else torch.float32 if is_half else x.dtype
    channels = x.shape[1]
    # Running statistics that forget all that was before: the variance among them is unbiased.
    mean = torch.zeros(channels, dtype=dtype, device=x.device)
    variance = torch.ones(channels, dtype=dtype, device=x.device)
    y = F.batch_norm(x, mean, variance, weight, bias, training=True, momentum=1.0, eps=eps)
    return y, mean, variance, x.numel() // channels


@torch.no_grad()
def update_statistics(
    running_mean: Tensor,
    running_var: Tensor,
    tracked: Tensor | None,
    momentum: float | None,
    parts: Sequence[Statistics],
) -> None:
    """Update the running statistics by those of the micro-batches together.

    ``tracked`` counts mini-batches; ``momentum`` None is an average over all of them. Variances are
    put together as Chan et al. do ("Updating formulae and a pairwise algorithm for computing sample
    variances", 1979).
    """
    if tracked is not None:
        tracked.add_(1)
    total = sum(count for _, _, count in parts)
    wide = torch.promote_types(running_mean.dtype, torch.float32)
    means = [mean.to(wide) for mean, _, _ in parts]
    mean = sum(
        (m * (n / total) for m, (_, _, n) in zip(means, parts, strict=True)), torch.zeros(())
    )
    squares = torch.zeros_like(mean)
    for part, (_, variance, count) in zip(means, parts, strict=True):
        squares += variance.to(wide) * (count - 1) + (part - mean).square() * count
    factor: float | Tensor = momentum if momentum is not None else 0.0
    if momentum is None and tracked is not None:
        factor = 1 / tracked.to(wide)
    running_mean.copy_(running_mean.to(wide) * (1 - factor) + mean * factor)
    running_var.copy_(running_var.to(wide) * (1 - factor) + squares / (total - 1) * factor)
