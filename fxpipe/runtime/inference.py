"""Inference: a call without gradients, whose outputs say so to whoever asks them for a backward.

::

    call         no_grad:  x ── stages ── y          nothing is recorded, nothing is kept

    afterwards   y ── without_backward ── y'         requires a gradient, as the model's output does
                            error ─────── y'         and a backward that comes here is an error

An output that required no gradient would be worse: in a loss that has other parts too, it would
silently train these alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir._torch import has_tangent, is_forward_mode, lean, transforms
from fxpipe.runtime.dependency import mapped
from fxpipe.runtime.streams import pass_on

NO_BACKWARD = (
    "a backward has come to an output of a pipeline that was compiled with training=False, which "
    "keeps nothing for one: compile the model with training=True to train it, or detach() the "
    "output, or call the pipeline under torch.no_grad(), if no gradient is to go through it"
)

NO_TRANSFORM = (
    "torch.func.vmap, jvp and forward-mode derivatives go through a pipeline that was compiled "
    "with training=False only where no gradients are recorded: call it under torch.no_grad()"
)


@lean
class _WithoutBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, phony: Tensor, tensor: Tensor) -> Tensor:
        return tensor.data  # no view, so that it may be written to

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        raise RuntimeError(NO_BACKWARD)


def without_backward(call: Callable[[], Any], trained: Iterable[Tensor]) -> Any:
    """What ``call`` gives without gradients. If gradients are recorded here, and one of ``trained``
    requires one, its floating-point outputs require gradients, and a backward from them is refused
    with RuntimeError. So is the call within a transform, which such outputs cannot go through."""
    tensors = list(trained)
    is_refused = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if is_refused and (transforms() or (is_forward_mode() and any(map(has_tangent, tensors)))):
        raise RuntimeError(NO_TRANSFORM)
    with torch.no_grad():
        output = call()
    if not is_refused:
        return output
    made: dict[int, tuple[Any, Any]] = {}

    def marked(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf
        if id(leaf) not in made:
            phony = torch.empty(0, device=leaf.device, requires_grad=True)
            result: Tensor = _WithoutBackward.apply(phony, leaf)  # type: ignore[no-untyped-call]
            pass_on(leaf, result)
            made[id(leaf)] = leaf, result
        return made[id(leaf)][1]

    return mapped(marked, output)
