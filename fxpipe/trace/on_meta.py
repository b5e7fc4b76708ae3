"""A model on "meta" is traced as if it were on the CPU, as the passes examine its graph
(:mod:`fxpipe.ir.somewhere` says why).

Whatever the model asks for its device, it is told the same: fakes, of which an export is made, say
it themselves, and the model's own tensors, which symbolic tracing leaves as they are, by a mode. A
module that is run to see what it gives runs on "meta", where there is nothing to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxpipe.ir._torch import EXPORTS_FAKES, EXPORTS_MODE, FakeTensorMode
from fxpipe.ir.few_steps import made_at_once
from fxpipe.ir.somewhere import Somewhere, seen_on
from fxpipe.trace.example import Example
from fxpipe.trace.patches import patched


@contextmanager
def exported_somewhere(example: Example) -> Iterator[None]:
    """Inside the ``with`` block ``torch.export`` traces a model on "meta" as one on the CPU, and
    makes some fakes in few steps, as the passes do (:mod:`fxpipe.ir.few_steps`)."""
    with (
        patched(EXPORTS_FAKES, EXPORTS_MODE, lambda _: Somewhere)
        if _is_on_meta(example)
        # A class of its own would not know the operators that call functions, such as torch.cond.
        else patched(FakeTensorMode, "__torch_dispatch__", _in_few_steps)
    ):
        yield


def _in_few_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(
        mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = made_at_once(mode, func, args, kwargs)
        return original(mode, func, types, args, kwargs) if made is None else made

    return dispatch


@contextmanager
def told_somewhere(example: Example) -> Iterator[None]:
    """Inside the ``with`` block the tensors of a model on "meta" say that they are on the CPU."""
    if not _is_on_meta(example):
        yield
        return
    with _Told():
        yield


def _is_on_meta(example: Example) -> bool:
    """Whether the model, or what it is called with, is on "meta". (A model that has values may hold
    a tensor on "meta", which is neither a parameter nor a buffer, for its shape.)"""
    model = example.model
    return any(t.is_meta for t in (*example.tensors, *model.parameters(), *model.buffers()))


class _Told(TorchFunctionMode):
    """Answers the question for the device of a tensor."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        is_asked = getattr(func, "__name__", "") == "__get__" and func.__self__ is Tensor.device
        return seen_on(found) if is_asked else found
