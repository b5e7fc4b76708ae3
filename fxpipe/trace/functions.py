"""Autograd Functions as nodes of an exported graph.

``torch.export`` traces through the forward of a ``torch.autograd.Function``, and so loses the
backward that the function defines. Here export sees one operator in its place; in the finished
graph that becomes a call of the function again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.ir._torch import version_of
from fxpipe.ir.structure import Structure
from fxpipe.trace import whole
from fxpipe.trace.errors import Refused
from fxpipe.trace.patches import functions_handled

_APPLY = vars(torch.autograd.Function)["apply"]


def as_callable(function: type) -> Callable[..., Any]:
    """``function.apply`` as a function of its name: the printed code then reads
    ``round_1 = my_model_Round(x)``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return _APPLY.__get__(None, function)(*args, **kwargs)

    call.__name__, call.__module__ = function.__name__, function.__module__
    return call


@dataclass
class Application:
    """One application of a Function: what is around its tensors."""

    function: type
    inputs: Structure
    outputs: Structure | None = field(default=None, init=False)

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Empty outputs, for fake tensors. Raises ``Refused`` if it writes to its inputs."""
        before = [version_of(tensor) for tensor in tensors]
        outputs = self(*tensors)
        if [version_of(tensor) for tensor in tensors] != before:
            raise _lost(self.function, "and writes to its inputs")
        # New ones, since an operator must not give what it has been given.
        return [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            for t in outputs
        ]

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors that it gives."""
        args, kwargs = self.inputs.fill(tensors)
        outputs, self.outputs = Structure.of(as_callable(self.function)(*args, **kwargs))
        return outputs

    def node(self, graph: fx.Graph, key: str, inputs: Sequence[fx.Node]) -> fx.Node:
        """A call of it in a graph."""

        def call(*tensors: Tensor) -> list[Tensor]:
            return self(*tensors)

        call.__name__, call.__module__ = self.function.__name__, self.function.__module__
        return graph.call_function(call, tuple(inputs))


@contextmanager
def functions_called(calls: dict[str, whole.Opaque] | None) -> Iterator[list[type]]:
    """Yields the Functions that a model applies while it is exported, a list that grows.

    With ``calls`` each application becomes an operator, which is entered there; where that cannot
    be it is refused, and the module that does it is kept whole.
    """
    called: list[type] = []
    is_within = False  # what a Function applies in turn is its own business

    def handle(function: type, args: Any, kwargs: Any) -> Any:
        nonlocal is_within
        if is_within or not torch.compiler.is_exporting():
            return NotImplemented  # modules that are kept whole are run besides
        called.append(function)
        if calls is None:
            return NotImplemented
        tensors, structure = Structure.of((args, kwargs))
        if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise _lost(function, "and is given sizes")
        if any(isinstance(each, nn.Module) for each in structure.constants()):
            raise _lost(function, "and is given a module")
        key = f"{function.__name__}.{len(called)}"
        calls[key] = application = Application(function, structure)
        is_within = True
        try:
            outputs = whole.OP(tensors, key)
        finally:
            is_within = False
        assert application.outputs is not None, "the operator has run on fake tensors"
        return application.outputs.fill(outputs)

    with functions_handled(handle):
        yield called


def _lost(function: type, why: str) -> Refused:
    return Refused(f"{function.__name__} has a backward of its own, which export loses, {why}")
