"""What stands in the way of ``torch.export`` without need, and is otherwise while it runs."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from fxpipe.ir.source import is_of_a_model
from fxpipe.trace.errors import GRADIENTS, Refused


@contextmanager
def eased() -> Iterator[None]:
    """All of this together."""
    with ExitStack() as stack:
        stack.enter_context(_conversions_only_where_needed())
        stack.enter_context(_unvalidated_distributions())
        stack.enter_context(_gradients_refused())
        yield


@dataclass
class Data:
    """``tensor.data``, of which export loses sight: what is written to it is left out, or fails.

    ``in_sight``: it is ``tensor.detach()`` instead. Of writes to that autograd takes notice: a
    graph then fails where the model computes gradients with values that came later.
    """

    is_used: bool = False
    in_sight: bool = False


@contextmanager
def data_used() -> Iterator[Data]:
    """Yields whether the model takes ``tensor.data``, and what that is."""
    own = vars(torch._C.TensorBase)["data"]
    thread = threading.get_ident()
    found = Data()

    def data(tensor: Tensor) -> Tensor:
        is_ours = threading.get_ident() == thread and torch.compiler.is_exporting()
        if is_ours and is_of_a_model(sys._getframe(1).f_code.co_filename):
            found.is_used = True
            if found.in_sight:
                return tensor.detach()
        return own.__get__(tensor, Tensor)  # type: ignore[no-any-return]

    Tensor.data = property(data, own.__set__)  # type: ignore[assignment]
    try:
        yield found
    finally:
        del Tensor.data


@contextmanager
def _gradients_refused() -> Iterator[None]:
    """Export cannot trace a backward, and says so in other words."""
    names = "grad", "backward"
    originals = {name: getattr(torch.autograd, name) for name in names}
    thread = threading.get_ident()

    def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and torch.compiler.is_exporting():
                raise Refused(GRADIENTS)
            return original(*args, **kwargs)

        return function

    for name, original in originals.items():
        setattr(torch.autograd, name, refusing(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch.autograd, name, original)


@contextmanager
def silent() -> Iterator[None]:
    """What stands in export's way comes as an exception; it is not to be logged and printed too."""
    names = [n for n in logging.root.manager.loggerDict if n.split(".")[0] == "torch"]
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


@contextmanager
def _conversions_only_where_needed() -> Iterator[None]:
    """A module that is converted to the dtype and device that it has is left alone.

    Otherwise its parameters, which export has replaced by fakes, would be replaced again.
    """
    original = nn.Module._apply

    def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        tensors = (*self.parameters(recurse), *self.buffers(recurse))
        kinds = {
            (t.dtype, t.device): fn(torch.empty(0, dtype=t.dtype, device=t.device)) for t in tensors
        }
        if all((t.dtype, t.device) == kind for kind, t in kinds.items()):
            return self
        return original(self, fn, recurse)  # type: ignore[no-untyped-call,no-any-return]

    nn.Module._apply = _apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


@contextmanager
def _unvalidated_distributions() -> Iterator[None]:
    """Distributions look at the values of their parameters, to refuse what makes no sense."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


@contextmanager
def functions_called(*, refused: bool) -> Iterator[list[type]]:
    """Yields the autograd Functions that the model calls, which grows, or refuses them."""
    original = vars(torch.autograd.Function)["apply"]
    found: list[type] = []
    thread = threading.get_ident()  # others may train meanwhile

    def apply(function: type, *args: Any, **kwargs: Any) -> Any:
        is_users = not function.__module__.startswith("torch.")
        is_ours = threading.get_ident() == thread
        # Modules that are kept whole are run besides, to see what they give.
        if is_ours and is_users and torch.compiler.is_exporting():
            found.append(function)
            if refused:
                raise Refused(f"{function.__name__} has a backward of its own, which export loses")
        return original.__get__(None, function)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield found
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
