"""Parameters that a model computes with and that are none of its own: those of a module in a plain
list, say, which ``model.parameters()`` does not have.

::

    self.heads = [nn.Linear(8, 3)]        forward: self.heads[0](x)

torch.export puts the data of such a parameter into the program, as a constant without a gradient.
In the model's graph it is the parameter itself, so that it is trained as in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import PythonKeyTracer

from fxpipe.ir._torch import lost_tensors_as_constants
from fxpipe.ir.tensors import memory_of
from fxpipe.trace.patches import patched


class MetParameters:
    """The parameters that an export has met and that the exported module does not have."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], nn.Parameter] = {}

    def add(self, parameter: nn.Parameter) -> None:
        """Note a parameter."""
        if parameter.layout == torch.strided:
            self._found[_view_of_memory(parameter)] = parameter

    def of(self, constant: Any) -> Any:
        """The parameter whose data a constant of the program is; other values as they are."""
        if not (self._found and isinstance(constant, Tensor)) or constant.layout != torch.strided:
            return constant
        return self._found.get(_view_of_memory(constant), constant)


def _view_of_memory(tensor: Tensor) -> tuple[Any, ...]:
    where = tensor.storage_offset(), tensor.stride()
    return memory_of(tensor), tensor.shape, tensor.dtype, *where


@contextmanager
def constants_told() -> Iterator[MetParameters]:
    """Gives the parameters that torch.export makes constants of inside the ``with`` block; it also
    makes constants of tensors that it has lost track of (:func:`lost_tensors_as_constants`)."""
    found = MetParameters()

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_arg(tracer: Any, value: Any) -> Any:
            if isinstance(value, nn.Parameter):
                found.add(value)
            return original(tracer, value)

        return create_arg

    with lost_tensors_as_constants(), patched(PythonKeyTracer, "create_arg", replace):
        yield found
