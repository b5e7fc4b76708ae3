"""Inputs without a pattern, on which a model shows more of what it computes.

An example hides what happens to have no effect on its values: a mask of ones is multiplied with, or
is not, and the output is the same. ::

    ones  1 1 1 1   ->   1.1 -0.4 -1.4 0.9       integers stay: a model may look things up by them
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxpipe.trace.gradients import irregular


def uneven(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the same kinds in whose values there is no pattern. Those of integers, and those
    that are not strided, are the same."""
    return [_uneven(tensor, seed) for seed, tensor in enumerate(tensors, 1)]


def _uneven(tensor: Tensor, seed: int) -> Tensor:
    has_integers = not (tensor.is_floating_point() or tensor.is_complex())
    is_a_condition = tensor.dtype == torch.bool
    if tensor.layout != torch.strided or (has_integers and not is_a_condition):
        return tensor
    values = irregular(tensor.shape, seed).to(tensor.device)
    return values > 0 if is_a_condition else values.to(tensor.dtype)
