"""Tensors of a model from which a symbolic trace computes constants.

::

    self.tau = torch.tensor(2.0)        no buffer: the forward meets the tensor itself, no proxy

    return h / self.tau                 one node, div(h, tau): the graph reads tau in every call
    return h / self.tau.exp()           exp is computed during the trace: the graph has 7.389
    return h / float(self.tau)          the graph has 2.0

The same holds for a tensor in a global variable. A graph with such a constant is wrong once the
tensor has been written to. So these tensors belong to what the graph depends on
(:mod:`fxpipe.trace.premises`). And a constant has no gradient::

    for p in self.parameters():         the forward meets the parameters themselves, no proxies
        penalty += p.square().sum()     no graph: the model has a gradient here

``torch.export`` is not concerned: in its graphs such computations are nodes, or it refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir._torch import TorchDispatchMode
from fxpipe.ir.tensors import memory_of, tensors_of
from fxpipe.runtime.writes import written_by
from fxpipe.trace.global_values import GlobalValues
from fxpipe.trace.patches import patched

# Methods that read a tensor's memory without an operator of PyTorch.
_READERS = "tolist", "numpy", "__array__", "__dlpack__"


@dataclass
class Folded:
    """Tensors of a model from which a trace has computed constants.

    Attributes:
        tensors: parameters, buffers, those that other attributes hold, and those in variables
            around the model.
        trained: those that require gradients, and from which something has been computed while
            gradients are switched off, so that it has one in other calls; and constants of the
            graph that have a gradient.
        writes: whether the forward writes in place to one that is no parameter and no buffer: in
            the trace, so that the graph does not; or in the graph, which has constants where it
            should read what it has written.
        held: the memory of all tensors that the model, or a variable around it, holds.
    """

    tensors: list[Tensor] = field(default_factory=list)
    trained: list[Tensor] = field(default_factory=list)
    writes: bool = False
    held: Collection[int] = ()

    def is_made(self, tensor: Tensor) -> bool:
        """Whether a tensor that the trace has met is none of those, nor a view of one: the model
        makes it anew in each call."""
        return memory_of(tensor) not in self.held


@contextmanager
def computed_with(model: nn.Module) -> Iterator[Folded]:
    """Yields the tensors of a model on which operators run inside the ``with`` block, or whose
    values are read: lists that grow."""
    own: dict[int, list[Tensor]] = {}
    for module in model.modules():
        for tensor in tensors_of(vars(module)):  # among which are all parameters and buffers
            own.setdefault(memory_of(tensor), []).append(tensor)
    read = {memory: list(tensors) for memory, tensors in own.items()}  # with those around the model
    for tensor in GlobalValues.of(model).tensors:
        read.setdefault(memory_of(tensor), []).append(tensor)
    found, met = Folded(held=read), set[int]()

    def notice(value: Any) -> None:
        for tensor in tensors_of(value):
            memory = memory_of(tensor)
            if memory in read and memory not in met:
                met.add(memory)
                found.tensors += read[memory]
            if memory in read and tensor.requires_grad and not torch.is_grad_enabled():
                found.trained.append(tensor)

    def notice_write(tensor: Tensor) -> None:
        held = own.get(memory_of(tensor), ())
        found.writes |= any(not isinstance(each, nn.Parameter) for each in held)

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            notice(tensor)
            return original(tensor, *args, **kwargs)

        return read

    with ExitStack() as stack:
        for name in _READERS:
            stack.enter_context(patched(Tensor, name, replace))
        stack.enter_context(_Noticing(notice, notice_write))
        yield found


class _Noticing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``notice`` with the arguments of each operator that runs, and ``notice_write`` with the
    tensors to which it writes."""

    supports_higher_order_operators = True

    def __init__(
        self, notice: Callable[[Any], None], notice_write: Callable[[Tensor], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.notice, self.notice_write = notice, notice_write

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.notice((args, kwargs or {}))
        for tensor in written_by(func, args, kwargs or {}):
            self.notice_write(tensor)
        return func(*args, **(kwargs or {}))
