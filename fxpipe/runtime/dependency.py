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
Models", 2020, section 3.1). Here both work on several values at once, which makes each of them a
*gate* too: nothing passes backwards before all gradients have arrived, so that a stage's gradients
are summed in one order, whatever the threads do.

Nothing is computed here, so that the stream on which stages compute need not wait for gradients to
pass through: the nodes are made on a stream aside (:func:`fxpipe.runtime.streams.beside`).

Values may be nested in any pytree; portals are pytrees of one phony, so a gate orders them as well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir._torch import lean, pytree
from fxpipe.ir.tensors import is_shape
from fxpipe.runtime.streams import beside, pass_on

_TENSORS = {Tensor}


def carries_gradient(value: object) -> bool:
    """Whether the backward pass will go through this value."""
    return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()


def gate(values: Any, apply: Callable[..., tuple[Tensor, ...]], least: int = 1) -> Any:
    """Replace the values that carry gradient by the results of one call of ``apply`` with them all.

    Values that carry no gradient stay as they are: as results of an autograd node they would carry
    one. ``apply`` is not called if fewer than ``least`` values carry gradient. (With ``least=2`` a
    function that does nothing but let gradients wait for each other makes no node for one value.)
    """
    if not torch.is_grad_enabled():
        return values
    leaves, build = flattened(values)
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if len(where) < least:
        return values
    for i, tensor in zip(where, apply(*(leaves[i] for i in where)), strict=True):
        pass_on(leaves[i], tensor)
        leaves[i] = tensor
    return build(leaves)


def flattened(values: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The leaves of a pytree, and a function that builds the same pytree from other leaves."""
    if type(values) is tuple and {*map(type, values)} == _TENSORS:
        return list(values), tuple  # by far the most frequent case, where a pytree takes longer
    leaves, spec = pytree.tree_flatten(values, is_leaf=is_shape)
    return leaves, partial(pytree.tree_unflatten, treespec=spec)


def leaves_in(value: Any) -> list[Any]:
    """The leaves of a pytree. One tensor, or None, is taken first, since a pytree takes longer."""
    return (
        [value] if type(value) is Tensor or value is None else pytree.tree_leaves(value, is_shape)
    )


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """A pytree with each leaf replaced by what the function gives for it; the same for a tensor."""
    return (
        function(value)
        if type(value) is Tensor
        else pytree.tree_map(function, value, is_leaf=is_shape)
    )


@lean
class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # By its device, not by the tensor itself: on the stream aside, nothing may read the tensor.
        phony = torch.empty(0, dtype=tensors[0].dtype, device=tensors[0].device)
        return (phony, *(t.view_as(t) for t in tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads[1:]


@lean
class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, phony: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *grads)


def fork(values: Any) -> tuple[Any, Tensor]:
    """Branch a phony off values. Returns the values, and the phony, whose backward comes before
    theirs.

    If no value carries gradient, the phony carries none either, and joining it has no effect.
    """
    phony = None

    def apply(*tensors: Tensor) -> tuple[Tensor, ...]:
        nonlocal phony
        with beside(tensor.device for tensor in tensors):
            phony, *rest = _Fork.apply(*tensors)  # type: ignore[no-untyped-call]
        return tuple(rest)

    values = gate(values, apply)
    return values, torch.empty(0) if phony is None else phony


def join(values: Any, phony: Tensor) -> Any:
    """Merge a phony into values. Returns the values, whose backward comes before the phony's."""
    if not carries_gradient(phony):
        return values

    def apply(*tensors: Tensor) -> tuple[Tensor, ...]:
        with beside(tensor.device for tensor in tensors):
            joined: tuple[Tensor, ...] = _Join.apply(phony, *tensors)  # type: ignore[no-untyped-call]
        return joined

    return gate(values, apply)
