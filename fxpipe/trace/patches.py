"""All patches of PyTorch that are in force while a model is compiled, and how they are made.

A patch replaces an attribute of a class, or a function of a module, in the whole process. Each is
made by :func:`patched`: the thread that compiles sees the replacement, every other thread sees the
original, so that one model may train in one thread while another is compiled in a second. Threads
that compile take turns, by :data:`LOCK`.

The table has the attribute that is patched, the function that patches it, and the reason::

    nn.Module.__getattribute__          attributes_read   to see which attributes a forward reads
    nn.Module.__getattribute__          unwatched         to see none that export itself reads
    autograd.Function.apply             functions_handled to keep the user's backward in the graph
    Tensor.register_hook                tensor_hooks      to see hooks, which change gradients
    Tensor.tolist, Tensor.numpy...      computed_with     to see of which values it makes constants
    nn.Module._call_impl                Running           to see in which module an error arises
    nn.Module._apply                    eased             to export module.to() within a forward
    Tensor.as_subclass                  eased             to keep track of a tensor, by a view of it
    Distribution._validate_args         eased             to skip checks of values: fakes have none
    autograd.grad, autograd.backward    eased             to refuse a backward within a forward
    Tensor.data                         data_used         to see its use: export loses its writes
    utils.checkpoint, fxpipe.checkpoint noted             to keep a model's checkpoint as one node
    Tensor.__bool__, SymBool.__bool__   asserted          to keep checks of values, as assertions
    fx's own patches                    fx_here           as fx patches nn.Module for all threads
    torch.compiler.is_compiling         eased             as torch.export sets it for all threads
    torch.export._ignore_backend_dec... eased             as it turns cuDNN off for all threads
    fx._get_graph_module_cls            eased             to write no code that does not run
    fx._extract_tensor_metadata         eased             to describe each value once, and not twice
    ShapeEnv.create_unbacked_sym...     values_read       to see who reads a number from a tensor
    ShapeEnv._get_sloc                  model_lines       to name the model's line of a guard
    TracerBase.create_node              lines_of_the_m... to name the model's lines of a node
    torch._C._select_conv_backend       any_kernel        to note no conditions of that choice
    torch.export's FakeTensorMode       exported_somew... to trace what is on "meta" as on the CPU
    FakeTensorMode.__torch_dispatch__   exported_somew... to make some fakes in few steps
    MetaTensorDescriber.describe_tensor as_on_one_device  to have all fakes on one device
    autograd.Function.apply             as_on_one_device  to bring its tensors to one device
    jit.ScriptFunction.__call__         as_on_one_device  the same for functions in TorchScript
    nn.Module._call_impl                as_on_one_device  the same for modules in TorchScript
    autograd._engine_run_backward       as_on_one_device  so that a backward is in its mode, too
    logging.Logger.handle, sys.stderr   quiet, silent     to drop messages of attempts that fail
    warnings.filters                    unwarned          to drop what checks on samples warn of
    builtins.print                      prints            to see, and drop, what the model prints
    Tensor.requires_grad                flags_read        to see which flags a forward branches by
    SymInt.__repr__, SymFloat, SymBool  texts_guarded     to guard sizes of which text is made
    Tensor.grad_fn, torch.is_grad_en... modes_asked       to see who asks whether gradients are kept
    Tensor.stride, Tensor._version...   layouts_asked     to see who asks for the layout of a tensor
    Tensor.__getattr__                  attributes_re...  to see who asks for an input's attribute
    FakeTensor.__getattribute__, SymInt classes_asked     to answer for the class of a value
    torch.is_tensor                     questions_answ... to answer as in a real run

Beside these, ``len``, ``isinstance``, ``type`` and some more are put among the globals of a model's
own code (:mod:`fxpipe.trace.asked`).
"""

from __future__ import annotations

import builtins
import functools
import inspect
import io
import logging
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from fxpipe.ir._torch import (
    EXPORT,
    GRAPH_MODULE_CLASS,
    GRAPH_MODULES,
    PROXIES,
    TENSOR_METADATA,
    VALIDATE_ARGS,
    WITHOUT_BACKENDS,
    FxPatcher,
    LazyGraphModule,
    SingleLevelFunction,
)
from fxpipe.ir.source import is_a_models, is_ours
from fxpipe.trace.asker import asks_for_a_class
from fxpipe.trace.errors import GRADIENTS, Refused, source_line

LOCK = threading.RLock()
"""The lock that a thread holds while it has something patched: models are traced one at a time."""


