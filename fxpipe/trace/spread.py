"""A model that runs as a plain module while its parameters are on several devices.

Once the stages of a model have been placed, the model is run and traced again for another kind of
call. No device may have room for all of it, so that its parameters stay where they are, and what
is computed with them comes to them::

    sim:0   x ── linear(x, w0) ── y          a call with tensors of two devices:
                                  │          the others come to the model's own
    sim:1                         └──► linear(y, w1) ── z
                                                        │
    sim:2                                               └──► linear(z, w2) ── output

Bringing a tensor to a device is a step of its own for autograd: a gradient arrives in each
parameter where that parameter is. Whoever asks where a tensor is (the model, or a trace, which
writes devices into its graph) learns that all of them are on one device, and so are the fake
tensors that are made of them, which have no memory.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from fxpipe.ir._torch import (
    BACKWARDS,
    CALL,
    DESCRIBE,
    RUN_BACKWARD,
    DisableTorchFunction,
    FakeTensor,
    FunctionalTensor,
    SingleLevelFunction,
    TensorDescriber,
    function_modes,
    schema_of,
)
from fxpipe.ir.tensors import devices_of
from fxpipe.trace.patches import patched

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a function call, those by position and those by name."""

_CROSSING = {"to", "copy_", "backward", "__set__"}
"""The functions that take tensors of several devices as they are. An assignment to ``x.data`` or to
``x.grad`` is ``__set__``."""

_COMPARES = "torch.utils.checkpoint"
"""The module that is told where tensors are: it compares what it is told with what it has been told
within a function, where no mode is asked."""

_IN_PLACE = {"__setitem__"} | {
    f"__i{name}__"
    for name in (
        *("add", "sub", "mul", "truediv", "floordiv", "div", "mod", "pow", "matmul"),
        *("and", "or", "xor", "lshift", "rshift"),
    )
}


class _Now(threading.local):
    """The innermost mode of this thread; None outside of :func:`as_on_one_device`."""

    mode: _Together | None = None


_here = _Now()


