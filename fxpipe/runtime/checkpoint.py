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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import checkpoint as pytorch

from fxpipe.ir._torch import (
    DisableTorchFunction,
    after_backward,
    is_forward_mode,
    is_in_a_group,
    pytree,
    running_backward,
    transforms,
    version_of,
)
from fxpipe.runtime.ambient import is_traced
from fxpipe.runtime.dependency import gate
from fxpipe.runtime.op_log import OpLog, compared
from fxpipe.runtime.random import GeneratorState
from fxpipe.runtime.streams import beside, current, on
from fxpipe.runtime.surroundings import Surroundings, module_of

F = TypeVar("F", bound=Callable[..., Any])
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
_CHECKS = ("default", "none")
_here = threading.local()  # .repetition: the innermost of this thread; .saves_inputs


def _hook(function: F) -> F:
    """A hook on saved tensors. Where the checkpointed function is compiled, it is called from
    within what Dynamo has compiled, and Dynamo would compile the hook as well."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call,no-any-return]


class CheckpointError(pytorch.CheckpointError):
    """The second run of a checkpointed function saved other tensors than its first run."""


class _Stop(BaseException):
    """Raised within a second run, to end it once the last tensor that is needed is there."""

    def __init__(self, repetition: _Repetition) -> None:
        self.repetition = repetition


@dataclass(frozen=True)
class CheckpointOptions:
    """How a function is checkpointed; the meaning is that of :func:`checkpoint`'s arguments.

    Raises:
        ValueError: for a ``determinism_check`` that there is not.
    """

    preserve_rng_state: bool = True
    early_stop: bool = True
    context_fn: Callable[[], Contexts] | None = None
    determinism_check: str = "default"
    debug: bool = False
    writes_again: bool = False

    def __post_init__(self) -> None:
        if self.determinism_check not in _CHECKS:
            raise ValueError(
                f"determinism_check is {self.determinism_check!r}: it must be one of {_CHECKS}"
            )

    @property
    def stops_early(self) -> bool:
        """Whether the second run may end early.

        ``torch.utils.checkpoint.set_checkpoint_early_stop`` overrides the option.
        """
        enabled: bool | None = getattr(pytorch, "_enable_checkpoint_early_stop", None)
        return self.early_stop if enabled is None else enabled

    @property
    def debugs(self) -> bool:
        """Whether operators are noted.

        ``torch.utils.checkpoint.set_checkpoint_debug_enabled`` overrides the option.
        """
        enabled: bool | None = getattr(pytorch, "_checkpoint_debug_enabled", None)
        return self.debug if enabled is None else enabled


class _SavedSlot:
    """The place of one saved tensor. The second run fills it, and the backward empties it."""

    __slots__ = ("__weakref__", "frame", "like", "value", "version")

    def __init__(self, frame: _Frame, tensor: Tensor) -> None:
        self.frame = frame
        self.like = _looks(tensor)
        self.value: Tensor | None = None
        self.version = 0  # of the value when it was put here


class _Save(torch.autograd.Function):
    """Saves tensors as autograd does.

    So hooks on saved tensors around the checkpoint pack them (an outer checkpoint does not keep
    them), and autograd raises if one is written to before it is needed again.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise AssertionError("nothing leads here")


