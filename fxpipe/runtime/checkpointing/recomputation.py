"""One call of a checkpointed function: its forward, and the runs that compute it again.

In the forward, a hook on saved tensors hands autograd empty slots in place of the tensors. When the
backward asks for the first slot that is empty, the function runs again, and fills all slots that
the graph still has. :mod:`fxpipe.runtime.checkpointing.checkpoint` has the picture, and the public
functions.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import checkpoint as pytorch

from fxpipe.ir._torch import (
    DisableTorchFunction,
    after_backward,
    is_in_a_group,
    running_backward,
    version_of,
)
from fxpipe.runtime.checkpointing.kept_inputs import KeptInputs, are_being_saved, without_history
from fxpipe.runtime.checkpointing.op_log import OpLog, compared
from fxpipe.runtime.checkpointing.options import CheckpointOptions
from fxpipe.runtime.checkpointing.surroundings import Surroundings, module_of

F = TypeVar("F", bound=Callable[..., Any])
_here = threading.local()  # .repetition: the innermost second run of this thread


def uncompiled(function: F) -> F:
    """Keep Dynamo from compiling a hook on saved tensors, as it would where compiled code calls the
    hook because it calls the checkpointed function."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call,no-any-return]


class CheckpointError(pytorch.CheckpointError):
    """The second run of a checkpointed function saved other tensors than its first run."""


class _Stop(BaseException):
    """Raised within a second run, to end it once the last tensor that is needed is there."""

    def __init__(self, repetition: Repetition) -> None:
        self.repetition = repetition


class SavedSlot:
    """Stands for one saved tensor in the autograd graph.

    The second run puts the tensor into the slot, and the backward takes it out.
    """

    __slots__ = ("__weakref__", "frame", "like", "value", "version")

    def __init__(self, frame: Frame, tensor: Tensor) -> None:
        self.frame = frame
        self.like = looks_of(tensor)
        self.value: Tensor | None = None
        self.version = 0  # of the value when it was put here


class Frame:
    """One call of a checkpointed function, with all that is needed to repeat it.

    Only its slots refer to a frame, and only the autograd graph refers to the slots. So the frame
    and what it keeps are freed as soon as the graph frees its saved tensors.
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
        self.slots: list[weakref.ref[SavedSlot]] = []
        self.copied: set[int] = set()  # the slots whose tensors are written to after they are saved
        self.complete = False  # the forward has run to its end
        self.first: AbstractContextManager[Any] = nullcontext()
        self.second: AbstractContextManager[Any] = nullcontext()
        self.logs: tuple[OpLog, OpLog] | None = None
        if to.context_fn is not None:
            self.first, self.second = to.context_fn()
        if to.debugs:
            self.logs = OpLog(), OpLog()

        self.inputs = KeptInputs((args, kwargs), to.preserve_rng_state)
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

    def living(self) -> Iterator[tuple[int, SavedSlot]]:
        """The slots that the autograd graph still has, with their indices."""
        for i, ref in enumerate(self.slots):
            if (slot := ref()) is not None:
                yield i, slot

    @uncompiled
    def pack(self, tensor: Tensor) -> Any:
        if self.surroundings.has_parameter(tensor):
            return tensor, version_in(tensor)  # alive anyway, but an optimizer may write to it
        slot = SavedSlot(self, tensor)
        self.slots.append(weakref.ref(slot))
        return slot

    def recompute(self) -> None:
        """Run the function again and fill the slots that are still wanted and empty.

        An inner checkpoint saves its inputs, and the function may write to one of them later. The
        second run notices this; then one more run fills the slot with a copy made before the write.
        """
        with self.lock:
            empty = [i for i, slot in self.living() if slot.value is None]
            if not empty:
                return
            while empty:
                spoiled = Repetition(self, empty[-1]).run()
                self.copied |= spoiled
                for i, slot in self.living():
                    if i in spoiled:
                        slot.value = None
                empty = sorted(spoiled)
            _forget_after_backward(self)

    @contextmanager
    def again(self) -> Iterator[Any]:
        """A context with the surroundings of the forward, in which the caller can repeat it. Yields
        the forward's arguments."""
        # The arguments are read first. This may run an outer checkpoint again, or wait for another
        # thread that does so, and in such a wait this thread must not hold the random generators.
        inputs = self.inputs.again()
        with self.surroundings.as_before():
            yield inputs


