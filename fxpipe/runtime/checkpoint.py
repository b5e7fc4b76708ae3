"""Checkpointing: run a function without keeping its activations, and again when they are needed.

::

    forward                               backward
    x --- fn --- y                        grad x <--- fn's nodes <--- grad y
           :                                              :
           saves t1, t2, ...                              asks for t3, t2, ...
           packed: empty slots 1, 2, ...                  unpacked: the first empty slot asked for
                                                          runs fn again, which fills them all

There is one autograd graph, the forward's; hooks on saved tensors take the activations out of it
and put them back. So everything that backward can do works: ``torch.autograd.grad`` for a part,
``retain_graph``, double backward, and checkpoints within checkpoints. The idea is PyTorch's own
(non-reentrant ``torch.utils.checkpoint``).

What is added is :func:`recompute`: a node whose backward fills the slots ahead of time, so that the
second run overlaps the copy of the incoming gradient (torchgpipe, section 3.3).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxpipe.runtime.dependency import gate
from fxpipe.runtime.surroundings import Surroundings, module_of


class CheckpointError(RuntimeError):
    """A function did not do the second time what it had done the first time."""


class _Stop(BaseException):
    """Ends a recomputation: the last tensor that is needed is there."""

    def __init__(self, frame: _Frame) -> None:
        self.frame = frame


class _Slot:
    """The place of one saved tensor: empty but for the time between recomputation and use."""

    __slots__ = ("__weakref__", "frame", "like", "value")

    def __init__(self, frame: _Frame, tensor: Tensor) -> None:
        self.frame = frame
        self.like = _description(tensor)
        self.value: Tensor | None = None


class _Save(torch.autograd.Function):
    """Saves tensors the way autograd does: whoever packs saved tensors around us packs these too,
    and a tensor that is written to before it is needed again is noticed."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise AssertionError("nothing leads here")


