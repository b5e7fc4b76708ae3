"""The thread-local settings of PyTorch that a computation depends on, such as grad mode.

A lane computes under the caller's settings, and the second run of a checkpoint under those of the
first run. The settings are read there once, and applied in the thread that computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from fxpipe.ir._torch import (
    DeviceContext,
    FakeTensor,
    FunctionalTensor,
    exchange_function_modes,
    function_modes,
    has_dispatch_modes,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    pytree,
    saved_tensors_hooks,
    transforms,
)


@dataclass(frozen=True)
class Ambient:
    """Grad mode, inference mode, autocast and torch function modes of a thread.

    The default device is a torch function mode. Function modes do not count in comparisons: PyTorch
    takes a mode off its stack while the mode handles a call.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    functions: tuple[TorchFunctionMode, ...] = field(compare=False)

    @staticmethod
    def here() -> Ambient:
        """The settings of the running thread."""
        accelerator = torch.accelerator.current_accelerator()
        kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
        return Ambient(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds),
            torch.is_autocast_cache_enabled(),
            function_modes(),
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within this context the running thread has these settings."""
        with ExitStack() as stack:
            if torch.is_inference_mode_enabled() != self.inference:
                stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if any(
                enabled or torch.is_autocast_enabled(kind) for kind, enabled, _ in self.autocast
            ):
                stack.enter_context(self._autocast())
            stack.enter_context(_function_modes(self.functions))
            yield

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        """A context with these autocast settings. ``torch.autocast`` would not do: at its end it
        clears the cache of cast parameters, which all threads share, and other lanes still use."""
        before = Ambient.here()
        torch.autocast_increment_nesting()
        try:
            self._set_autocast()
            yield
        finally:
            before._set_autocast()
            torch.autocast_decrement_nesting()

    def _set_autocast(self) -> None:
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)


@contextmanager
def _function_modes(modes: tuple[TorchFunctionMode, ...]) -> Iterator[None]:
    """Within this context the running thread has exactly these torch function modes, the
    outermost first."""
    before = function_modes()
    if before == modes:
        yield
        return
    exchange_function_modes(modes)
    try:
        yield
    finally:
        exchange_function_modes(before)


def is_intercepted() -> bool:
    """Whether something watches the operators of this thread, and would miss those of a lane.

    Torch function and dispatch modes, functorch transforms and hooks on saved tensors hold for one
    thread. A default device is a torch function mode that watches nothing: other threads are given
    it too (:class:`Ambient`).
    """
    return bool(
        any(type(mode) is not DeviceContext for mode in function_modes())
        or has_dispatch_modes()
        or transforms()
        or saved_tensors_hooks() is not None
    )


def is_traced(values: Iterable[Any]) -> bool:
    """Whether fx, torch.export or TorchScript traces what is done with these values.

    The types of the values tell it: ``torch.compiler.is_exporting()`` alone is true in all threads
    while one of them exports.
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        return True
    if torch.compiler.is_exporting():
        leaves = pytree.tree_leaves(list(values))
        return any(isinstance(leaf, FakeTensor | FunctionalTensor) for leaf in leaves)
    return any(isinstance(value, fx.Proxy) for value in values)


@contextmanager
def compiling() -> Iterator[None]:
    """A context for compiling, free of the modes that the first call happens to be made in, since
    what is compiled also serves later calls, in other modes."""
    with (
        torch.inference_mode(False),
        torch.autograd.set_detect_anomaly(False),  # it looks at values, and fakes have none
        without_saved_tensors_hooks(),  # a checkpoint around the call must not count these
    ):
        yield


@contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """A context in which no hooks on saved tensors are active in this thread."""
    hooks = []
    while (top := saved_tensors_hooks()) is not None:
        hooks.append(top)
        pop_saved_tensors_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            push_saved_tensors_hooks(pair)
