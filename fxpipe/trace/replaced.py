"""What a forward does to the tensors of a model themselves, and not to their values.

::

    self.weight.data = renorm(self.weight)      another memory for the same parameter
    self.key.weight = nn.Parameter(...)         another parameter in its place
    self.backbone.requires_grad_(False)         a flag, which decides what gets a gradient

No operator does this, so that no graph has it: a pipeline would go on with what the first call has
found. Writes in place are operators, and assignments to buffers become writes in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fxpipe.ir.errors import TraceError

FLAG = "sets requires_grad of"
IN_PLACE = (
    "; a tensor that is not trained may be written to in place: copy_(...) under torch.no_grad()"
)


@dataclass(frozen=True)
class _OneTensor:
    """A tensor that a module holds, as it was: ``alias`` has its memory."""

    module: nn.Module
    name: str
    is_parameter: bool
    tensor: Tensor
    alias: Tensor
    requires_grad: bool

    @property
    def has_other_memory(self) -> bool:
        # One that a trace has put there has none, and must not be asked for its address.
        return self.tensor.is_meta or self.tensor.data_ptr() != self.alias.data_ptr()

    @property
    def has_another_flag(self) -> bool:
        return self.tensor.requires_grad != self.requires_grad

    @property
    def is_another(self) -> bool:
        """Whether the module has another parameter of this name by now."""
        return self.is_parameter and self.module._parameters.get(self.name) is not self.tensor

    def put_back(self) -> None:
        if self.has_other_memory:
            self.tensor.data = self.alias
        if self.has_another_flag:
            self.tensor.requires_grad_(self.requires_grad)


class Held:
    """The tensors that modules hold, as they are now: parameters, buffers, and those of other
    attributes. Tensors without memory of their own ("meta", and those of traces) do not count."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._all = [
            _OneTensor(
                module, name, held is parameters, tensor, tensor.detach(), tensor.requires_grad
            )
            for module in modules
            if not isinstance(module, torch.jit.ScriptModule)  # it has other containers
            for parameters in (module._parameters,)
            for held in (parameters, module._buffers, vars(module))
            for name, tensor in held.items()
            if isinstance(tensor, Tensor) and _has_memory(tensor)
        ]

    def replaced(self) -> list[tuple[nn.Module, str, str]]:
        """What has been done to these tensors since: the module, the name of the tensor, and what
        the module has done to it."""
        found = []
        for each in self._all:
            if each.is_another:
                found.append((each.module, each.name, "puts another parameter in place of"))
            elif each.has_other_memory:
                found.append((each.module, each.name, "assigns to the data of"))
            elif each.has_another_flag:
                found.append((each.module, each.name, FLAG))
        return found

    def put_back(self) -> None:
        """Give the tensors their memory and their flags again."""
        with torch.no_grad():
            for each in self._all:
                each.put_back()


def _has_memory(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    return is_plain and not tensor.is_meta and tensor.layout == torch.strided


def refuse_replaced(model: nn.Module, replaced: Iterable[tuple[nn.Module, str, str]]) -> None:
    """Raise TraceError if a forward of a model has done something to a tensor itself."""
    names = {module: name for name, module in model.named_modules()}
    for module, name, does in replaced:
        path = f"{names.get(module, type(module).__name__)}.{name}".removeprefix(".")
        otherwise = "" if does is FLAG else IN_PLACE
        raise TraceError(
            f"{type(model).__name__} {does} {path} in its forward, which no graph has: a pipeline "
            "would not do it. Do it outside of the forward, ahead of a call or after the step of "
            "the optimizer; if only the first call does it, call the model once ahead of "
            f"fxpipe.compile{otherwise}"
        )