@contextmanager
def patched(
    owner: type | ModuleType,
    name: str,
    replace: Callable[[Any], Any],
    *,
    elsewhere: bool = False,
    tells_threads: bool = False,
) -> Iterator[None]:
    """Inside the ``with`` block ``replace(original)`` stands in the place of ``owner.name``, for
    this thread only; with ``elsewhere``, for all other threads only.

    If ``owner`` is a class, the original is the object in its ``__dict__``, or in that of a base
    class: a function, a ``classmethod`` or a property; the replacement has to be of the same kind.
    If ``owner`` is a module, both are functions.

    With ``tells_threads`` the replacement is seen by all threads, and has to call the original
    itself for all but this one: it is for functions that are called so often that a second call for
    each of them would take long, and for what a thread of the autograd engine does for this one.
    """
    if owner is Tensor or owner is torch:
        # PyTorch lists the functions of these once, at first need, and keeps the list: made within
        # the block, it would keep the replacement, and whatever that leads to, for ever.
        torch.overrides.get_overridable_functions()
    with LOCK:
        is_own = name in vars(owner)
        original = inspect.getattr_static(owner, name)
        # An attribute that is patched already has been patched by this thread, which holds the
        # lock: the new replacement calls the old one.
        replacement = replace(original.seen() if isinstance(original, _InOneThread) else original)
        others, ours = (replacement, original) if elsewhere else (original, replacement)
        if tells_threads:
            setattr(owner, name, replacement)
        elif isinstance(owner, ModuleType):
            setattr(owner, name, _function_here(others, ours))
        else:
            kind = _DataHere if hasattr(type(original), "__set__") else _InOneThread
            setattr(owner, name, kind(others, ours))
        try:
            yield
        finally:
            if is_own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)


class _InOneThread:
    """A descriptor that gives the replacement of an attribute to one thread, and the original to
    all others."""

    def __init__(self, original: Any, replacement: Any) -> None:
        self.original, self.replacement = original, replacement
        self.binds = [getattr(type(each), "__get__", None) for each in (original, replacement)]
        self.thread = threading.get_ident()

    def seen(self) -> Any:
        """The object that the calling thread sees: the replacement, or the original."""
        return self.replacement if threading.get_ident() == self.thread else self.original

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        is_here = threading.get_ident() == self.thread
        seen, bind = (self.replacement if is_here else self.original), self.binds[is_here]
        return seen if bind is None else bind(seen, instance, owner)


class _DataHere(_InOneThread):
    """The descriptor for a patched property, to which values may be assigned."""

    def __set__(self, instance: Any, value: Any) -> None:
        self.seen().__set__(instance, value)


