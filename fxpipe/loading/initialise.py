"""Values for tensors that no checkpoint has: all tensors of a new model, and buffers that a module
does not save.

The compiler guesses no value. The model's own methods set the values, by two conventions, and a
tensor that they have not written to is refused by name:

1. ``_init_weights(module)`` of a module around it, as in models of Hugging Face and of timm;
2. ``reset_parameters()`` of the module itself, as in modules of PyTorch.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir._torch import RESETS
from fxpipe.loading.storage import Storage, tensors_of

Init = Callable[[nn.Module], object]
"""A function that sets the parameters and buffers of one module, without those of its children, as
``nn.Module.apply`` takes it."""


def initialised(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    memory: Storage,
    init: Init | None,
    seed: int | None = None,
) -> list[str]:
    """Give memory and values to tensors of a model that are on "meta".

    Args:
        tensors: the tensors, by their names in the model.
        memory: gives the memory, and knows which tensors have been written to.
        init: a function that sets the tensors of a module. None: the model's own methods do.
        seed: the random numbers of each module depend on this seed and on the module's name only,
            so that they are the same whichever process initialises which modules. None: they are
            drawn from the default generator, one module after the other.

    Returns:
        The names of the tensors to which nothing has been written.
    """
    memory.give(tensors)
    for path, own in _by_module(tensors).items():
        module = model.get_submodule(path)
        made = set(map(id, own.values()))
        with torch.no_grad(), _seeded(seed, path):
            known = {
                name: value.clone()
                for name, value in tensors_of(module)
                if id(value) not in made and not value.is_meta
            }
            for initialise in _initialisers(model, path) if init is None else iter((init,)):
                initialise(module)
                for name, tensor in own.items():
                    _keep(module, name, tensor)
                if all(map(memory.is_written, own.values())):
                    break
            for name, tensor in tensors_of(module):
                if name in known:  # it had values before, which the methods may have replaced
                    tensor.copy_(known[name])
    return [name for name, tensor in tensors.items() if not memory.is_written(tensor)]


@contextmanager
def _seeded(seed: int | None, path: str) -> Iterator[None]:
    """A context in which random numbers depend on the seed and the path of a module, if there is a
    seed; after it the default generators are as they were before."""
    if seed is None:
        yield
        return
    digest = hashlib.sha256(f"{seed} {path}".encode()).digest()
    with torch.random.fork_rng(device_type=_accelerator()):
        torch.manual_seed(int.from_bytes(digest[:8], "big"))
        yield


def _accelerator() -> str:
    """The type of the accelerator whose generators are saved beside the CPU's; "cuda", of which
    there may be none, where there is no accelerator."""
    device = torch.accelerator.current_accelerator()
    return "cuda" if device is None else device.type


def _by_module(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        path, _, last = name.rpartition(".")
        found.setdefault(path, {})[last] = tensor
    return found


def _initialisers(model: nn.Module, path: str) -> Iterator[Init]:
    """The model's methods that may initialise the module at a path, the likeliest first."""
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
    """The module at a path and the modules that contain it, the innermost first."""
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
    """If a method has assigned a new tensor to an attribute, copy its values into ``tensor``, which
    was there before, and put ``tensor`` back: an optimizer or another module may hold it."""
    now = dict(tensors_of(module)).get(name)
    if now is None or now is tensor or now.is_meta or now.shape != tensor.shape:
        return
    tensor.copy_(now)
    kinds: list[dict[str, Any]] = [module._parameters, module._buffers, vars(module)]
    for own in kinds:
        if name in own:
            own[name] = tensor
