"""What of PyTorch is patched while a model is compiled: all patches, one lock, one thread.

A patch replaces an attribute of a class or a function of a module, for the process. Each is made by
:func:`patched`, which gives its replacement to the thread that compiles and the original to every
other thread, so that a model may train in one thread while another is compiled beside it. Threads
that compile take turns, by :data:`LOCK`.

::

    nn.Module.__getattribute__          attributes_read   which attributes a forward goes by
    autograd.Function.apply             functions_handled a graph keeps the user's backward
    Tensor.register_hook                tensor_hooks      equal histories, other gradients
    nn.Module._call_impl                Running           which module is to blame
    nn.Module._apply                    eased             module.to() inside of a forward
    Distribution._validate_args         eased             checks of values, which fakes have not
    autograd.grad, autograd.backward    eased             a backward inside of a forward
    Tensor.data                         data_used         export loses sight of it
    utils.checkpoint, fxpipe.checkpoint noted             a checkpoint of the model's is one node
    Tensor.__bool__                     asserted          checks of values that only raise
    ShapeEnv.create_unbacked_sym...     values_read       who reads a number from a tensor
    logging.Logger.handle, sys.stderr   quiet, silent     what PyTorch prints of attempts that fail
"""

from __future__ import annotations

import functools
import inspect
import io
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from fxpipe.ir._torch import VALIDATE_ARGS, SingleLevelFunction
from fxpipe.ir.source import is_of_a_model
from fxpipe.trace.errors import GRADIENTS, Refused

LOCK = threading.RLock()
"""Held while anything is patched: models are compiled one at a time."""


@contextmanager
def patched(owner: type | ModuleType, name: str, replace: Callable[[Any], Any]) -> Iterator[None]:
    """``replace(original)`` stands in the place of an attribute, for this thread only.

    The original of a class is what lies in its ``__dict__``, or in that of a base: a function, a
    ``classmethod``, a property; the replacement is of the same kind. Of a module it is a function.
    """
    with LOCK:
        is_own = name in vars(owner)
        original = inspect.getattr_static(owner, name)
        # Patched already, it is by this thread: the two add up.
        replacement = replace(original.seen() if isinstance(original, _Here) else original)
        if isinstance(owner, ModuleType):
            setattr(owner, name, _function_here(original, replacement))
        else:
            kind = _DataHere if hasattr(type(original), "__set__") else _Here
            setattr(owner, name, kind(original, replacement))
        try:
            yield
        finally:
            if is_own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)


class _Here:
    """An attribute of a class that is its replacement in one thread, the original in others."""

    def __init__(self, original: Any, replacement: Any) -> None:
        self.original, self.replacement = original, replacement
        self.thread = threading.get_ident()

    def seen(self) -> Any:
        """What this thread sees."""
        return self.replacement if threading.get_ident() == self.thread else self.original

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        seen = self.seen()
        get = getattr(type(seen), "__get__", None)
        return seen if get is None else get(seen, instance, owner)


class _DataHere(_Here):
    """The same for a property, which takes assignments."""

    def __set__(self, instance: Any, value: Any) -> None:
        self.seen().__set__(instance, value)


def caller() -> FrameType:
    """For a replacement: the frame that calls what is patched."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    assert frame is not None, "a replacement is called by somebody"
    return frame


def _function_here(original: Callable[..., Any], replacement: Callable[..., Any]) -> Any:
    thread = threading.get_ident()

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        is_here = threading.get_ident() == thread
        return (replacement if is_here else original)(*args, **kwargs)

    return function


# ----------------------------------------------------------------------------- what PyTorch prints


@contextmanager
def quiet() -> Iterator[None]:
    """What PyTorch logs in this thread is dropped.

    An attempt that fails on fake tensors is logged as an error, with its traceback, and raised as
    well. Compiling makes such attempts on purpose (a batch of another size, say); where one matters
    its exception says so.
    """

    def replace(handle: Callable[..., None]) -> Callable[..., None]:
        def handle_others(logger: logging.Logger, record: logging.LogRecord) -> None:
            if record.name.partition(".")[0] != "torch":
                handle(logger, record)

        return handle_others

    with patched(logging.Logger, "handle", replace):
        yield


@contextmanager
def silent() -> Iterator[None]:
    """Besides, what this thread writes to ``sys.stderr`` is dropped: torch.export prints there."""
    before = sys.stderr
    stream: Any = _Stderr(before)
    with LOCK, quiet():
        sys.stderr = stream
        try:
            yield
        finally:
            stream.ends()
            if sys.stderr is stream:  # else another thread has redirected it meanwhile
                sys.stderr = before


class _Stderr:
    """Where one thread writes into the void, and every other thread to the real stream."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self._thread: int | None = threading.get_ident()
        self._void = io.StringIO()

    def ends(self) -> None:
        """From now on nothing is dropped, should anybody still hold this."""
        self._thread = None

    def __getattr__(self, name: str) -> Any:
        is_dropped = threading.get_ident() == self._thread
        return getattr(self._void if is_dropped else self._real, name)


