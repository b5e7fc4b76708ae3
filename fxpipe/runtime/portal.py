"""Portals: a skip tensor leaves the autograd graph at its source and comes back at its consumer.

::

    source stage                                               consumer stage
    t --- blue --- phony - - - > portal copy - - - > phony --- orange --- t'
            :                       :     :                       :
            `..... Hidden (t) ......'     `..... Hidden (t) ......'

    backward: orange puts the gradient of t' into the hidden cell and hands its phony on; the copy
    moves it to the source's cell; blue, reached through the phony, gives it to t.

The data goes through the cells, out of autograd's sight, and autograd sees the phony only: no stage
in between has to hand the tensor on. The idea is torchgpipe's (Kim et al., 2020, section 3.2).

A cell has a *life*: how often its tensor may still be taken out. At zero it lets go of the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxpipe.runtime.copy import moved
from fxpipe.runtime.dependency import carries_gradient
from fxpipe.runtime.engine import first
from fxpipe.runtime.streams import COMPUTE, device_of, keep, stream, stream_name


class PortalError(RuntimeError):
    """A portal was used more often than its life allows."""


class Hidden:
    """Holds one value outside autograd for ``life`` takers, and their gradients if it has any."""

    def __init__(self, tensor: Any, life: int = 1) -> None:
        if life < 1:
            raise ValueError(f"a portal's life must be at least 1, got {life}")
        self._tensor = tensor.detach() if isinstance(tensor, Tensor) else tensor
        self._life = life
        self._grad: Tensor | None = None
        self._backward = -1  # the one that the gradient belongs to

    def take(self) -> Any:
        """The value; the last taker's call frees it. Raises :class:`PortalError` after that."""
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
        if grad is None:
            return
        # A backward that has failed on its way leaves its gradient here; the next one starts anew.
        # The engine numbers its runs, and does not say so in public: a test fails when that goes.
        running = torch._C._current_graph_task_id()
        is_first = self._grad is None or running != self._backward
        self._grad = grad if is_first else self._grad + grad  # type: ignore[operator]
        self._backward = running

    def take_grad(self) -> Tensor | None:
        """The sum of the consumers' gradients, which the cell then forgets."""
        grad, self._grad = self._grad, None
        return grad


@dataclass(frozen=True)
class Portal:
    """A hidden tensor, and the phony that stands for it in the autograd graph."""

    hidden: Hidden
    phony: Tensor


# A gate (fork, join, wait, recompute) thereby acts on a portal's phony as on any tensor.
pytree.register_pytree_node(
    Portal,
    lambda portal: ([portal.phony], portal.hidden),
    lambda phony, hidden: Portal(hidden, *phony),
    serialized_type_name="fxpipe.runtime.portal.Portal",
)


class _Blue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Hidden, tensor: Tensor) -> Tensor:
        ctx.hidden = hidden
        return tensor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[None, Tensor | None]:
        grad = ctx.hidden.take_grad()
        _keep_here(grad)
        return None, grad


class _PortalCopy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, near: Hidden, far: Hidden, home: torch.device, source: str, target: str, p: Tensor
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.near, ctx.far, ctx.home, ctx.source, ctx.target = near, far, home, source, target
        return p.to(device_of(target) or p.device).view(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        grad = ctx.far.take_grad()
        if grad is not None:
            ctx.near.put_grad(moved(grad, ctx.home, ctx.target, ctx.source))
        return (None,) * 6


class _Orange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Hidden, phony: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.hidden = hidden
        tensor: Tensor = hidden.take()  # nothing else has a phony that carries gradient
        _keep_here(tensor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        ctx.hidden.put_grad(grads[0])
        return None, None


def _keep_here(value: Any) -> None:
    """The waits along the way have kept the phony's memory, and could not see what was hidden."""
    if isinstance(value, Tensor):
        keep(stream(stream_name(value.device, COMPUTE)), value)


def portal_blue(tensor: Any, life: int = 1) -> Portal:
    """Take a tensor out of autograd's sight. ``None`` may travel, as may anything else that is no
    tensor.

    The phony carries gradient exactly where the tensor does.
    """
    hidden = Hidden(tensor, life)
    if not carries_gradient(tensor):
        return Portal(hidden, torch.empty(0))
    return Portal(hidden, _Blue.apply(hidden, tensor))  # type: ignore[no-untyped-call]


def portal_copy(portal: Portal, source: str, target: str, life: int = 1) -> Portal:
    """Move the hidden tensor to the target stream's device, and its gradient back.

    The source's cell lets go of the tensor here (of one life of it): its memory is free as soon as
    the copy is done.
    """
    tensor = portal.hidden.take()
    if not isinstance(tensor, Tensor):
        return Portal(Hidden(tensor, life), portal.phony)
    far = Hidden(moved(tensor, device_of(target), source, target), life)
    if not carries_gradient(portal.phony):
        return Portal(far, portal.phony)
    phony: Tensor = _PortalCopy.apply(  # type: ignore[no-untyped-call]
        portal.hidden, far, tensor.device, source, target, portal.phony
    )
    return Portal(far, *first((phony,)))


def portal_orange(portal: Portal) -> Any:
    """Bring the tensor back into the graph; its gradient goes through the portal to the source."""
    if not carries_gradient(portal.phony):
        value = portal.hidden.take()
        _keep_here(value)
        return value
    tensor: Tensor = _Orange.apply(portal.hidden, portal.phony)  # type: ignore[no-untyped-call]
    return tensor
