"""Batch norm whose running statistics are those of the mini-batch, not of its micro-batches.

::

    x_mb0 ── batch_norm ──┬── y_mb0
                          └── mean, variance, count ──┐
    x_mb1 ── batch_norm ──┬── y_mb1                   ├── update_statistics: running mean, ...
                          └── mean, variance, count ──┘

Each micro-batch is normalised by its own statistics, as in gradient accumulation; the running ones
are updated once, as if the mini-batch had come in one piece (torchgpipe calls this deferred batch
norm). A checkpoint that runs a stage again does not run the update again, so no batch counts twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Statistics = tuple[Tensor, Tensor, int]
"""Mean and unbiased variance of each channel, both of shape (channels,), and the number of elements
that a channel has."""


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Normalise ``x``, of shape (rows, channels, ...), by its own statistics.

    Returns the normalised tensor and its :data:`Statistics`, which carry no gradient.
    """
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    dtype = weight.dtype if weight is not None else torch.float32 if is_half else x.dtype
    channels = x.shape[1]
    # With a momentum of 1 PyTorch's running statistics become those of this input alone, and the
    # running variance is the unbiased one.
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
    """Update the running statistics with the statistics of the whole mini-batch.

    ``parts`` has the statistics of each micro-batch. ``tracked`` counts mini-batches; with a
    ``momentum`` of None the running statistics are the average over all mini-batches. The variances
    are combined as in Chan et al. ("Updating formulae and a pairwise algorithm for computing sample
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
