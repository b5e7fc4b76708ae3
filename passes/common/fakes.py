"""Runs graphs on fake tensors, for the passes "alias", "rows", "cost" and "shared".

A fake tensor has a shape, memory that its views share, and autograd history, but no values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe import ops
from fxpipe.ir._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    disable_current_modes,
    enable_python_dispatcher,
    is_view,
    schema_of,
)
from fxpipe.ir.autograd import reached
from fxpipe.ir.errors import NeedsValues
from fxpipe.ir.graph import VALUE, attribute, mutable
from fxpipe.ir.printing import format_node
from fxpipe.ir.somewhere import Somewhere
from fxpipe.ir.tensors import tensors_of, with_tensors
from fxpipe.runtime.random import unseeded
from fxpipe.runtime.state import State
from passes.common.recurrences import Recurrences

_EXPORT = 'give tracer="export", which does not trace into modules that need values, but calls them'
_OWN_MODULE = "put it into a module of its own, which is then kept whole"
"""What helps where a graph needs values: one of the symbolic front end, and one of an export."""


class FakeInterpreter(fx.Interpreter):
    """Runs the nodes of a graph on fake tensors. Parameters and buffers are replaced by fakes, too,
    so that no real tensor is written to. Recurrent layers run a few of their steps, see
    :mod:`passes.common.recurrences`; ``counts``: so that the work of all of them is counted."""

    def __init__(
        self, gm: fx.GraphModule, mode: FakeTensorMode | None = None, *, counts: bool = False
    ) -> None:
        super().__init__(gm)
        self.counts = counts
        self.mode = mode or Somewhere()
        if any(
            isinstance(value, torch.ScriptObject)
            for m in gm.modules()
            for value in vars(m).values()
        ):
            self.mode.cache_enabled = False  # the cache cannot compare script objects
        self.extra_traceback = False  # ``run_node`` names the node that fails

    def run_node(self, n: fx.Node) -> Any:
        """Run a node.

        Raises :class:`fxpipe.ir.errors.NeedsValues`, which names the node, if the node needs the
        values of tensors, since fakes have none.
        """
        try:
            return super().run_node(n)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            where = (n.meta.get("stack_trace") or "").strip().splitlines()
            is_exported = schema_of(n.target) is not None
            raise NeedsValues(
                f"the model needs the values of tensors to know what to compute: {format_node(n)} "
                f"({error}); compute it by tensor operations, or "
                + (_OWN_MODULE if is_exported else _EXPORT)
                + "".join(f"\n{line}" for line in where[-2:])
            ) from error

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return mutable(args), mutable(kwargs)

    def fake(self, value: Any) -> Any:
        """The value with a fake in place of each tensor; a tensor always gets the same fake."""
        return with_tensors(lambda t: self.mode.from_tensor(t, static_shapes=True), value)

    def fetch_attr(self, target: str) -> Any:
        """The module, tensor or other value at this path."""
        return attribute(self.module, target)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.fake(self.fetch_attr(target))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is ops.call:
            args = self._called(*args)
        with Recurrences(self.counts):
            return _without_values(super().call_function, target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        return _without_values(super().call_method, target, args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        if unseeded(module) is ops.call:
            seed, *called = args
            args = (seed, *self._called(*called))
        buffers = dict(module.named_buffers())
        fakes = self.fake(buffers)
        with _numbers(buffers, fakes):
            tensors = {**self.fake(dict(module.named_parameters())), **fakes}
            # A hidden state that a module keeps would be a fake when it runs, of a fake's size.
            with Recurrences(self.counts), State(module.modules()).as_before():
                return torch.func.functional_call(module, tensors, args, kwargs)

    def _called(self, module: nn.Module, values: Mapping[str, Any], *args: Any) -> tuple[Any, ...]:
        """The arguments of ``ops.call``, which calls a module with values in place of some of its
        parameters: with fakes in place of all others."""
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return (module, {**self.fake(own), **values}, *args)


def _without_values(call: Callable[..., Any], target: Any, args: Any, kwargs: Any) -> Any:
    """Call a function on fakes; if its kernel looks at values, run the operator in Python instead.

    Some kernels look at values only to check them: that of the inverse short-time Fourier transform
    checks its windows. The operator's implementation in Python does not look.
    """
    try:
        return call(target, args, kwargs)
    except DataDependentOutputException:
        with enable_python_dispatcher():
            return call(target, args, kwargs)


@contextmanager
def _numbers(buffers: Mapping[str, Tensor], fakes: Mapping[str, FakeTensor]) -> Iterator[None]:
    """Give the fakes of scalar buffers their values for as long as a module runs.

    A module may read such a number: a batch norm without momentum divides by the number of batches
    so far. A buffer on "meta" has no value. Its fake is given the value 1, as no shape depends on
    it.
    """
    numbers = [name for name, buffer in buffers.items() if buffer.dim() == 0]
    with disable_current_modes():  # these operators are not the model's: no mode may count them
        for name in numbers:
            buffer = buffers[name]
            has_value = not buffer.is_meta and not isinstance(buffer, FakeTensor)
            fakes[name].constant = (
                buffer.detach().clone()
                if has_value
                else torch.ones((), dtype=buffer.dtype, device="cpu")
            )
    try:
        yield
    finally:
        for name in numbers:
            fakes[name].constant = None


def fake_mode(graph: fx.Graph) -> FakeTensorMode | None:
    """The mode in which the fake values of a graph were made; None if it has no fake values."""
    values = (node.meta.get(VALUE) for node in graph.nodes)
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)


def history_of(tensor: Tensor) -> Any:
    """The autograd node that has made a tensor; None if there is none, or if autograd refuses.

    Autograd refuses to name it for one of several views that an operator returns at once
    (``unbind``, ``split``) if the memory has since been written to through another tensor. A model
    may hold such a view, but cannot compute gradients through it.
    """
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def backward_edges(values: Any) -> Iterator[Any]:
    """The autograd nodes that a backward from these values visits, each once for every edge that
    leads to it."""
    histories = map(history_of, tensors_of(values))
    starts = [history for history in histories if history is not None]
    yield from starts
    for node in reached(starts):
        yield from (function for function, _ in node.next_functions if function is not None)


def forget_history(graph: fx.Graph) -> None:
    """Cut the fake values of a graph off from their autograd history, once nobody needs it.

    The values are cut off from the last to the first. If the whole history of a deep model were
    freed at once, each autograd node would free the one before it through its saved tensors, in a
    recursion that overflows the stack.
    """
    for node in reversed(graph.nodes):
        if VALUE in node.meta:
            node.meta[VALUE] = with_tensors(_cut_off, node.meta[VALUE])


def _cut_off(tensor: Tensor) -> Tensor:
    if not tensor.requires_grad:
        return tensor
    # Detaching in place takes a fiftieth of the time, but PyTorch does not allow it for views.
    own = tensor.detach() if is_view(tensor) else tensor.detach_()
    return own.requires_grad_()
