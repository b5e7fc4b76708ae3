"""Portals: a skip tensor leaves the autograd graph at its source and comes back at its consumer.

::

    source stage                                               consumer stage
    t --- blue --- phony - - - > portal copy - - - > phony --- orange --- t'
            :                       :     :                       :
            `..... Hidden (t) ......'     `..... Hidden (t) ......'

    backward: orange puts the gradient of t' into the hidden cell and hands its phony on; the copy
    moves it to the source's cell; blue, reached through the phony, gives it to t.

Each side has a cell (:class:`Hidden`). The data travels from cell to cell, unseen by autograd,
which sees the phony only: no stage in between has to hand the tensor on. The idea is torchgpipe's
(Kim et al., 2020, section 3.2).

A cell has a *life*: how often its tensor may still be taken out. At zero it drops the tensor.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir._torch import pytree, running_backward
from fxpipe.runtime.copy import moved
from fxpipe.runtime.dependency import carries_gradient
from fxpipe.runtime.engine import first
from fxpipe.runtime.streams import (
    COMPUTE,
    COPY,
    await_made,
    device_of,
    keep,
    made,
    pass_on,
    stream,
    stream_name,
)


class PortalError(RuntimeError):
    """A portal was used more often than its life allows."""


class Hidden:
    """A cell that holds one value outside autograd until it has been taken ``life`` times. In the
    backward it holds the gradients from those that took it."""

    def __init__(self, tensor: Any, life: int = 1) -> None:
        if life < 1:
            raise ValueError(f"a portal's life must be at least 1, got {life}")
        self._tensor = tensor.detach() if isinstance(tensor, Tensor) else tensor
        self._life = life
        self._grads: list[Tensor] = []
        self._backward = -1  # the number of the backward that the gradients belong to

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
        """Keep a consumer's gradient; ``None`` (a consumer that yields none) adds nothing."""
        if grad is None:
            return
        # Gradients of another backward, which has failed before anybody took them, are dropped. The
        # engine's number of a backward is no public interface of PyTorch: a test covers it.
        running = running_backward()
        if running != self._backward:
            self._grads = []
        self._grads.append(grad)
        self._backward = running

    def take_grad(self) -> Tensor | None:
        """The sum of the consumers' gradients, added in the order in which they came, or None.

        The cell then forgets them. The current stream waits for the gradients and adds them.
        """
        grads, self._grads = self._grads, []
        if not grads:
            return None
        await_made(_computing(grads[0]), grads)
        return functools.reduce(torch.add, grads)


@dataclass(frozen=True)
class Portal:
    """A hidden tensor, and the phony that stands for it in the autograd graph."""

    hidden: Hidden
    phony: Tensor


# As a pytree of its phony, a portal passes gates (fork, join, wait, recompute) like any tensor.
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
        return None, ctx.hidden.take_grad()


class _PortalCopy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, near: Hidden, far: Hidden, home: torch.device, device: torch.device, p: Tensor
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.near, ctx.far, ctx.home = near, far, home
        return p.new_empty(0, device=device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        grad = ctx.far.take_grad()
        if grad is not None:
            ctx.near.put_grad(moved(grad, ctx.home, COPY))
        return (None,) * 5


class _Orange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Hidden, phony: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.hidden = hidden
        tensor: Tensor = hidden.take()  # only a tensor has a phony that carries gradient
        _keep_here(tensor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        if grads[0] is not None:
            made(grads[0], _computing(grads[0]))
            ctx.hidden.put_grad(grads[0])
        return None, None


def _computing(tensor: Tensor) -> torch.Stream | None:
    return stream(stream_name(tensor.device, COMPUTE))


def _keep_here(value: Any) -> None:
    """Keep the memory of a value that comes out of a portal for the stream that will use it.

    The waits along the way did that for the phony only, since the value was hidden from them.
    """
    if isinstance(value, Tensor):
        keep(_computing(value), value)


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

    This takes the tensor out of the source's cell once. If that was the last time that the cell's
    life allows, the memory is free as soon as the copy is done.
    """
    tensor = portal.hidden.take()
    if not isinstance(tensor, Tensor):
        return Portal(Hidden(tensor, life), portal.phony)
    pass_on(portal.phony, tensor)  # waits have noted when the phony was made, and not the tensor
    device = device_of(target) or tensor.device
    arrived = moved(tensor, device, source)
    far, phony = Hidden(arrived, life), portal.phony
    if carries_gradient(phony):
        made_far = _PortalCopy.apply(portal.hidden, far, tensor.device, device, phony)  # type: ignore[no-untyped-call]
        (phony,) = first((made_far,))
    else:
        phony = torch.empty(0)
    pass_on(arrived, phony)
    return Portal(far, phony)


def portal_orange(portal: Portal) -> Any:
    """Bring the tensor back into the graph; its gradient goes through the portal to the source."""
    if not carries_gradient(portal.phony):
        value = portal.hidden.take()
        _keep_here(value)
        return value
    tensor: Tensor = _Orange.apply(portal.hidden, portal.phony)  # type: ignore[no-untyped-call]
    return tensor
