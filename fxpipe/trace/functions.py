"""Autograd Functions as nodes of an exported graph.

``torch.export`` traces through the forward of a ``torch.autograd.Function``, and so loses the
backward that the Function defines. To keep it, export is shown one operator in place of each
application; in the finished graph that operator becomes a call of the Function again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.ir._torch import OpOverload, function_of_operator
from fxpipe.ir.structure import Structure
from fxpipe.runtime.writes import WrittenMemory, writes_counted
from fxpipe.trace import whole
from fxpipe.trace.errors import Refused
from fxpipe.trace.patches import functions_handled

_APPLY = vars(torch.autograd.Function)["apply"]


def as_callable(function: type) -> Callable[..., Any]:
    """``function.apply`` as a plain function that has the name of the Function, so that the code of
    a graph reads ``round_1 = my_model_Round(x)``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return _APPLY.__get__(None, function)(*args, **kwargs)

    call.__name__, call.__module__ = function.__name__, function.__module__
    call.function = function  # type: ignore[attr-defined]
    return call


def code_of_call(target: Any) -> Any:
    """What the target of a ``call_function`` node runs: an autograd Function's class, the function
    in Python that defines an operator, or the target itself, without what a front end has put
    around it."""
    if isinstance(target, OpOverload):
        return function_of_operator(target)
    return getattr(target, "function", None) or getattr(target, "__wrapped__", target)


@dataclass
class Application:
    """One application of an autograd Function during an export, and the structures that its input
    and output tensors are in."""

    function: type
    inputs: Structure
    outputs: Structure | None = field(default=None, init=False)

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Uninitialised tensors like the outputs, from running the Function on fake tensors.

        Raises ``Refused`` if the Function writes to its inputs.
        """
        before = [writes_counted(tensor) for tensor in tensors]
        with WrittenMemory() as memory:
            outputs = self(*tensors)
        if (
            any(map(memory.has, tensors))
            or [writes_counted(tensor) for tensor in tensors] != before
        ):
            raise _lost(self.function, "writes to its inputs")
        # New tensors are made, since an operator must not return one of its inputs.
        return [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            for t in outputs
        ]

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """Apply the Function; gives the tensors among its results."""
        args, kwargs = self.inputs.fill(tensors)
        outputs, self.outputs = Structure.of(as_callable(self.function)(*args, **kwargs))
        return outputs

    def node(self, graph: fx.Graph, key: str, inputs: Sequence[fx.Node]) -> fx.Node:
        """A node of ``graph`` that applies the Function to ``inputs``."""

        def call(*tensors: Tensor) -> list[Tensor]:
            return self(*tensors)

        call.__name__, call.__module__ = self.function.__name__, self.function.__module__
        call.function = self.function  # type: ignore[attr-defined]
        return graph.call_function(call, tuple(inputs))


@contextmanager
def functions_called(calls: dict[str, whole.Opaque] | None) -> Iterator[list[type]]:
    """Yields the autograd Functions that a model applies during an export, in a list that grows.

    With ``calls`` each application becomes one operator, and is entered in ``calls`` under the
    operator's key. An application that cannot become one raises ``Refused``; the module that makes
    it is then kept whole.
    """
    called: list[type] = []
    is_within = False  # whether a Function runs now: those that it applies are part of its node

    def handle(function: type, args: Any, kwargs: Any) -> Any:
        nonlocal is_within
        if is_within or not torch.compiler.is_exporting():
            return NotImplemented  # the model is run outside of export too, to learn shapes
        called.append(function)
        if calls is None:
            return NotImplemented
        tensors, structure = Structure.of((args, kwargs))
        if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise _lost(function, "is given a size, or no tensor at all")
        if any(isinstance(each, nn.Module) for each in structure.constants()):
            raise _lost(function, "is given a module")
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
    """An error for a Function whose backward export would lose and which cannot be one node."""
    return Refused(
        f"{function.__name__} defines a backward, which export would lose, and cannot be one node "
        f"of the graph, since it {why}"
    )
