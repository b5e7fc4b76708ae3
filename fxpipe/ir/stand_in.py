"""Stand-in: what runs on fake tensors in place of a call that cannot, or that would take long.

::

    call(x, w)        160 steps of 12 operators each, whose backward needs 40 MB
    stand-in(x, w)    tensors of the same shapes; for them as much work is counted, forward and
                      backward, and one tensor of 40 MB is kept
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir.flops import made
from fxpipe.ir.load import NOTHING, Load


@dataclass(frozen=True)
class Output:
    """A tensor that a call gives. ``requires_grad``: whether it has a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class StandIn:
    """What a call returns, and how much work and memory it takes, for when it does not run.

    Attributes:
        outputs: the tensors that it gives.
        forward, backward: its work; that of the backward with the memory of all gradients.
        products: the work of the products among its operators.
        kept: the bytes that it saves for its backward beside what is said by the next two.
        saved_sources, saved_outputs: the places of those sources and outputs that it saves.
        uncounted: how many of the sources, the last ones, get a gradient that takes no memory and
            no work: it is added at once to that of the same source at an earlier place.
    """

    outputs: Sequence[Output]
    forward: Load
    backward: Load
    products: Load = field(default_factory=Load)
    kept: int = 0
    saved_sources: tuple[int, ...] = ()
    saved_outputs: tuple[int, ...] = ()
    uncounted: int = 0

    def call(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """What the call gives for these tensors, of which there is at least one. Each gets a
        gradient if it wants one; a tensor that is there several times gets as many."""
        called: Any = _StandInCall.apply
        found: list[Tensor] = list(called(self, *sources))
        return found


class _StandInCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stand_in: StandIn, *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.stand_in = stand_in
        ctx.shapes = [(source.shape, source.dtype) for source in sources]
        wanted: list[Any] = [(output.shape, output.dtype) for output in stand_in.outputs]
        if stand_in.kept:
            wanted.append(((stand_in.kept,), torch.uint8))
        every = _made(sources, wanted, stand_in.forward, stand_in.products)
        outputs, kept = every[: len(stand_in.outputs)], every[len(stand_in.outputs) :]
        ctx.mark_non_differentiable(
            *(
                tensor
                for tensor, output in zip(outputs, stand_in.outputs, strict=True)
                if not output.requires_grad
            )
        )
        ctx.save_for_backward(
            *kept,
            *(sources[i] for i in stand_in.saved_sources),
            *(outputs[i] for i in stand_in.saved_outputs),
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        given = [gradient for gradient in gradients if gradient is not None]
        counted = len(ctx.shapes) - ctx.stand_in.uncounted
        needed = [is_needed and i < counted for i, is_needed in enumerate(ctx.needs_input_grad[1:])]
        wanted = [look for look, is_needed in zip(ctx.shapes, needed, strict=True) if is_needed]
        found = iter(_made(given, wanted, ctx.stand_in.backward, Load()))
        return None, *(next(found) if is_needed else None for is_needed in needed)


def _made(
    given: Sequence[Tensor],
    wanted: Sequence[tuple[Sequence[int], torch.dtype]],
    load: Load,
    products: Load,
) -> list[Tensor]:
    """Tensors of these shapes and dtypes, made by this work. If that needs more memory, there is
    another tensor for a moment."""
    work = load.flops, load.bytes, load.operators
    of_products = products.flops, products.bytes, products.operators, load.products
    found = []
    for shape, dtype in wanted:
        found.append(made(given, list(shape), dtype, list(work), list(of_products)))
        work, of_products = NOTHING, (*NOTHING, 0)
    if not load.memory:  # sizes may be symbols, which have no bytes
        return found
    more = load.memory - sum(tensor.nbytes for tensor in found)
    if more > 0:
        made(given, [more], torch.uint8, list(NOTHING), [*NOTHING, 0])
    return found