def caller() -> FrameType:
    """Called within a replacement: the frame of the code that has called the patched function."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    assert frame is not None, "a replacement is called by somebody"
    return frame


def _function_here(original: Callable[..., Any], replacement: Callable[..., Any]) -> Any:
    """A function that calls ``replacement`` in this thread, and ``original`` in every other."""
    thread = threading.get_ident()

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        is_here = threading.get_ident() == thread
        return (replacement if is_here else original)(*args, **kwargs)

    return function


# --------------------------------------------------------------- what PyTorch does to all threads


@contextmanager
def fx_here() -> Iterator[None]:
    """Inside the ``with`` block, what fx patches while it traces is patched for this thread only.

    fx, and with it ``torch.export``, replaces ``nn.Module.__call__`` and ``__getattr__`` in the
    whole process. A module that another thread calls would be traced, too.
    """

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        def patch_method(
            patcher: Any, cls: type, name: str, new: Callable[..., Any], *args: Any, **kwargs: Any
        ) -> None:
            here = _function_here(getattr(cls, name), new)
            original(patcher, cls, name, here, *args, **kwargs)

        return patch_method

    with patched(FxPatcher, "patch_method", replace):
        yield


# ----------------------------------------------------------------------------- what PyTorch prints


@contextmanager
def quiet() -> Iterator[None]:
    """Inside the ``with`` block, what PyTorch logs in this thread is dropped.

    An attempt that fails on fake tensors is logged as an error, with its traceback, and raised as
    well. Compiling makes such attempts on purpose (at another batch size, say); where a failure
    matters, its exception reaches the user.
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
    """Inside the ``with`` block, what PyTorch logs and what this thread writes to ``sys.stderr`` is
    dropped: ``torch.export`` prints an attempt that fails to ``sys.stderr``, too."""
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
    """A stream that drops what one thread writes, and passes on what all other threads write."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self._thread: int | None = threading.get_ident()
        self._void = io.StringIO()

    def ends(self) -> None:
        """Drop nothing from now on, in case somebody still holds this stream as ``sys.stderr``."""
        self._thread = None

    def __getattr__(self, name: str) -> Any:
        is_dropped = threading.get_ident() == self._thread
        return getattr(self._void if is_dropped else self._real, name)


@contextmanager
def unwarned(module: str = "") -> Iterator[None]:
    """Inside the ``with`` block, warnings of this thread are dropped.

    Args:
        module: a regular expression for the names of the modules whose lines the warnings name;
            by default for all.

    A check runs the model and the loss on samples whose shapes and values are none of the user's
    (a single row, of which no standard deviation is known; half of a batch beside a target of all
    its rows). What such a run warns of does not hold for the user's own calls, which warn
    themselves. A filter of ``warnings.catch_warnings`` would drop the warnings of all threads; and
    a warning that is shown, or recorded, would count as given when a call warns of the same.
    """
    here = _HereOnly()
    entry: Any = ("ignore", here, Warning, re.compile(module), 0)
    warnings.filters.insert(0, entry)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        here.ends()
        with suppress(ValueError):  # another thread may have put other filters in their place
            warnings.filters.remove(entry)  # type: ignore[attr-defined]


class _HereOnly:
    """Stands for the pattern of a filter of warnings: it fits all texts in the thread that has made
    it, and none in others."""

    def __init__(self) -> None:
        self._thread: int | None = threading.get_ident()

    def ends(self) -> None:
        """Fit no text from now on, in case a copy of the filters outlives this one."""
        self._thread = None

    def match(self, text: str) -> bool:
        """Whether the warning with this text is dropped."""
        return threading.get_ident() == self._thread


# ------------------------------------------------------------------------ what the model prints


@contextmanager
def prints() -> Iterator[list[str]]:
    """Yields the lines of the model at which it prints inside the ``with`` block, in a list that
    grows. What it prints there is dropped: it is told of symbols, of tensors without values, or of
    the samples of a check, which are none of its calls. What else is the user's (a pass, a tracer)
    prints."""
    lines: list[str] = []

    def replace(original: Callable[..., None]) -> Callable[..., None]:
        def function(*args: Any, **kwargs: Any) -> None:
            frame = caller()
            if is_a_models(frame) and not _is_beside(frame):
                lines.append(source_line(frame.f_code.co_filename, frame.f_lineno))
            else:
                original(*args, **kwargs)

        return function

    with patched(builtins, "print", replace):
        yield lines


_CALL_OTHERS = (
    *("passes.chain", "passes.cost.given", "fxpipe.compiler.history", "fxpipe.trace"),
    "fxpipe.ir.progress",
)
"""The modules of ours that call code of the user's which is no model: passes, observers of passes,
costs, tracers, and listeners of progress."""

_HANDLED = "warnings", "logging"
"""The modules of Python by way of which a warning or a log record gets to a handler, which may be
the user's: what that prints is what we say, and not the model."""


def _is_beside(frame: FrameType | None) -> bool:
    """Whether the code of a frame is the user's, but no model: the innermost code of ours tells."""
    while frame is not None and not is_ours(frame.f_code.co_filename):
        if frame.f_globals.get("__name__") in _HANDLED:
            return True
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") in _CALL_OTHERS


# ---------------------------------------------------------------------------- the class of a value


