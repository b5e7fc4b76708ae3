"""Portals: a skip tensor leaves the autograd graph at its source and comes back at its consumer.

::

    source stage                        consumer stage
    t --- blue --- phony - - - > - - - phony --- orange --- t'
            :                                       :
            `............ portal (t) ...............'

    backward: orange puts the gradient of t' into the portal and hands its phony on; blue, reached
    through the phony, takes the gradient out and gives it to t.

The data goes through the portal, hidden; autograd sees the phony only. A portal has a *life*: how
often its tensor may still be taken out. At zero it lets go of the tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpipe.runtime.dependency import carries_gradient


class PortalError(RuntimeError):
    """A portal was used more often than its life allows."""


class Portal:
    """Holds one tensor (or ``None``) outside autograd for ``life`` takers, and their gradients."""

    def __init__(self, tensor: Tensor | None, life: int = 1) -> None:
        if life < 1:
            raise ValueError(f"a portal's life must be at least 1, got {life}")
        self._tensor = None if tensor is None else tensor.detach()
        self._life = life
        self._grad: Tensor | None = None

    def take(self) -> Tensor | None:
        """The tensor; the last taker's call frees it. Raises :class:`PortalError` after that."""
        if self._life == 0:
            raise PortalError(
                "this portal's tensor has been taken out as often as its life allowed and is "
                "freed; give the portal a longer life if it has more consumers"
            )
        self._life -= 1
        tensor = self._tensor
        if self._life == 0:
            self._tensor = None
        return tensor

    def put_grad(self, grad: Tensor | None) -> None:
        """Add a consumer's gradient; ``None`` (a consumer that yields none) adds nothing."""
        if grad is not None:
            self._grad = grad if self._grad is None else self._grad + grad

    def take_grad(self) -> Tensor | None:
        """The sum of the consumers' gradients, which the portal then forgets."""
        grad, self._grad = self._grad, None
        return grad


class _Blue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, portal: Portal, tensor: Tensor) -> Tensor:
        ctx.portal = portal
        return tensor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[None, Tensor | None]:
        return None, ctx.portal.take_grad()


class _Orange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, portal: Portal, phony: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.portal = portal
        tensor = portal.take()
        assert tensor is not None  # portal_orange hands None on before it comes here
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        ctx.portal.put_grad(grads[0])
        return None, None


def portal_blue(tensor: Tensor | None, life: int = 1) -> tuple[Portal, Tensor]:
    """Take a tensor into a portal. Returns the portal and the phony that stands for it.

    The phony carries gradient exactly where the tensor does. ``None`` may travel.
    """
    portal = Portal(tensor, life)
    if tensor is None or not carries_gradient(tensor):
        return portal, torch.empty(0)
    phony: Tensor = _Blue.apply(portal, tensor)  # type: ignore[no-untyped-call]
    return portal, phony


def portal_orange(portal: Portal, phony: Tensor) -> Tensor | None:
    """Bring the tensor back into the graph; its gradient goes through the portal to the source."""
    if not carries_gradient(phony):
        return portal.take()
    tensor: Tensor = _Orange.apply(portal, phony)  # type: ignore[no-untyped-call]
    return tensor
