"""Gradients that a loss has for parameters of the stages, for example from a penalty on weights.

::

    loop    weight ─┬─ stage ── output ─┬─ loss       one backward: both gradients of the weight
                    └──── penalty ──────┘             meet, and their sum is added to .grad

    step    loss_backward ─┬─ gradient of the output ─── ... ─┬─ backward of the stage, which begins
                           └─ gradient of the weight ─────────┘  at the weight, too: the loop's sum

The loss runs in the lane of the last stage. If it added to ``.grad`` of parameters whose stages are
in other lanes, the order of the sum would be that in which the threads come by.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir.autograd import reached

Penalty = tuple[Tensor, Tensor]
"""A parameter, and the gradient that the loss has for it directly, not through the model's output.
The gradient is on the parameter's device, and was made on the one stream on which all lanes compute
there."""


def leaves_of(values: Iterable[Any]) -> list[Tensor]:
    """The leaves of the autograd graph of some values, each once, in an order that the graph
    alone determines."""
    starts = [v.grad_fn for v in values if isinstance(v, Tensor) and v.grad_fn is not None]
    return [node.variable for node in reached(starts) if hasattr(node, "variable")]


def homes_of(leaves: Iterable[Tensor], stages: Sequence[nn.Module | None]) -> dict[Tensor, int]:
    """The leaves that are parameters of stages, each with the number of its stage.

    A parameter that several stages have lives in the first of them (passes "shared" and "tied").
    ``stages``: the stages' modules, by number.
    """
    parameters = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]
    if not parameters:
        return {}
    homes: dict[int, int] = {}
    for number, stage in enumerate(stages):
        for parameter in () if stage is None else stage.parameters():
            homes.setdefault(id(parameter), number)
    return {p: homes[id(p)] for p in parameters if id(p) in homes}


def penalties(value: Tensor, grad: Tensor, parameters: Sequence[Tensor]) -> list[Penalty]:
    """The gradients of a loss for these parameters, as far as it depends on them directly.

    ``grad`` is the gradient of the loss itself, by which all are scaled. The loss's graph is kept
    for the backward that follows.
    """
    grads = torch.autograd.grad(value, parameters, grad, retain_graph=True, allow_unused=True)
    return [(p, g) for p, g in zip(parameters, grads, strict=True) if g is not None]