class _Inner(torch.autograd.Function):
    """A tensor that is no leaf, and so may be written to, but has no history behind it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: tuple[Tensor]) -> Tensor:
        return tensor[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


class _Inputs:
    """The arguments of a call, kept until it is made again.

    Tensors are saved as autograd saves them, so that they are freed when it frees the graph.
    """

    def __init__(self, inputs: Any, preserve_rng_state: bool) -> None:
        leaves, self.spec = pytree.tree_flatten(inputs)
        self.where = [i for i, leaf in enumerate(leaves) if _can_be_saved(leaf)]
        self.tensors = [leaves[i] for i in self.where]
        self.leaves = [self._kept(leaf, preserve_rng_state) for leaf in leaves]
        self.kinds = [(t.requires_grad, t.is_leaf, dict(t.__dict__)) for t in self.tensors]

    @staticmethod
    def _kept(leaf: Any, preserve_rng_state: bool) -> Any:
        if _can_be_saved(leaf):
            return None
        if preserve_rng_state and isinstance(leaf, torch.Generator):
            return GeneratorState(leaf)
        return leaf

    def save(self) -> None:
        """Hand the tensors over to autograd, which keeps them until they are asked for."""
        anchor = torch.empty(0, device="cpu", requires_grad=True)
        _here.saves_inputs = True
        try:
            # The result, and not its grad_fn, which does not keep what is saved alive in 2.11.
            self.saved = _Save.apply(anchor, *self.tensors)  # type: ignore[no-untyped-call]
        finally:
            _here.saves_inputs = False
        self.tensors = []

    def again(self) -> Any:
        """The arguments of the first call, without the autograd history that they had."""
        leaves = [
            leaf.again() if isinstance(leaf, GeneratorState) else leaf for leaf in self.leaves
        ]
        saved: tuple[Tensor, ...] = self.saved.grad_fn.saved_tensors
        for i, tensor, kind in zip(self.where, saved, self.kinds, strict=True):
            leaves[i] = _cut_off(tensor, *kind)
        return pytree.tree_unflatten(leaves, self.spec)


def _can_be_saved(leaf: Any) -> bool:
    """Whether it is a tensor that autograd saves. It refuses inference tensors, which are kept like
    any other object."""
    return isinstance(leaf, Tensor) and not leaf.is_inference()


def _cut_off(
    tensor: Tensor, requires_grad: bool, is_leaf: bool, attributes: dict[str, Any]
) -> Tensor:
    if isinstance(tensor, torch.nn.Parameter):  # a replica: it has no history to lose
        return tensor
    with DisableTorchFunction(), torch.enable_grad():
        twin = _twin(tensor, attributes)
        if not requires_grad:
            return twin
        if is_leaf:
            return twin.requires_grad_()
        anchor = torch.empty(0, device="cpu", requires_grad=True)
        return _Inner.apply(anchor, (twin,))  # type: ignore[no-untyped-call,no-any-return]


def _twin(tensor: Tensor, attributes: dict[str, Any]) -> Tensor:
    """The tensor without history, but of its class and with these attributes."""
    with DisableTorchFunction():
        twin = tensor.detach()
        kind = type(tensor)
        if type(twin) is not kind and kind is not torch.nn.Parameter:
            twin = twin.as_subclass(kind)
        for name, value in attributes.items():
            twin.__dict__.setdefault(name, value)
        return twin


class _Frame:
    """One call of a function, which can be repeated.

    Only its slots own it, and only the autograd graph owns the slots: when the graph lets go of its
    saved tensors, all of it is gone.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        to: CheckpointOptions,
    ) -> None:
        self.fn = fn
        self.early_stop = to.stops_early
        self.checks = to.determinism_check != "none"
        self.lock = threading.RLock()
        self.slots: list[weakref.ref[_SavedSlot]] = []
        self.copied: set[int] = set()  # the slots whose tensors are written to after they are saved
        self.complete = False  # the forward has run to its end
        self.first: AbstractContextManager[Any] = nullcontext()
        self.second: AbstractContextManager[Any] = nullcontext()
        self.logs: tuple[OpLog, OpLog] | None = None
        if to.context_fn is not None:
            self.first, self.second = to.context_fn()
        if to.debugs:
            self.logs = OpLog(), OpLog()

        self.inputs = _Inputs((args, kwargs), to.preserve_rng_state)
        tensors = self.inputs.tensors
        self.inputs.save()
        self.surroundings = Surroundings(fn, tensors, to.preserve_rng_state, to.writes_again)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function for the first time; autograd saves slots instead of tensors."""
        with (
            self.surroundings.watched(),
            torch.autograd.graph.saved_tensors_hooks(self.pack, _unpack),
            self.logs[0] if self.logs else nullcontext(),
            self.first,
        ):
            output = self.fn(*args, **kwargs)
            self.complete = True
        if not self.complete:
            raise RuntimeError(
                f"the first context of context_fn has swallowed an exception of {_name(self.fn)}, "
                "which therefore has no result: it has to let exceptions pass"
            )
        return output

    def living(self) -> Iterator[tuple[int, _SavedSlot]]:
        """The slots that the autograd graph still has, with their indices."""
        for i, ref in enumerate(self.slots):
            if (slot := ref()) is not None:
                yield i, slot

    @_hook
    def pack(self, tensor: Tensor) -> Any:
        if self.surroundings.has_parameter(tensor):
            return tensor, _version(tensor)  # alive anyway, but an optimizer may write to it
        slot = _SavedSlot(self, tensor)
        self.slots.append(weakref.ref(slot))
        return slot

    def recompute(self) -> None:
        """Run the function again and fill the slots that are still wanted and empty.

        A tensor that a checkpoint within this one has as its input may be written to once it is
        saved, by that one or after it. The second run shows it; then one more run copies it.
        """
        with self.lock:
            empty = [i for i, slot in self.living() if slot.value is None]
            if not empty:
                return
            while empty:
                spoiled = _Repetition(self, empty[-1]).run()
                self.copied |= spoiled
                for i, slot in self.living():
                    if i in spoiled:
                        slot.value = None
                empty = sorted(spoiled)
            _forget_after_backward(self.slots)

    @contextmanager
    def again(self) -> Iterator[Any]:
        """The arguments of the forward; within this context its surroundings are restored, so that
        the caller can repeat it."""
        # The arguments first: a checkpoint around this one may have to run again for them, and to
        # wait for another thread that does. This thread must not have the random generators then.
        inputs = self.inputs.again()
        with self.surroundings.as_before():
            yield inputs


class _Repetition:
    """A second run of a frame's function.

    Args:
        last: the last slot that is to be filled.
    """

    def __init__(self, frame: _Frame, last: int) -> None:
        self.frame = frame
        self.last = last
        self.count = 0  # tensors that have been saved
        self.inputs: list[tuple[int, Tensor, int]] = []  # of checkpoints within, with their version
        self.differences: list[str] = []

    def run(self) -> set[int]:
        """Fill the slots. Returns the indices of those whose tensors the function has written to
        after they were saved."""
        frame = self.frame
        outer, _here.repetition = _repetition(), self
        try:
            with (
                frame.again() as (args, kwargs),
                torch.autograd.graph.saved_tensors_hooks(self.pack, _held),
                frame.logs[1] if frame.logs else nullcontext(),
                frame.second,
            ):
                frame.surroundings.call(frame.fn, *args, **kwargs)
        except _Stop as stop:
            if stop.repetition is not self:
                raise
        finally:
            _here.repetition = outer
        self.check()
        return {i for i, tensor, version in self.inputs if _version(tensor) != version}

    @property
    def is_done(self) -> bool:
        """Whether all slots that are needed are filled, so that the run can end."""
        return self.frame.early_stop and self.count > self.last

    def stop_if_done(self) -> None:
        if self.is_done:
            raise _Stop(self)

    @_hook
    def pack(self, tensor: Tensor) -> Any:
        frame, index = self.frame, self.count
        if frame.surroundings.has_parameter(tensor):
            return tensor
        # Not as soon as the last one is there: operators may save it before they compute it.
        self.stop_if_done()
        held = _twin(tensor, tensor.__dict__)
        slot = frame.slots[index]() if index < len(frame.slots) else None
        if slot is not None and slot.value is None:
            self.fill(slot, held)
        self.count += 1
        if _saves_inputs():  # which are there
            self.stop_if_done()
        return held

    def fill(self, slot: _SavedSlot, tensor: Tensor) -> None:
        looks = _looks(tensor)
        if self.frame.checks and looks != slot.like:
            self.differences.append(
                f"saved tensor {self.count} of {_name(self.frame.fn)} was {_said(slot.like)} in "
                f"the forward and is {_said(looks)} in the recomputation"
            )
            return
        if _saves_inputs():
            if self.count in self.frame.copied:
                with torch.no_grad():
                    tensor = tensor.clone()
            self.inputs.append((self.count, tensor, _version(tensor)))
        slot.value, slot.version = tensor, _version(tensor)

    def check(self) -> None:
        """Raise a :class:`CheckpointError` if the function saved other tensors than before."""
        frame, known = self.frame, len(self.frame.slots)
        saved_others = frame.complete and not frame.early_stop and self.count != known
        if self.count <= self.last or saved_others:
            self.differences.append(
                f"the forward of {_name(frame.fn)} saved {known} tensors, its recomputation "
                f"{self.count}"
            )
        if self.differences:
            more = len(self.differences) - 1
            raise CheckpointError(
                f"{self.differences[0]}{f' (and {more} more differ)' if more else ''}: it must do "
                "the same both times, so it may not depend on anything that changes between them"
                + (f"\n\n{compared(*frame.logs)}" if frame.logs else "")
            )


def _repetition() -> _Repetition | None:
    return getattr(_here, "repetition", None)


def _saves_inputs() -> bool:
    return getattr(_here, "saves_inputs", False)


@_hook
def _held(tensor: Tensor) -> Tensor:
    return tensor


@_hook
def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, tuple):
        parameter, version = packed
        _check_version(parameter, version, "a parameter")
        return parameter  # type: ignore[no-any-return]
    slot: _SavedSlot = packed
    with slot.frame.lock:
        if slot.value is None:
            slot.frame.recompute()
        tensor, slot.value = slot.value, None  # asked for again (retain_graph), it is made again
    assert tensor is not None
    _check_version(tensor, slot.version, f"a tensor ({_said(slot.like)})")
    return tensor


def _version(tensor: Tensor) -> int:
    """How often the tensor has been written to; 0 for inference tensors, which do not count it."""
    return 0 if tensor.is_inference() else version_of(tensor)


def _check_version(tensor: Tensor, version: int, what: str) -> None:
    if _version(tensor) != version:
        raise RuntimeError(
            f"{what} needed for the backward of a checkpointed function has been modified by an "
            f"inplace operation: it is at version {_version(tensor)}, and version {version} was "
            "expected"
        )


def _looks(tensor: Tensor) -> tuple[Any, ...]:
    """The dtype, shape and device of a saved tensor, which must be the same in both runs."""
    with DisableTorchFunction():
        return tensor.dtype, tensor.shape, tensor.device


def _said(looks: tuple[Any, ...]) -> str:
    dtype, shape, device = looks
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"


def _name(fn: Callable[..., Any]) -> str:
    module = module_of(fn)
    return getattr(fn, "__qualname__", repr(fn)) if module is None else type(module).__name__


def _forget_after_backward(slots: list[weakref.ref[_SavedSlot]]) -> None:
    """Empty all slots when the running backward ends.

    A backward for a part of the graph does not ask for all of them, and the tensors in the others
    would stay until the graph is freed.
    """
    if running_backward() == -1 or is_in_a_group():
        return

    def forget() -> None:
        for ref in slots:
            if (slot := ref()) is not None:
                slot.value = None

    after_backward(forget)


class Handle:
    """Leads to a checkpointed call, by a weak reference, so that it can be run again early."""

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
    fn: Callable[..., Any], /, *args: Any, options: CheckpointOptions | None = None, **kwargs: Any
) -> tuple[Any, Handle | None]:
    """:func:`checkpoint`, and the handle for :func:`recompute` (None for a plain call)."""
    around = _repetition()
    if around is not None:
        around.stop_if_done()
    is_plain = not torch.is_grad_enabled() or transforms() or is_forward_mode()
    if is_plain or is_traced((*args, *kwargs.values())):
        return fn(*args, **kwargs), None
    frame = _Frame(fn, args, kwargs, options or CheckpointOptions())
    return frame.run(args, kwargs), Handle(frame)


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
    context variables. Buffers that the function's module writes to (batch norm) are written to
    once, unless ``writes_again`` is set. Where gradients are off this is a plain call. It is one,
    too, within a transform of ``torch.func`` and in forward-mode differentiation, which cannot be
    entered again when they have ended. ``torch.compile`` takes this function for
    ``torch.utils.checkpoint``, which it knows.

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
        ValueError: for another ``determinism_check``.
    """
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
        ctx: Any, handle: Handle, computing: list[torch.Stream], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.handle, ctx.computing = handle, computing
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        with on(*ctx.computing):
            ctx.handle.recompute()
        return (None, None, *grads)


def recompute(values: Any, handle: Handle | None) -> Any:
    """The values, unchanged. When the backward reaches them, the checkpointed call is run again,
    ahead of its own backward.

    It runs on the streams on which it ran before. These do not wait for the gradients, which may
    still be on their way.
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