class Repetition:
    """A second run of a frame's function.

    Args:
        last: the last slot that is to be filled.
    """

    def __init__(self, frame: Frame, last: int) -> None:
        self.frame = frame
        self.last = last
        self.count = 0  # tensors that have been saved
        self.inputs: list[tuple[int, Tensor, int]] = []  # inner checkpoints': slot, value, version
        self.differences: list[str] = []

    def run(self) -> set[int]:
        """Fill the slots. Returns the indices of those whose tensors the function has written to
        after they were saved."""
        frame = self.frame
        outer, _here.repetition = repetition_running(), self
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
        return {i for i, tensor, version in self.inputs if version_in(tensor) != version}

    @property
    def is_done(self) -> bool:
        """Whether all slots that are needed are filled, so that the run can end."""
        return self.frame.early_stop and self.count > self.last

    def stop_if_done(self) -> None:
        if self.is_done:
            raise _Stop(self)

    @uncompiled
    def pack(self, tensor: Tensor) -> Any:
        frame, index = self.frame, self.count
        if frame.surroundings.has_parameter(tensor):
            return tensor
        # The run ends at the next saved tensor, not as soon as the last slot is filled: an operator
        # may save its result before it has computed it.
        self.stop_if_done()
        held = without_history(tensor, tensor.__dict__)
        slot = frame.slots[index]() if index < len(frame.slots) else None
        if slot is not None and slot.value is None:
            self.fill(slot, held)
        self.count += 1
        if are_being_saved():  # these tensors are computed already, so that the run may end here
            self.stop_if_done()
        return held

    def fill(self, slot: SavedSlot, tensor: Tensor) -> None:
        looks = looks_of(tensor)
        if self.frame.checks and looks != slot.like:
            self.differences.append(
                f"saved tensor {self.count} of {_name(self.frame.fn)} was {said(slot.like)} in "
                f"the forward and is {said(looks)} in the recomputation"
            )
            return
        if are_being_saved():
            if self.count in self.frame.copied:
                with torch.no_grad():
                    tensor = tensor.clone()
            self.inputs.append((self.count, tensor, version_in(tensor)))
        slot.value, slot.version = tensor, version_in(tensor)

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


def repetition_running() -> Repetition | None:
    return getattr(_here, "repetition", None)


@uncompiled
def _held(tensor: Tensor) -> Tensor:
    return tensor


@uncompiled
def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, tuple):
        parameter, version = packed
        check_version(parameter, version, "a parameter")
        return parameter  # type: ignore[no-any-return]
    slot: SavedSlot = packed
    with slot.frame.lock:
        if slot.value is None:
            slot.frame.recompute()
        tensor, slot.value = slot.value, None  # another backward (retain_graph) computes it again
    assert tensor is not None
    check_version(tensor, slot.version, f"a tensor ({said(slot.like)})")
    return tensor


def version_in(tensor: Tensor) -> int:
    """How often the tensor has been written to; 0 for inference tensors, which do not count it."""
    return 0 if tensor.is_inference() else version_of(tensor)


def check_version(tensor: Tensor, version: int, what: str) -> None:
    if version_in(tensor) != version:
        raise RuntimeError(
            f"{what} needed for the backward of a checkpointed function has been modified by an "
            f"inplace operation: it is at version {version_in(tensor)}, and version {version} was "
            "expected"
        )


def looks_of(tensor: Tensor) -> tuple[Any, ...]:
    """The dtype, shape and device of a saved tensor, which must be the same in both runs."""
    with DisableTorchFunction():
        return tensor.dtype, tensor.shape, tensor.device


def said(looks: tuple[Any, ...]) -> str:
    dtype, shape, device = looks
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"


def _name(fn: Callable[..., Any]) -> str:
    module = module_of(fn)
    return getattr(fn, "__qualname__", repr(fn)) if module is None else type(module).__name__


def _forget_after_backward(frame: Frame) -> None:
    """Empty all slots of a frame when the running backward ends.

    A backward for a part of the graph does not ask for all of them, and the tensors in the others
    would stay until the graph is freed. Another thread may go back through the same graph, and
    takes what it has just computed again while it holds the frame's lock.
    """
    if running_backward() == -1 or is_in_a_group():
        return

    lock, slots = frame.lock, frame.slots  # the frame itself is freed before the backward ends

    def forget() -> None:
        with lock:
            for ref in slots:
                if (slot := ref()) is not None:
                    slot.value = None

    after_backward(forget)
