"""Modules and parameters that a model computes with and that are none of its own: a module in a
plain list, say, which neither ``model.modules()`` nor ``model.parameters()`` has.

::

    self.heads = [nn.Linear(8, 3)]        forward: self.heads[0](x)

torch.export puts the data of such a parameter into the program, as a constant without a gradient.
In the model's graph it is the parameter itself, so that it is trained as in the model. It has no
name there: if it is replaced, or the module is set to eval mode, the graph is made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import PythonKeyTracer

from fxpipe.ir._torch import lost_tensors_as_constants
from fxpipe.ir.hooks import has_hooks
from fxpipe.ir.tensors import memory_of
from fxpipe.runtime.state import State
from fxpipe.trace.outer import Outside
from fxpipe.trace.patches import patched
from fxpipe.trace.snapshots import snapshot


def modules_around(model: nn.Module) -> dict[nn.Module, str]:
    """The modules beside a model's own that it may compute with, and words for each: those in its
    lists, dicts and objects, those in variables that its code reads, and all that are in these."""
    known, found, new = set(model.modules()), dict[nn.Module, str](), [model]
    while new:
        met = [each for part in new for each in (*State(part.modules()).met, *Outside(part).met)]
        new = []
        for module in dict.fromkeys(met):
            if isinstance(module, nn.Module) and module not in known:
                new.append(module)
                said = f"the {type(module).__name__} beside the model"
                for path, part in module.named_modules():
                    if part not in known:
                        found[part] = f"{path} of {said}" if path else said
                known.update(module.modules())
    return found


def paths_of(model: nn.Module) -> dict[nn.Module, str]:
    """The paths of a model's modules, and words for the modules around it."""
    return modules_around(model) | {module: name for name, module in model.named_modules()}


class Around:
    """The state of the modules around a model: their modes, and which modules, parameters and
    buffers they have."""

    def __init__(self, model: nn.Module) -> None:
        self._states = [(m, said, _state_of(m)) for m, said in modules_around(model).items()]

    def hold(self) -> bool:
        """Whether the modules around the model are as they were."""
        return all(_state_of(module) == state for module, _, state in self._states)

    def difference(self) -> str:
        """The first thing that has changed, in words; "" if nothing has."""
        for module, said, state in self._states:
            if (now := _state_of(module)) != state:
                if now[0] is not state[0]:
                    modes = {True: "train", False: "eval"}
                    return f"mode of {said}: {modes[state[0]]} → {modes[now[0]]}"
                return f"{said} has another module, parameter or buffer, or other hooks"
        return ""


def _state_of(module: nn.Module) -> tuple[bool, bool, list[Any]]:
    tables = [vars(module).get(name) for name in ("_modules", "_parameters", "_buffers")]
    own = [value for table in tables if isinstance(table, dict) for value in table.values()]
    return module.training, has_hooks(module), list(map(snapshot, own))


class MetParameters:
    """The parameters that an export has met and that the exported module does not have."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], nn.Parameter] = {}

    def add(self, parameter: nn.Parameter) -> None:
        """Note a parameter that the export has met."""
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
def constants_told(model: nn.Module) -> Iterator[MetParameters]:
    """Gives the parameters that torch.export makes constants of inside the ``with`` block; it also
    makes constants of tensors that it has lost track of (:func:`lost_tensors_as_constants`).

    ``model``: the model whose twin is exported. A parameter of its own is not told: the twin should
    have another one in its place (:mod:`fxpipe.trace.leaked`).
    """
    found, own = MetParameters(), {id(parameter) for parameter in model.parameters()}

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_arg(tracer: Any, value: Any) -> Any:
            if isinstance(value, nn.Parameter) and id(value) not in own:
                found.add(value)
            return original(tracer, value)

        return create_arg

    with lost_tensors_as_constants(), patched(PythonKeyTracer, "create_arg", replace):
        yield found