@contextmanager
def as_on_one_device(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside the ``with`` block a model whose parameters and buffers are on several devices runs as
    if all of them were on ``device``, and is traced as such, while each of them stays where it is.

    What no function of PyTorch is called with (by an extension in C++, say) is not brought to one
    device.
    """
    own = [t for t in (*model.parameters(), *model.buffers()) if not t.is_meta]
    mode, outer = _Together(own, device), _here.mode
    if mode.devices <= {device}:
        yield
        return
    _here.mode = mode
    try:
        with (
            patched(SingleLevelFunction, "apply", mode.functions, tells_threads=True),
            patched(torch.jit.ScriptFunction, "__call__", mode.scripts, tells_threads=True),
            patched(nn.Module, CALL, mode.script_modules, tells_threads=True),
            patched(BACKWARDS, RUN_BACKWARD, mode.backwards),
            patched(TensorDescriber, DESCRIBE, mode.descriptions),
            mode,
        ):
            yield
    finally:
        _here.mode = outer


def is_spread() -> bool:
    """Whether this thread runs a model on several devices, in :func:`as_on_one_device`."""
    return _here.mode is not None


def devices_used(tensors: Iterable[Tensor]) -> set[torch.device]:
    """The devices on which a model that has these tensors computes: those that they are on, and the
    one that they say they are on, on which the model makes others."""
    found = devices_of(tensors)
    return found if _here.mode is None else {*found, _here.mode.device}


class _Together(TorchFunctionMode):
    """Brings the tensors of each call of a function to one device.

    Args:
        own: the tensors of the model.
        device: where all tensors on the devices of the model say they are.
    """

    def __init__(self, own: Collection[Tensor], device: torch.device) -> None:
        super().__init__()
        self.own = {id(tensor): tensor for tensor in own}
        self.devices = {tensor.device for tensor in own}
        self.device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__" and func.__self__ is Tensor.device:
            device = func(*args)
            is_told = sys._getframe(1).f_globals.get("__name__") == _COMPARES
            return device if is_told else self._said(device)
        if name not in _CROSSING and func is not torch.autograd.grad:
            args, kwargs = self._together((args, kwargs or {}), func)
        return func(*args, **(kwargs or {}))

    # ------------------------------------------------ what torch function modes are not asked about

    def functions(self, original: Any) -> Any:
        """Replaces the application of autograd Functions. The backward of one of the user's has all
        that its forward was given on one device, too."""

        def apply(function: type, *args: Any, **kwargs: Any) -> Any:
            if not function.__module__.startswith(("torch.", "fxpipe.")) and self._is_active():
                args, kwargs = self._brought_together((args, kwargs))
            return original.__get__(None, function)(*args, **kwargs)

        return classmethod(apply)

    def scripts(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Replaces the call of a function in TorchScript."""

        def call(script: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_active():
                args, kwargs = self._brought_together((args, kwargs))
            return original.__get__(script)(*args, **kwargs)

        return call

    def script_modules(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Replaces the call of a module: one in TorchScript gets tensors where its own are."""

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if isinstance(module, torch.jit.ScriptModule) and self._is_active():
                own = next(iter((*module.parameters(), *module.buffers())), None)
                args, kwargs = self._brought_together((args, kwargs), own)
            return original(module, *args, **kwargs)

        return call

    def backwards(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Replaces a run of the autograd engine, which hands the active modes to its threads."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with nullcontext() if self._is_active() else self:
                return original(*args, **kwargs)

        return run

    def descriptions(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Replaces the description of a tensor from which a fake of it is made."""

        def describe(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            return replace(found, device=self._said(found.device))

        return describe

    # ---------------------------------------------------------------------------------------------

    def _said(self, device: torch.device) -> torch.device:
        """Where a tensor on this device says it is."""
        return self.device if device in self.devices else device

    def _is_active(self) -> bool:
        """Whether this mode is active in the calling thread. It may be one of the autograd engine,
        where a checkpoint computes something again."""
        return any(mode is self for mode in function_modes())

    def _brought_together(self, call: Call, home: Tensor | None = None) -> Call:
        with DisableTorchFunction():
            return self._together(call, home=home)

    def _together(self, call: Call, func: Any = None, home: Tensor | None = None) -> Call:
        """The arguments of a call on one device: that of ``home``, if it is given. They are the
        very same if they are there already, or if some of them have no values."""
        leaves = list(_leaves((call, home)))
        if len({leaf.device for leaf in leaves if isinstance(leaf, Tensor)}) < 2:
            return call
        if not all(map(_has_values, leaves)):
            return call
        found: Call = _brought(call, self._meeting_point(call, func, home, leaves), {})
        return found

    def _meeting_point(
        self, call: Call, func: Any, home: Tensor | None, tensors: list[Tensor]
    ) -> torch.device:
        """Where the tensors of a call are brought: to ``home``, or to what the call writes to, else
        to the first of the model's own tensors, else to where most of their bytes are."""
        own = [tensor for tensor in tensors if id(tensor) in self.own]
        chosen: list[Tensor] = [*_leaves((home, _written(call, func))), *own]
        if chosen:
            return chosen[0].device
        count: Counter[torch.device] = Counter()
        for tensor in tensors:
            count[tensor.device] += tensor.numel() * tensor.element_size()
        return count.most_common(1)[0][0]


def _written(call: Call, func: Any) -> Any:
    """The arguments that a function writes to: ``out``, those that the schema of an operator names,
    or the first one of a method whose name says so (``add_``, ``__iadd__``)."""
    args, kwargs = call
    if kwargs.get("out") is not None:
        return kwargs["out"]
    schema = schema_of(func)
    if schema is not None:
        return [
            args[i] if i < len(args) else kwargs.get(argument.name)
            for i, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
    name = getattr(func, "__name__", "")
    is_in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    return args[:1] if is_in_place else None


def _leaves(value: Any) -> Iterator[Any]:
    """The tensors and the proxies among arguments."""
    if isinstance(value, Tensor | fx.Proxy):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _leaves(part)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))


def _has_values(leaf: Any) -> bool:
    """Whether something among arguments is a tensor in the memory of a device."""
    is_traced = isinstance(leaf, fx.Proxy | FakeTensor | FunctionalTensor)
    return not is_traced and not leaf.is_meta


def _brought(value: Any, device: torch.device, known: dict[int, Tensor]) -> Any:
    """Arguments with all tensors on a device. What is one tensor stays one: attention computes
    otherwise where queries, keys and values are the same."""
    if isinstance(value, Tensor):
        if id(value) not in known:
            known[id(value)] = value.to(device)
        return known[id(value)]
    if isinstance(value, tuple | list):
        parts = [_brought(part, device, known) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: _brought(part, device, known) for key, part in value.items()}
    return value
