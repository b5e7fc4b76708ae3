"""Values for tensors that no checkpoint has: those of a new model, and buffers that a module does
not save.

Nothing is guessed of what a tensor should hold. It is asked of the modules themselves, by the
conventions that there are, and a tensor that they have not written to is refused by name:

1. ``_init_weights(module)`` of a module around it, as models of Hugging Face and of timm have it;
2. ``reset_parameters()`` of the module, as those of PyTorch have it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir._torch import RESETS
from fxpipe.loading.storage import Storage, tensors_of

Init = Callable[[nn.Module], object]
"""A function that sets the parameters and buffers of one module, its children's not included: what
``nn.Module.apply`` takes."""


def initialised(
    model: nn.Module, tensors: Mapping[str, Tensor], memory: Storage, init: Init | None
) -> list[str]:
    """Give memory and values to these tensors of a model, which are on "meta".

    Args:
        init: sets the tensors of a module; None: the modules' own means.

    Returns:
        The names of those that have not been written to.
    """
    memory.give(tensors)
    for path, own in _by_module(tensors).items():
        module = model.get_submodule(path)
        made = set(map(id, own.values()))
        with torch.no_grad():
            known = {
                name: value.clone()
                for name, value in tensors_of(module)
                if id(value) not in made and not value.is_meta
            }
            for means in _means(model, path) if init is None else iter((init,)):
                means(module)
                for name, tensor in own.items():
                    _keep(module, name, tensor)
                if all(map(memory.is_written, own.values())):
                    break
            for name, tensor in tensors_of(module):
                if name in known:  # it had its values already
                    tensor.copy_(known[name])
    return [name for name, tensor in tensors.items() if not memory.is_written(tensor)]


def _by_module(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        path, _, last = name.rpartition(".")
        found.setdefault(path, {})[last] = tensor
    return found


def _means(model: nn.Module, path: str) -> Iterator[Init]:
    """The means of a model to initialise the module at a path, the likeliest first."""
    module = model.get_submodule(path)
    for around in _modules_around(model, path):
        method = getattr(around, "_init_weights", None)
        if callable(method) and _takes_a_module(method):
            yield method
            break
    for name in RESETS:
        method = getattr(module, name, None)
        if callable(method):
            yield partial(_reset, method)


def _reset(method: Callable[[], object], module: nn.Module) -> None:
    method()


def _modules_around(model: nn.Module, path: str) -> Iterator[nn.Module]:
    """The module at a path and those around it, the innermost first."""
    while path:
        yield model.get_submodule(path)
        path = path.rpartition(".")[0]
    yield model


def _takes_a_module(method: Callable[..., Any]) -> bool:
    try:
        inspect.signature(method).bind(nn.Module())
    except (TypeError, ValueError):
        return False
    return True


def _keep(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Where a new tensor has been assigned to a module, copy its values into the tensor that was
    there, which others may hold, and put that back."""
    now = dict(tensors_of(module)).get(name)
    if now is None or now is tensor or now.is_meta or now.shape != tensor.shape:
        return
    tensor.copy_(now)
    kinds: list[dict[str, Any]] = [module._parameters, module._buffers, vars(module)]
    for own in kinds:
        if name in own:
            own[name] = tensor
