"""Fakes of results that PyTorch makes in many steps, made in one.

PyTorch makes the fake of a batch norm's result by some twenty operators, one after the other, each
with a fake of its own, and that of a ReLU by a function written in Python. In a graph of a
convolutional network these are two of three nodes, and take longer than everything else that is
asked of them. The results are known without: they are like the input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir._torch import FakeTensorMode


def made_at_once(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """The results of an operator as fakes of this mode; None where PyTorch has to make them."""
    instead = _INSTEAD.get(func)
    if instead is None:
        return None
    with mode:
        return instead(*args, **(kwargs or {}))


def _relu(input: Tensor) -> Tensor | None:
    """The result of a ReLU, whose memory is not initialised; None if it is not as simple as that,
    or if the operator may refuse what it is given."""
    is_plain = input.layout == torch.strided and input.is_floating_point()
    return torch.empty_like(input) if is_plain and input.is_contiguous() else None


def _batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    _momentum: float,
    _eps: float,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The results of a batch norm in training, whose memory is not initialised; None if they are
    not as simple as that, or if the operator may refuse what it is given.

    PyTorch makes fakes of them by some twenty operators, one after the other. Of the running
    statistics, whose fakes have no values, nothing is seen to change by these either.
    """
    if not training or input.ndim < 2 or not input.is_contiguous():
        return None
    channels = input.shape[1]
    is_alike = all(
        each is None
        or (each.shape, each.dtype, each.device) == ((channels,), input.dtype, input.device)
        for each in (weight, bias, running_mean, running_var)
    )
    # Statistics of a lower precision have one that depends on the device. One value for each
    # channel has no variance.
    if not is_alike or input.dtype not in _WHOLE or input.numel() <= channels:
        return None
    return torch.empty_like(input), input.new_empty(channels), input.new_empty(channels)


def _gradients_of_batch_norm(
    gradient: Tensor,
    input: Tensor,
    weight: Tensor | None,
    _running_mean: Tensor | None,
    _running_var: Tensor | None,
    _mean: Tensor | None,
    _inverse: Tensor | None,
    _train: bool,
    _eps: float,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """The gradients of a batch norm, whose memory is not initialised; None if they are not as
    simple as that.

    PyTorch makes fakes of them by some thirty operators, one after the other, which takes longer
    than everything else that is asked of a convolutional network's graph.
    """
    if gradient.stride() != input.stride() or gradient.dtype != input.dtype:
        return None  # the strides of the result are a matter of the operators then
    dtype = input.dtype if weight is None else weight.dtype
    of_channels = [input.new_empty(input.shape[1], dtype=dtype) for _ in range(2)]
    of_weight, of_bias = (
        each if is_wanted else None
        for each, is_wanted in zip(of_channels, output_mask[1:], strict=True)
    )
    return torch.empty_like(input), of_weight, of_bias


_WHOLE = torch.float32, torch.float64

_INSTEAD: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.relu.default: _relu,
    torch.ops.aten.native_batch_norm.default: _batch_norm,
    torch.ops.aten._native_batch_norm_legit.default: _batch_norm,  # in an export
    torch.ops.aten.native_batch_norm_backward.default: _gradients_of_batch_norm,
}
"""Functions that make the fakes of an operator's results, or return None where PyTorch has to."""