class _Frame:
    """One call of a function, which can be repeated.

    Only its slots own it, and only the autograd graph owns the slots: when the graph lets go of its
    saved tensors, all of it is gone.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        inputs: Any,
        preserve_rng_state: bool,
        early_stop: bool,
        writes_again: bool,
    ) -> None:
        self.fn = fn
        self.early_stop = early_stop
        self.lock = threading.RLock()
        self.slots: list[weakref.ref[_Slot]] = []
        self.complete = False  # the forward has run to its end

        leaves, self.spec = pytree.tree_flatten(inputs)
        self.where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[i] for i in self.where]
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.require_grad = [t.requires_grad for t in tensors]
        anchor = torch.empty(0, requires_grad=True)
        # The result, and not its grad_fn, which does not keep what is saved alive in PyTorch 2.11.
        self.saved = _Save.apply(anchor, *tensors)  # type: ignore[no-untyped-call]

        self.surroundings = Surroundings(fn, tensors, preserve_rng_state, writes_again)

    def run(self) -> Any:
        """The forward, its saved tensors replaced by slots."""
        args, kwargs = self.inputs(detached=False)
        with (
            self.surroundings.watched(),
            torch.autograd.graph.saved_tensors_hooks(self.pack, _unpack),
        ):
            output = self.fn(*args, **kwargs)
        self.complete = True
        return output

    def pack(self, tensor: Tensor) -> Any:
        if self.surroundings.has_parameter(tensor):
            return tensor, tensor._version  # alive anyway, but an optimizer may write to it
        slot = _Slot(self, tensor)
        self.slots.append(weakref.ref(slot))
        return slot

    def inputs(self, *, detached: bool) -> Any:
        leaves = list(self.leaves)
        saved: tuple[Tensor, ...] = self.saved.grad_fn.saved_tensors
        for i, tensor, requires_grad in zip(self.where, saved, self.require_grad, strict=True):
            is_own = isinstance(tensor, torch.nn.Parameter)  # a replica: it has no history to lose
            if detached and not is_own:
                tensor = tensor.detach().requires_grad_(requires_grad)
            leaves[i] = tensor
        return pytree.tree_unflatten(leaves, self.spec)

    def recompute(self) -> None:
        """Run the function again and fill the slots that are still wanted and empty."""
        with self.lock:
            empty = [i for i, ref in enumerate(self.slots) if (s := ref()) and s.value is None]
            if not empty:
                return
            count, known, last = 0, len(self.slots), empty[-1]

            def pack(tensor: Tensor) -> Any:
                nonlocal count
                if self.surroundings.has_parameter(tensor):
                    return tensor
                if self.early_stop and count > last:
                    # Not as soon as it is there: it may be saved before it is computed.
                    raise _Stop(self)
                held = tensor.detach()
                if count < known and (slot := self.slots[count]()) is not None:
                    self.fill(slot, held, count)
                count += 1
                return held

            try:
                with (
                    self.again() as (args, kwargs),
                    torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held),
                ):
                    self.fn(*args, **kwargs)
            except _Stop as stop:
                if stop.frame is not self:
                    raise
            if count <= last or (self.complete and not self.early_stop and count != known):
                raise CheckpointError(
                    f"the forward of {_name(self.fn)} saved {known} tensors, its recomputation "
                    f"{count}: it must do the same both times, so it may not depend on anything "
                    "that changes between them"
                )
            _forget_after_backward(self.slots)

    @contextmanager
    def again(self) -> Iterator[Any]:
        """The arguments and the surroundings of the forward, for whoever runs it once more."""
        with self.surroundings.as_before():
            yield self.inputs(detached=True)

    def fill(self, slot: _Slot, tensor: Tensor, index: int) -> None:
        if _description(tensor) != slot.like:
            raise CheckpointError(
                f"saved tensor {index} of {_name(self.fn)} was {slot.like} in the forward and is "
                f"{_description(tensor)} in the recomputation: it must do the same both times"
            )
        if slot.value is None:
            slot.value = tensor


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, tuple):
        parameter, version = packed
        _check_version(parameter, version)
        return parameter  # type: ignore[no-any-return]
    slot: _Slot = packed
    with slot.frame.lock:
        if slot.value is None:
            slot.frame.recompute()
        tensor, slot.value = slot.value, None  # asked for again (retain_graph), it is made again
    assert tensor is not None
    return tensor


def _check_version(parameter: Tensor, version: int) -> None:
    if parameter._version != version:
        raise RuntimeError(
            "a parameter needed for the backward of a checkpointed function has been modified by "
            f"an inplace operation: it is at version {parameter._version}, and version {version} "
            "was expected"
        )


def _description(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"


def _name(fn: Callable[..., Any]) -> str:
    module = module_of(fn)
    return getattr(fn, "__qualname__", repr(fn)) if module is None else type(module).__name__


def _forget_after_backward(slots: list[weakref.ref[_Slot]]) -> None:
    """Empty the slots that a backward for a part of the graph has not asked for, at its end."""
    # The engine has no public notion of "at the end of this backward"; FSDP uses the same call.
    if torch._C._current_graph_task_id() == -1:
        return

    def forget() -> None:
        for ref in slots:
            if (slot := ref()) is not None:
                slot.value = None

    torch.autograd.Variable._execution_engine.queue_callback(forget)


class Handle:
    """What :func:`recompute` needs of a checkpointed call. It keeps nothing alive."""

    def __init__(self, frame: _Frame) -> None:
        self._frame = weakref.ref(frame)

    def recompute(self) -> None:
        """Run the function again, if its saved tensors are wanted and not there."""
        if (frame := self._frame()) is not None:
            frame.recompute()

    @contextmanager
    def again(self) -> Iterator[Any]:
        """Where the call can be made once more by somebody else, who gets its arguments. Nothing
        of it goes into the graph of the first.

        None if that graph has all it needs: it saves nothing, or nobody wants its gradients.
        """
        frame = self._frame()
        if frame is None:
            yield None
            return
        with frame.again() as inputs:
            yield inputs


def checkpointed(
    fn: Callable[..., Any],
    *args: Any,
    preserve_rng_state: bool = True,
    early_stop: bool = True,
    writes_again: bool = False,
    **kwargs: Any,
) -> tuple[Any, Handle | None]:
    """:func:`checkpoint`, and the handle for :func:`recompute` (None where gradients are off)."""
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs), None
    frame = _Frame(fn, (args, kwargs), preserve_rng_state, early_stop, writes_again)
    return frame.run(), Handle(frame)


def checkpoint(
    fn: Callable[..., Any],
    *args: Any,
    preserve_rng_state: bool = True,
    early_stop: bool = True,
    writes_again: bool = False,
    **kwargs: Any,
) -> Any:
    """``fn(*args, **kwargs)``, its activations not kept but computed again in the backward.

    Args:
        preserve_rng_state: the second run sees the random numbers of the first.
        early_stop: the second run ends as soon as the last tensor that is needed is there.
        writes_again: the second run writes to the buffers of the function's module as the first
            did, so that a batch norm counts a batch twice: ``torch.utils.checkpoint`` does this.

    The second run also has the first one's autocast state, and buffers that the function's module
    writes to (batch norm) are written to once, unless ``writes_again`` is set. Where gradients are
    off this is a plain call.

    Raises:
        CheckpointError: in the backward, if the second run saves other tensors than the first.
    """
    return checkpointed(
        fn,
        *args,
        preserve_rng_state=preserve_rng_state,
        early_stop=early_stop,
        writes_again=writes_again,
        **kwargs,
    )[0]


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: Handle, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.handle = handle
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.handle.recompute()
        return (None, *grads)


def recompute(values: Any, handle: Handle | None) -> Any:
    """The values; when the backward comes by, the checkpointed call is run again."""
    if handle is None:
        return values
    return gate(values, partial(_Recompute.apply, handle))
