"""Order in the backward pass: fork, join, and the phony between them.

The autograd engine runs what is ready. To make the backward of ``a`` wait for the backward of
``b``, a *phony* (a tensor without elements) is forked off ``a`` and joined into ``b``::

    forward    a --- fork --- a'         b --- join --- b'
                       \\________ phony ________/

    backward   a <-- fork <-- a'         b <-- join <-- b'
                       \\________ phony ________/

``fork`` goes on only when the gradients of both its outputs are in, and that of the phony comes
from ``join``: everything before ``a`` happens after everything behind ``b'``. The construction is
that of torchgpipe (Kim et al., "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant
Models", 2020, section 3.1); here both work on several tensors at once, which makes each of them a
gate too: no tensor passes backwards before all gradients have arrived, so gradients are summed in
one order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def carries_gradient(value: object) -> bool:
    """Whether the backward pass will go through this value."""
    return torch.is_grad_enabled() and isinstance(value, Tensor) and value.requires_grad


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        phony = tensors[0].new_empty(0)
        return (*(t.view_as(t) for t in tensors), phony)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads[:-1]


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, phony: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *grads)


def fork(values: tuple[Any, ...]) -> tuple[tuple[Any, ...], Tensor]:
    """Branch a phony off a lane.

    Returns the values, and a phony whose backward has to come before theirs. Only tensors that
    carry gradient are touched; without one the phony carries no edge, and joining it does nothing.
    """
    where = [i for i, v in enumerate(values) if carries_gradient(v)]
    if not where:
        return values, torch.empty(0)
    *tensors, phony = _Fork.apply(*(values[i] for i in where))  # type: ignore[no-untyped-call]
    return _replaced(values, where, tensors), phony


def join(values: tuple[Any, ...], phony: Tensor) -> tuple[Any, ...]:
    """Merge a phony into a lane: its backward comes after theirs.

    Values without gradient pass through untouched: an edge would give them one.
    """
    where = [i for i, v in enumerate(values) if carries_gradient(v)]
    if not where or not carries_gradient(phony):
        return values
    tensors = _Join.apply(phony, *(values[i] for i in where))  # type: ignore[no-untyped-call]
    return _replaced(values, where, list(tensors))


def _replaced(values: tuple[Any, ...], where: list[int], tensors: list[Tensor]) -> tuple[Any, ...]:
    out = list(values)
    for i, tensor in zip(where, tensors, strict=True):
        out[i] = tensor
    return tuple(out)
