"""Tensors of a model from which a symbolic trace computes constants.

::

    self.tau = torch.tensor(2.0)        no buffer: the forward meets the tensor itself, no proxy

    return h / self.tau                 one node, div(h, tau): the graph reads tau in every call
    return h / self.tau.exp()           exp is computed during the trace: the graph has 7.389
    return h / float(self.tau)          the graph has 2.0

A graph with such a constant is wrong once the tensor has been written to. So these tensors belong
to what the graph depends on (:mod:`fxpipe.trace.premises`). ``torch.export`` is not concerned: in
its graphs such computations are nodes, or it refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from fxpipe.ir._torch import TorchDispatchMode
from fxpipe.ir.tensors import memory_of, tensors_of
from fxpipe.trace.patches import patched

# Methods that read a tensor's memory without an operator of PyTorch.
_READERS = "tolist", "numpy", "__array__", "__dlpack__"


@contextmanager
def computed_with(model: nn.Module) -> Iterator[list[Tensor]]:
    """Yields the tensors of a model (parameters, buffers, and those that other attributes hold) on
    which operators run inside the ``with`` block, or whose values are read: a list that grows."""
    own: dict[int, list[Tensor]] = {}
    for module in model.modules():
        for tensor in tensors_of(vars(module)):  # among which are all parameters and buffers
            own.setdefault(memory_of(tensor), []).append(tensor)
    found: list[Tensor] = []

    def notice(value: Any) -> None:
        for tensor in tensors_of(value):
            found.extend(own.pop(memory_of(tensor), ()))

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            notice(tensor)
            return original(tensor, *args, **kwargs)

        return read

    with ExitStack() as stack:
        for name in _READERS:
            stack.enter_context(patched(Tensor, name, replace))
        stack.enter_context(_Noticing(notice))
        yield found


class _Noticing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``notice`` with the arguments of each operator that runs."""

    supports_higher_order_operators = True

    def __init__(self, notice: Callable[[Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.notice = notice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.notice((args, kwargs or {}))
        return func(*args, **(kwargs or {}))