# ------------------------------------------------------------------------ autograd's own functions

Handle = Callable[[type, tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def functions_handled(handle: Handle) -> Iterator[None]:
    """``handle(function, args, kwargs)`` is asked what a ``torch.autograd.Function`` of the model's
    gives; where it says ``NotImplemented``, the function is applied.

    ``Function.apply`` itself is patched, and what it calls in turn: a model may have taken
    ``f = MyFunction.apply`` before, which is the original.
    """

    def replace(original: Any) -> Any:
        def apply(function: type, *args: Any, **kwargs: Any) -> Any:
            is_users = not function.__module__.startswith("torch.")
            value = handle(function, args, kwargs) if is_users else NotImplemented
            if value is NotImplemented:
                return original.__get__(None, function)(*args, **kwargs)
            return value

        return classmethod(apply)

    with (
        patched(torch.autograd.Function, "apply", replace),
        patched(SingleLevelFunction, "apply", replace),
    ):
        yield


@contextmanager
def tensor_hooks() -> Iterator[list[Tensor]]:
    """Yields the tensors on which hooks for their gradients are registered meanwhile."""
    hooked: list[Tensor] = []

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        def register_hook(tensor: Tensor, hook: Callable[..., Any]) -> Any:
            hooked.append(tensor)
            return original(tensor, hook)

        return register_hook

    with patched(Tensor, "register_hook", replace):
        yield hooked


# --------------------------------------------------------------- what stands in torch.export's way


@contextmanager
def eased() -> Iterator[None]:
    """What fails while a model is exported, and need not."""
    with ExitStack() as stack:
        stack.enter_context(patched(nn.Module, "_apply", _only_where_needed))
        # Distributions look at the values of their parameters, to refuse what makes no sense.
        stack.enter_context(patched(Distribution, VALIDATE_ARGS, lambda _: False))
        for name in ("grad", "backward"):
            stack.enter_context(patched(torch.autograd, name, _refused))
        yield


def _only_where_needed(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """A module that is converted to the dtype and device that it has is left alone: else its
    parameters, which export has replaced by fakes, would be replaced again."""

    def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        tensors = (*self.parameters(recurse), *self.buffers(recurse))
        kinds = {
            (t.dtype, t.device): fn(torch.empty(0, dtype=t.dtype, device=t.device)) for t in tensors
        }
        if all((t.dtype, t.device) == kind for kind, t in kinds.items()):
            return self
        return original(self, fn, recurse)

    return _apply


def _refused(original: Callable[..., Any]) -> Callable[..., Any]:
    """Export cannot trace a backward, and says so in other words."""

    def function(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting():
            raise Refused(GRADIENTS)
        return original(*args, **kwargs)

    return function


@contextmanager
def data_used(*, detached: bool) -> Iterator[list[str]]:
    """Yields the files whose code takes ``tensor.data`` meanwhile, a list that grows.

    Export loses sight of it: what is written to it is left out, or fails. With ``detached`` it is
    ``tensor.detach()`` instead. Of writes to that autograd takes notice: a graph then fails where
    the model computes gradients with values that came later.
    """
    files: list[str] = []

    def replace(original: Any) -> Any:
        def data(tensor: Tensor) -> Tensor:
            code = caller().f_code
            if torch.compiler.is_exporting() and is_of_a_model(code.co_filename):
                files.append(code.co_filename)
                if detached:
                    return tensor.detach()
            return original.__get__(tensor, Tensor)  # type: ignore[no-any-return]

        return property(data, original.__set__)

    with patched(Tensor, "data", replace):
        yield files
