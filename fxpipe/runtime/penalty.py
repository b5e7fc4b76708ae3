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
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from fxpipe.ir._torch import gradient_hooks, results_of, sequence_number
from fxpipe.ir.autograd import leaf_of, leaves_reached, next_edges, reached

Penalty = tuple[Tensor, Tensor]
"""A parameter, and the gradient that the loss has for it directly, not through the model's output.
The gradient is on the parameter's device, and was made on the one stream on which all lanes compute
there."""


def leaves_of(
    values: Iterable[Any], ends: type | None = None, met: list[Any] | None = None
) -> list[Tensor]:
    """The leaves of the autograd graph of some values, each once, in an order that the graph
    alone determines. ``ends``: the type of the nodes at which the graph is taken to end; these go
    into ``met``."""
    made = [v.node if isinstance(v, GradientEdge) else getattr(v, "grad_fn", None) for v in values]
    return leaves_reached([node for node in made if node is not None], ends, met)


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
    for the backward that follows. No hook of a parameter is called: it has to see the sum of this
    gradient and the one from the stage, since it may clip what it is given.
    """
    plain = [p for p in parameters if not gradient_hooks(p)[0]]
    found: dict[Tensor, Tensor | None] = {}
    if plain:
        grads = torch.autograd.grad(value, plain, grad, retain_graph=True, allow_unused=True)
        found.update(zip(plain, grads, strict=True))
    for parameter in parameters:
        if parameter not in found:
            found[parameter] = _past_hooks(value, grad, parameter)
    return [(p, g) for p in parameters if (g := found[p]) is not None]


def _past_hooks(value: Tensor, grad: Tensor, parameter: Tensor) -> Tensor | None:
    """The gradient of a loss for a parameter, without a call of the parameter's hooks.

    ::

        value ─ ... ─ node ─┬─ hooks ─ accumulation into the parameter
                            └─ the gradient, taken here

    ``torch.autograd.grad`` would call the hooks. Here it gives the gradients of the results of each
    node that uses the parameter. These nodes are then called one by one, in the order in which the
    engine would call them, so that the terms are added in its order.
    """
    uses = [
        node
        for node in reached([value.grad_fn])
        if any(leaf_of(each) is parameter for each, _ in next_edges(node))
    ]
    total: Tensor | None = None
    for node in sorted(uses, key=sequence_number, reverse=True):
        of_results = torch.autograd.grad(
            value, results_of(node), grad, retain_graph=True, allow_unused=True
        )
        with torch.no_grad():
            call = node.apply if isinstance(node, BackwardCFunction) else node
            given = call(*of_results)
        given = given if isinstance(given, tuple) else (given,)
        for term, (each, _) in zip(given, next_edges(node), strict=True):
            if leaf_of(each) is parameter and term is not None:
                total = term if total is None else total + term
    return total
