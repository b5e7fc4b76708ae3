"""What a backward comes to, without a second set of gradients: of the history that a run has left,
its shape; of the gradient of each tensor, a few numbers.

Two runs with equal values and equal histories have equal gradients, so that a backward is only
needed where the histories differ, or say too little.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from fxpipe.ir.autograd import reached

TOLERANCE = 1e-3  # relative to the size of the gradient: kernels sum in another order
SMALL = 0.01  # of the largest gradient: below this size one may be a mere rounding error


def has_gradient(value: Any) -> bool:
    """Whether a value is a tensor with a history, of real numbers."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad


def history_of(results: list[Any]) -> Hashable:
    """The autograd graph behind the results as a value that can be compared: the kinds of its nodes
    and their edges.

    A history with a backward that a user has written (``torch.autograd.Function``) equals no other,
    since that backward may compute anything.

    ::

        conv(x).relu()      ("ReluBackward0", ((1, 0),))
                            ("ConvolutionBackward0", (None, (2, 0), (3, 0)))
                            the parameters 2 and 3, by their ids

    ``results`` is emptied, and the graph freed.
    """
    ends = [get_gradient_edge(t)[:2] if has_gradient(t) else None for t in results]
    nodes = list(reached(end[0] for end in ends if end))
    number = {node: i for i, node in enumerate(nodes)}
    starts = tuple(end and (number[end[0]], end[1]) for end in ends)
    found: list[Hashable] = []
    for node in nodes:
        # A Function of the user's may have an attribute called ``name``.
        kind = object() if isinstance(node, BackwardCFunction) else node.name()
        if hasattr(node, "variable"):
            found.append(id(node.variable))
        edges = tuple(n and (number[n], place) for n, place in node.next_functions)
        found.append((kind, edges))
    # Nodes are freed from the outputs on, one by one: freeing the first would free the next
    # recursively, and a long chain would overflow the stack.
    results.clear()
    ends.clear()
    number.clear()
    nodes.reverse()
    while nodes:
        nodes.pop()
    return starts, tuple(found)


@dataclass(frozen=True)
class Projection:
    """A gradient in a few numbers: its products with tensors of uneven numbers, and its size (the
    square root of the sum of the squares of its elements)."""

    numbers: tuple[float, ...]
    size: float

    def __add__(self, other: Projection) -> Projection:
        pairs = zip(self.numbers, other.numbers, strict=True)
        return Projection(tuple(a + b for a, b in pairs), self.size + other.size)


Projections = dict[str, Projection | None]
"""By the names of tensors; None for one without a gradient."""


def projections(
    outputs: Sequence[Tensor], weights: Sequence[Tensor], leaves: Mapping[str, Tensor]
) -> Projections:
    """The gradients of leaves for a weighted sum of the outputs, each in a few numbers.

    A gradient is taken by a hook as soon as it has been accumulated, and is gone before the next
    one is there. The gradients of the leaves must be None.
    """
    found: Projections = dict.fromkeys(leaves)

    def take(name: str, leaf: Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        if grad is not None:
            before, now = found[name], _projected(grad)
            found[name] = now if before is None else before + now  # within a backward one more

    with ExitStack() as hooks:
        for name, leaf in leaves.items():
            register: Any = leaf.register_post_accumulate_grad_hook
            hooks.callback(register(partial(take, name)).remove)
        if outputs:
            torch.autograd.backward(list(outputs), list(weights))
    return found


def uneven(shape: Sequence[int], seed: int) -> Tensor:
    """Numbers without a pattern, of the size of one. They are not drawn: draws are stilled while a
    model is checked."""
    count = torch.arange(1, 1 + math.prod(shape), dtype=torch.float64)
    return (count * (1 + seed * 0.6180339887498949)).cos().view(tuple(shape)) * math.sqrt(2)


def _projected(grad: Tensor) -> Projection:
    """The products with two tensors of rank one and of uneven numbers: such a tensor takes no
    memory, and hardly a change of the gradient leaves its product with it as it was."""
    grad = torch.view_as_real(grad) if grad.is_complex() else grad
    grad = grad.to_dense() if grad.layout != torch.strided else grad
    rows = grad.shape[0] if grad.ndim > 1 else 1
    grad = grad.reshape(rows, -1).to(torch.promote_types(grad.dtype, torch.float32))
    left = torch.stack([uneven((rows,), seed) for seed in (1, 2)]).to(grad)
    right = uneven((grad.shape[1],), 3).to(grad)
    return Projection(tuple((left @ (grad @ right)).tolist()), grad.norm().item())


def total(parts: Sequence[Projections]) -> Projections:
    """The gradients of a sum, from those of its terms."""
    found: Projections = {}
    for name in parts[0]:
        own = [each for part in parts if (each := part[name]) is not None]
        found[name] = sum(own[1:], own[0]) if own else None
    return found


@dataclass(frozen=True)
class Apart:
    """In which gradients two backwards differ, by the names of the tensors."""

    lost: list[str]
    """Those that only the first one gives."""
    gained: list[str]
    """Those that only the second one gives."""
    others: list[str]
    """Those that have another value."""

    def __bool__(self) -> bool:
        return bool(self.lost or self.gained or self.others)


def apart(expected: Projections, actual: Projections, eps: float) -> Apart:
    """How the gradients of two backwards differ. ``eps``: of the numbers they are computed in."""
    lost = [name for name, each in expected.items() if each and not actual[name]]
    gained = [name for name, each in expected.items() if actual[name] and not each]
    largest = max((each.size for each in expected.values() if each), default=0.0)
    tolerance = max(TOLERANCE, 32 * eps)
    others = []
    for name, each in expected.items():
        other = actual[name]
        if each is None or other is None:
            continue
        scale = max(each.size, SMALL * largest)
        moved = max(abs(a - b) for a, b in zip(each.numbers, other.numbers, strict=True))
        if not moved <= tolerance * scale and not _are_nan(each, other):
            others.append(name)
    return Apart(lost, gained, others)


def coarsest(tensors: Iterable[Tensor]) -> float:
    """The largest rounding error, relative to one, of the types that these tensors are of."""
    return max((torch.finfo(t.dtype).eps for t in tensors if t.is_floating_point()), default=0.0)


def _are_nan(one: Projection, other: Projection) -> bool:
    return one.size != one.size and other.size != other.size


def listed(names: Sequence[str]) -> str:
    """A few names, and how many more there are."""
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")
