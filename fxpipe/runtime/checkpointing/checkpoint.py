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

Added to this is :func:`recompute`: a node whose backward fills the slots ahead of time, so that the
second run overlaps the copy of the incoming gradient (torchgpipe, section 3.3).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as pytorch

from fxpipe.ir._torch import is_forward_mode, transforms
from fxpipe.ir.text import kind
from fxpipe.runtime.ambient import is_traced
from fxpipe.runtime.checkpointing.offload import Offload
from fxpipe.runtime.checkpointing.options import CheckpointOptions, Contexts
from fxpipe.runtime.checkpointing.recomputation import CheckpointError, Frame, repetition_running
from fxpipe.runtime.dependency import gate
from fxpipe.runtime.streams import beside, current, device_of, on

__all__ = [
    "CheckpointError",
    "CheckpointOptions",
    "Contexts",
    "Handle",
    "checkpoint",
    "checkpointed",
    "offloaded",
    "recompute",
]


class Handle:
    """Refers to a checkpointed call, so that the call can be run again ahead of its backward.

    The reference is weak: the autograd graph alone decides how long the call is kept.
    """

    def __init__(self, frame: Frame) -> None:
        self._frame = weakref.ref(frame)

    def restore(self) -> None:
        """Run the function again, if the graph still needs saved tensors that are not there."""
        if (frame := self._frame()) is not None:
            frame.recompute()


def checkpointed(
    fn: Callable[..., Any], /, *args: Any, options: CheckpointOptions | None = None, **kwargs: Any
) -> tuple[Any, Handle | None]:
    """:func:`checkpoint`, and the handle for :func:`recompute` (None for a plain call)."""
    around = repetition_running()
    if around is not None:
        around.stop_if_done()
    if _is_plain((*args, *kwargs.values())):
        return fn(*args, **kwargs), None
    frame = Frame(fn, args, kwargs, options or CheckpointOptions())
    return frame.run(args, kwargs), Handle(frame)


def _is_plain(args: Sequence[Any]) -> bool:
    """Whether a call with these arguments records nothing that would have to be made again."""
    is_off = not torch.is_grad_enabled() or transforms() or is_forward_mode()
    return bool(is_off or is_traced(args))


def checkpoint(
    fn: Callable[..., Any],
    /,
    *args: Any,
    preserve_rng_state: bool = True,
    early_stop: bool = True,
    context_fn: Callable[[], Contexts] | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    writes_again: bool = False,
    **kwargs: Any,
) -> Any:
    """``fn(*args, **kwargs)``, its activations not kept but computed again in the backward.

    The second run has the first one's autocast state, default device, torch function modes and
    context variables. Buffers that the function's module writes to in its first call (batch norm)
    are written to once, unless ``writes_again`` is set; those to which it writes only now and then,
    depending on values, are written to twice, as with ``torch.utils.checkpoint``.

    Where gradients are off this is a plain call. It is one, too, within a transform of
    ``torch.func`` and in forward-mode differentiation, which cannot be entered again when they have
    ended. ``torch.compile`` takes this function for ``torch.utils.checkpoint``, which it knows.

    Args:
        preserve_rng_state: the second run sees the random numbers of the first, those of generators
            among the arguments too.
        early_stop: the second run ends as soon as the last tensor that is needed is there.
        context_fn: gives two contexts, for the first and for the second run. So
            ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` keeps what some
            operators compute.
        determinism_check: ``"default"`` compares dtype, shape and device of what is saved both
            times, ``"none"`` only its number.
        debug: a :class:`CheckpointError` shows the operators of both runs.
        writes_again: the second run writes to the buffers of the function's module as the first
            did, so that a batch norm counts a batch twice: ``torch.utils.checkpoint`` does this.

    Raises:
        CheckpointError: in the backward, if the second run saves other tensors than the first.
        RuntimeError: in the backward, if somebody else has written to a parameter or a buffer of
            the function's module since the first run.
        ValueError: for another ``determinism_check``.
    """
    if not callable(fn):
        raise TypeError(f"checkpoint runs a function, and is given {kind(fn)}: checkpoint(fn, x)")
    if torch.compiler.is_dynamo_compiling():
        contexts = {} if context_fn is None else {"context_fn": context_fn}
        return pytorch.checkpoint(
            fn,
            *args,
            use_reentrant=False,
            preserve_rng_state=preserve_rng_state,
            early_stop=early_stop,
            determinism_check=determinism_check,
            debug=debug,
            **contexts,
            **kwargs,
        )
    options = CheckpointOptions(
        preserve_rng_state, early_stop, context_fn, determinism_check, debug, writes_again
    )
    return checkpointed(fn, *args, options=options, **kwargs)[0]


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, handle: Handle | Offload, computing: list[torch.Stream], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.handle, ctx.computing = handle, computing
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        with on(*ctx.computing):
            ctx.handle.restore()
        return (None, None, *grads)


def offloaded(
    module: nn.Module, source: str, share: float, *args: Any
) -> tuple[Any, Offload | None]:
    """Call a module, and move what it saves for its backward, or a share of that, from the source
    stream's device to the host. Returns the output, and the handle for :func:`recompute` (None for
    a plain call)."""
    # Its forward is called, and not the module: fx prints errors in a call of a module to stderr.
    device = device_of(source)
    if device is None or _is_plain(args):
        return module.forward(*args), None
    handle = Offload(module, args)
    with handle.saving():
        output = module.forward(*args)
    handle.out(device, share)
    return output, handle


def recompute(values: Any, handle: Handle | Offload | None) -> Any:
    """Pass the values on unchanged; when the backward reaches them, the checkpointed call runs
    again, ahead of its own backward. If the call was :func:`offloaded`, what it has saved begins to
    come back.

    It runs on the streams on which it ran before. These do not wait for the gradients, which may
    still be on their way, so that the second run overlaps their copy.
    """
    if handle is None:
        return values

    def ahead(*tensors: Tensor) -> tuple[Tensor, ...]:
        devices = [tensor.device for tensor in tensors]
        computing = current(devices)
        with beside(devices):
            outputs: tuple[Tensor, ...] = _Recompute.apply(handle, computing, *tensors)  # type: ignore[no-untyped-call]
        return outputs

    return gate(values, ahead)
