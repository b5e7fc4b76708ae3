"""A model whose parameters are not zero, while it is checked.

Layers are often initialised with zeros: the last one of a diffusion model, the second matrix of a
LoRA adapter, the factor of a residual branch. What such a layer multiplies does not show in the
outputs as long as it is zero, whether it mixes rows or adds up where it should average; after the
first step of training it does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fxpipe.trace.gradients import irregular

Values = Sequence[tuple[nn.Parameter, Tensor]]


def in_place_of_zeros(model: nn.Module) -> Values:
    """Values for each parameter that is trained and holds nothing but zeros."""
    parameters = [p for p in model.parameters() if p.requires_grad and _is_zero(p)]
    return [(parameter, _values(parameter, seed)) for seed, parameter in enumerate(parameters, 1)]


@contextmanager
def stirred(values: Values) -> Iterator[None]:
    """Inside the ``with`` block the parameters have these values; after it, the very memory that
    they had before."""
    before = [(parameter, parameter.data) for parameter, _ in values]
    try:
        _exchange(values)
        yield
    finally:
        _exchange(before)


def _exchange(values: Values) -> None:
    for parameter, value in values:
        parameter.data = value
    if values:
        torch.clear_autocast_cache()  # it has lower precision copies of the values before


def _is_zero(parameter: nn.Parameter) -> bool:
    if type(parameter) is not nn.Parameter or parameter.layout != torch.strided:
        return False
    if parameter.is_meta or not parameter.numel() or not parameter.is_floating_point():
        return False
    data = parameter.detach()
    return not data[(0,) * data.ndim] and not data.any()  # most are known by their first number


def _values(parameter: nn.Parameter, seed: int) -> Tensor:
    """Uneven numbers, of a size that leaves that of what they are multiplied with as it is."""
    inputs = math.prod(parameter.shape[1:])
    values = irregular(parameter.shape, seed) * (0.5 / math.sqrt(max(1, inputs)))
    return values.to(parameter.detach())
