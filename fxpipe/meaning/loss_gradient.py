"""The check of a loss function's backward: its gradient with respect to the outputs of a whole
sample is compared with the gradients of the parts of the sample, put together.

::

    a, b = mse_loss(o, t), l1_loss(o, t)
    return a + b * (a / b).detach()         the value is 2 a, a mean over the rows;
                                            by a / b, rows see each other in the gradient

As for a model (:mod:`fxpipe.meaning.backward`), gradients are right where values are, as long as
the backward is the derivative of the forward. So they are compared only where it need not be: where
the loss detaches something, has hooks on tensors, or applies a ``torch.autograd.Function`` of the
user's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir.structure import Structure
from fxpipe.meaning.compare import Difference, difference
from fxpipe.meaning.cut_off import CutOff
from fxpipe.meaning.rounded import NOISE, RUNS, Rounded
from fxpipe.meaning.sample import part
from fxpipe.meaning.trial import Trial
from fxpipe.trace.gradients import SMALL, TOLERANCE, has_gradient, history_of, is_torchs
from fxpipe.trace.patches import tensor_hooks


@dataclass(frozen=True)
class LossGradient:
    """A loss with its gradient.

    Attributes:
        value: the loss.
        grads: the gradient with respect to each output of real numbers, by the output's path.
        is_free: whether the backward may be another function than the derivative of the forward.
    """

    value: Any
    grads: Mapping[str, Tensor]
    is_free: bool = False


def gradient_of(loss: Callable[[Any, Any], Any], output: Any, target: Any) -> LossGradient:
    """The loss of an output and a target, with its gradient with respect to the output."""
    found, structure = Structure.of(output)
    own = {
        path: tensor.detach().requires_grad_()
        for path, tensor in zip(structure.paths(), found, strict=True)
        if tensor.is_floating_point()
    }
    # What the loss is given are no leaves, so that it may write to them.
    given = [
        own[path].clone() if path in own else tensor
        for path, tensor in zip(structure.paths(), found, strict=True)
    ]
    with tensor_hooks() as hooks, torch.enable_grad(), CutOff() as cut_off:
        value = loss(structure.fill(given), target)
    if not has_gradient(value) or not own:
        return LossGradient(value, {})
    grads = torch.autograd.grad(value, [*own.values()], allow_unused=True)
    of_outputs = {
        path: torch.zeros_like(leaf) if grad is None else grad
        for (path, leaf), grad in zip(own.items(), grads, strict=True)
    }
    detached = value.detach()
    history = history_of([value], inputs=[*own.values()])
    is_free = bool(hooks) or cut_off.found or not is_torchs(history)
    return LossGradient(detached, of_outputs, is_free)


def apart_in_the_gradient(
    gradient: Callable[[list[Any]], LossGradient],
    trial: Trial,
    dims: Sequence[int | None],
    shares: Sequence[float],
    out_dims: Mapping[str, int],
) -> Difference | None:
    """How far the gradient of the loss of a whole sample is from those of its parts, put together;
    None if rounding explains it.

    Args:
        gradient: the loss of some rows, with its gradient.
        trial: the sample.
        dims: the batch dimensions of its tensors.
        shares: by what the loss of each part is multiplied.
        out_dims: the batch dimensions of the outputs, by their paths. An output that has none is
            shared by all rows, so that the gradients of the parts are added up.
    """
    rows = part(trial.tensors, [None] * len(dims), 0, 0)
    whole = gradient(rows)
    if not whole.is_free:
        return None
    parts = [gradient(tensors).grads for tensors in trial.each(dims)]
    largest = max(
        (grad.abs().max().item() for grad in whole.grads.values() if grad.numel()), default=0.0
    )
    for path, expected in whole.grads.items():
        own = [grads[path] * share for grads, share in zip(parts, shares, strict=True)]
        dim = out_dims.get(path)
        together = torch.stack(own).sum(0) if dim is None else torch.cat(own, dim)
        apart = difference(expected, together)
        # Beside the largest gradient, a rounding error may be as large as a small gradient.
        if apart and apart.largest > TOLERANCE * max(apart.scale, SMALL * largest):
            effect = 0.0
            for seed in range(RUNS):
                with Rounded(seed):
                    rounded = gradient(rows).grads[path]
                effect = max(effect, (rounded - expected).abs().max().item())
            if apart.largest > NOISE * effect:
                return apart
    return None
