"""Where a model on "meta" is: it is examined as if it were on the CPU.

::

    real, on the CPU ─┐
                      ├─ trace ── graph ── alias, rows, cost ── plan
    on "meta" ────────┘        fakes, all of which say that they are on the CPU

A model may compute in another way on each kind of device, and "meta" is none of those that it is
written for. There is no saying which one it will be on, and a kind that is not present cannot be
asked what it has. The CPU is there, and it is where a model is that has been built without a device
in mind: a model on "meta" so gives the same graph, costs and cut as the one that has values. The
front ends and the passes have to agree in this, as a graph of operators for one kind of device may
not run on another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir._torch import FakeTensorMode, TensorDescriber

CPU = torch.device("cpu")


def seen_on(device: torch.device) -> torch.device:
    """The device that a tensor says it is on where a model is examined."""
    return CPU if device.type == "meta" else device


class Somewhere(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A fake tensor mode in which a tensor on "meta" gets a fake that says it is on the CPU.

    This matters for operators, too: "meta" lacks kernels that real devices have (attention that
    never stores the whole matrix of its weights), it has some that the CPU lacks, and it may give
    results other strides than real devices do.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.fake_tensor_converter.meta_converter.describer = _Describer()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (device := kwargs.get("device")) is not None:
            kwargs = {**kwargs, "device": seen_on(device)}
        instead = _INSTEAD.get(func)
        if instead is not None:
            with self:
                found = instead(*args, **kwargs)
            if found is not None:
                return found
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Describer(TensorDescriber):
    """Describes the tensors of which a mode makes fakes."""

    def describe_tensor(self, t: Tensor, **options: Any) -> Any:
        found = super().describe_tensor(t, **options)
        device = seen_on(found.device)
        return found if device == found.device else replace(found, device=device)


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
    torch.ops.aten.native_batch_norm.default: _batch_norm,
    torch.ops.aten.native_batch_norm_backward.default: _gradients_of_batch_norm,
}
"""Functions that make the fakes of an operator's results, or return None where PyTorch has to."""
