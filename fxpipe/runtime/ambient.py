"""What PyTorch keeps per thread and a computation depends on, to be set up elsewhere again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._C._functorch import TransformType
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Ambient:
    """Grad mode, inference mode and autocast of a thread."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool

    @staticmethod
    def here() -> Ambient:
        """That of the running thread."""
        accelerator = torch.accelerator.current_accelerator()
        kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
        return Ambient(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds),
            torch.is_autocast_cache_enabled(),
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The running thread computes under it."""
        with ExitStack() as stack:
            if torch.is_inference_mode_enabled() != self.inference:
                stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if any(
                enabled or torch.is_autocast_enabled(kind) for kind, enabled, _ in self.autocast
            ):
                stack.enter_context(self._autocast())
            yield

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        """As by ``torch.autocast``, which at its end would also drop the casts of parameters that
        are kept meanwhile: they are kept for all threads, and others are still at work."""
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


def is_intercepted() -> bool:
    """Whether somebody watches this thread's operations, who would miss those of another thread.

    Torch function and dispatch modes, functorch transforms and hooks on saved tensors hold for one
    thread. PyTorch has no public way to ask for them; tests fail when one of these goes.
    """
    return bool(
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or transforms()
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    )


def is_traced(values: Iterable[Any]) -> bool:
    """Whether fx, torch.export or TorchScript traces what is done with these values.

    The values say so: what PyTorch says, ``is_exporting()``, it says to all threads.
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        return True
    if torch.compiler.is_exporting():
        leaves = pytree.tree_leaves(list(values))
        return any(isinstance(leaf, FakeTensor | FunctionalTensor) for leaf in leaves)
    return any(isinstance(value, fx.Proxy) for value in values)


def transforms() -> list[TransformType]:
    """The functorch transforms that run in this thread, the outermost first."""
    return [each.key() for each in torch._C._functorch.get_interpreter_stack() or ()]


@contextmanager
def compiling() -> Iterator[None]:
    """What is inferred meanwhile is used later, whatever the modes are that a call happens in."""
    with (
        torch.inference_mode(False),
        torch.autograd.set_detect_anomaly(False),  # fake gradients have no values to look at
        without_saved_tensors_hooks(),  # which a checkpoint around the first call counts by
    ):
        yield


@contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """What is done meanwhile is none of the business of hooks on saved tensors around it."""
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(*pair)