@contextmanager
def classes_asked(kinds: Iterable[type], class_of: Callable[[Any], type]) -> Iterator[None]:
    """Inside the ``with`` block ``class_of(value)`` is what the model's code gets for
    ``value.__class__``, where the value is an object of one of these classes.

    Python lets nobody set ``__class__`` of a class to a property, so that all attributes are looked
    up by the replacement.
    """

    def replace(original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def look_up(value: Any, name: str) -> Any:
            if name == "__class__" and asks_for_a_class(caller()):
                return class_of(value)
            return original(value, name)

        return look_up

    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(patched(kind, "__getattribute__", replace, tells_threads=True))
        yield


# ------------------------------------------------------------------------ autograd's own functions

Handle = Callable[[type, tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def functions_handled(handle: Handle) -> Iterator[None]:
    """Inside the ``with`` block ``handle(function, args, kwargs)`` gives the result of applying a
    ``torch.autograd.Function`` of the model; if it returns ``NotImplemented``, the Function is
    applied as usual.

    Both ``Function.apply`` and the function that it calls in turn are patched: a model may have
    stored ``f = MyFunction.apply`` earlier, which is the original and would escape the first patch.
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
def tensor_hooks() -> Iterator[list[str]]:
    """Yields where gradient hooks are registered on tensors inside the ``with`` block, in a list
    that grows: the lines of the model, and an empty text for code that is none of the model's."""
    hooked: list[str] = []

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        def register_hook(tensor: Tensor, hook: Callable[..., Any]) -> Any:
            frame = caller()
            line = source_line(frame.f_code.co_filename, frame.f_lineno)
            hooked.append(line if is_a_models(frame) else "")
            return original(tensor, hook)

        return register_hook

    with patched(Tensor, "register_hook", replace):
        yield hooked


# --------------------------------------------------------------- what stands in torch.export's way


@contextmanager
def eased() -> Iterator[None]:
    """Inside the ``with`` block ``torch.export`` accepts three things on which it fails without
    need: calls of ``module.to()`` within a forward that change nothing, ``as_subclass(Tensor)``,
    and distributions that check their arguments.

    A backward within the forward, on which export fails as well, is refused with a message that
    says so. Flags that export sets for the whole process are set for this thread only. And the
    code of the graph, which each pass of export would write anew, is written when it runs, and
    values are described by their fakes only.
    """
    with ExitStack() as stack:
        stack.enter_context(patched(nn.Module, "_apply", _only_where_needed))
        stack.enter_context(patched(Tensor, "as_subclass", _a_view_of_plain))
        # Distributions check the values of their parameters, and fake tensors have no values.
        stack.enter_context(patched(Distribution, VALIDATE_ARGS, lambda _: False))
        for name in ("grad", "backward"):
            stack.enter_context(patched(torch.autograd, name, _refused))
        # torch.export sets flags of the whole process, by which models in other threads branch.
        for name in ("is_compiling", "is_exporting"):
            stack.enter_context(patched(torch.compiler, name, _as_before, elsewhere=True))
        # It also switches oneDNN and cuDNN off for the whole process.
        stack.enter_context(patched(EXPORT, WITHOUT_BACKENDS, lambda _: nullcontext))
        lazy = patched(GRAPH_MODULES, GRAPH_MODULE_CLASS, lambda _: lambda: LazyGraphModule)
        stack.enter_context(lazy)
        stack.enter_context(patched(PROXIES, TENSOR_METADATA, lambda _: lambda value: None))
        yield


def _as_before(original: Callable[[], bool]) -> Callable[[], bool]:
    """A replacement of a function: it always returns what the function returns now."""
    before = original()
    return lambda: before


def _only_where_needed(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """A replacement of ``nn.Module._apply`` that does nothing where a module has the dtype and
    device already: the original would replace the module's parameters, in whose place export has
    put fake tensors."""

    def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        tensors = (*self.parameters(recurse), *self.buffers(recurse))
        kinds = {
            (t.dtype, t.device): fn(torch.empty(0, dtype=t.dtype, device=t.device)) for t in tensors
        }
        if all((t.dtype, t.device) == kind for kind, t in kinds.items()):
            return self
        return original(self, fn, recurse)

    return _apply


def _a_view_of_plain(original: Callable[[Tensor, type], Tensor]) -> Callable[..., Tensor]:
    """A replacement of ``Tensor.as_subclass``: it gives a view of the tensor where the class is
    that of all tensors, as all have it that a graph computes with. Export would lose track of what
    the original gives."""

    def as_subclass(tensor: Tensor, kind: type) -> Tensor:
        is_plain = kind is Tensor and torch.compiler.is_exporting() and is_a_models(caller())
        return tensor.view_as(tensor) if is_plain else original(tensor, kind)

    return as_subclass


def _refused(original: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement of ``autograd.grad`` and ``autograd.backward`` that raises ``Refused`` during
    an export: export cannot trace a backward, and its own message does not say so."""

    def function(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting():
            raise Refused(GRADIENTS)
        return original(*args, **kwargs)

    return function


@contextmanager
def data_used(*, detached: bool) -> Iterator[list[str]]:
    """Yields the files of the model whose code reads ``tensor.data`` inside the ``with`` block, in
    a list that grows.

    Export loses track of ``tensor.data``: writes to it are missing from the graph, or fail. With
    ``detached`` the model gets ``tensor.detach()`` in its place. The difference is that autograd
    notices writes to a detached tensor: where the model writes to a tensor that is saved for the
    backward, the backward of the graph then fails. To set it to another tensor is refused.
    """
    files: list[str] = []
    read: list[tuple[Tensor, Tensor]] = []  # what has been read, and what the model got for it

    def replace(original: Any) -> Any:
        def data(tensor: Tensor) -> Tensor:
            frame = caller()
            if not (torch.compiler.is_exporting() and is_a_models(frame)):
                return original.__get__(tensor, Tensor)  # type: ignore[no-any-return]
            files.append(frame.f_code.co_filename)
            read.append((tensor, tensor.detach() if detached else original.__get__(tensor, Tensor)))
            return read[-1][1]

        def set_data(tensor: Tensor, value: Tensor) -> None:
            # ``x.data *= y`` writes in place, and then sets x.data to what it has read.
            is_the_same = any(tensor is own and value is got for own, got in read)
            is_the_models = is_a_models(caller())
            if torch.compiler.is_exporting() and is_the_models and not is_the_same:
                raise Refused(
                    "it sets .data of a value, of which no graph can tell: compute another tensor, "
                    "or write to it in place under torch.no_grad()"
                )
            original.__set__(tensor, value)

        return property(data, set_data)

    with patched(Tensor, "data", replace):
        yield files
