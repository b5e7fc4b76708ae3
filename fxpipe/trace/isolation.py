"""Running a model without a trace: what it changes is put back, and its hooks are not called."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe import skip
from fxpipe.ir._torch import gradient_hooks
from fxpipe.ir.hooks import hooks_of, is_torchs, records
from fxpipe.runtime.random import RandomState
from fxpipe.runtime.state import State
from fxpipe.runtime.writes import Writes, same_values
from fxpipe.trace.errors import at, is_model_line, since

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_NOTHING: dict[Any, Any] = {}


class _Here(threading.local):
    models: frozenset[nn.Module] | set[nn.Module] = frozenset()  # that this thread is running so


_here = _Here()


@dataclass(frozen=True)
class Since:
    """What has been done to a model since a run of it began."""

    _random: RandomState
    _python: Any  # the state of the module ``random``
    _state: State

    def drew_random_numbers(self) -> bool:
        """Whether random numbers have been drawn."""
        return self._random.has_changed or random.getstate() != self._python

    def changed(self) -> list[tuple[nn.Module, str]]:
        """The attributes of modules that have changed, or whose contents have."""
        return self._state.changed()


@contextmanager
def untouched(model: nn.Module) -> Iterator[Since]:
    """Run or trace the model without a trace: attributes and what is in them, buffers, gradients
    and random states are put back, and hooks are not called, other than PyTorch's own (old
    parametrizations, which make weights) and those that record what the model gives.
    """
    contents = State(model.modules())
    attributes: list[dict[Any, Any]] = [vars(module) for module in model.modules()]
    attributes += [d for owner in attributes for d in owner.values() if isinstance(d, dict)]
    on_parameters = [hooks for p in model.parameters() for hooks in _hooks_on(p)]
    attributes += on_parameters
    # Most are empty, and so many dicts more would keep the garbage collector busy.
    saved_attributes = [(owner, dict(owner) if owner else _NOTHING) for owner in attributes]
    tensors = [
        value
        for owner in attributes
        for value in owner.values()
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.is_meta
    ]
    saved_tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]
    gradients = [(p, p.grad) for p in model.parameters()]
    own = (*model.parameters(), *tensors)
    state, python_state = RandomState({t.device for t in own}), random.getstate()
    outer = _here.models
    try:
        _here.models = {*outer, model}
        # Within another run, the hooks that are there are the model's: its forward has put them.
        for hooks in () if model in outer else on_parameters:
            hooks.clear()
        for module in () if model in outer else model.modules():
            for hooks in hooks_of(module):
                for key, hook in list(hooks.items()):
                    if not is_torchs(hook) and (module is model or not records(model, hook)):
                        del hooks[key]
        for parameter, _ in gradients:  # a backward of the model's own may add to them
            parameter.grad = None
        with _eagerly():
            yield Since(state, python_state, contents)
    finally:
        _here.models = outer
        contents.put_back()
        for owner, saved in saved_attributes:
            if owner.keys() != saved.keys() or any(owner[k] is not saved[k] for k in saved):
                owner.clear()
                owner.update(saved)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for tensor, value in saved_tensors:
                # A write makes a backward fail that has the buffer saved: none without need.
                if not same_values(tensor, value):
                    tensor.copy_(value)
        state.put_back()
        random.setstate(python_state)


def _eagerly() -> AbstractContextManager[Any]:
    """With what is given to ``torch.compile`` run as it is: a trace cannot see into it otherwise,
    and it does not always run while we watch."""
    if "torch._dynamo" not in sys.modules:  # whose import takes long
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _hooks_on(parameter: nn.Parameter) -> list[dict[int, Any]]:
    """Those on its gradient, and those for when it has been added."""
    kinds: Any = gradient_hooks(parameter)
    return [hooks for hooks in kinds if hooks]


@contextmanager
def on_one_device(model: nn.Module, device: torch.device) -> Iterator[None]:
    """All of a model on one device meanwhile; then each tensor has the very memory that it had.

    A model whose stages have been placed runs nowhere as it is. While this lasts the device has to
    have room for all of it.
    """
    own = (*model.parameters(), *model.buffers())
    before = [(t, t.data) for t in own if t.device != device and not t.is_meta]
    try:
        try:
            for tensor, data in before:
                tensor.data = data.to(device)
        except torch.OutOfMemoryError as error:
            error.add_note(
                f"to be traced for another kind of call the model has to be on {device}, that of "
                "the inputs, as a whole: make this call first with inputs on the CPU"
            )
            raise
        yield
    finally:
        for tensor, data in before:
            tensor.data = data


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """All its modules are in evaluation mode meanwhile."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[list[Any]]:
    """Where a traced model puts another tensor in the place of a buffer, ``self.mean = new``, the
    buffer is written to instead, at the end: a graph cannot exchange tensors of a model.

    Yields what these writes give, once they are made.
    """
    written: list[Any] = []
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    before = [(m, name, b) for m in modules for name, b in m._buffers.items()]
    yield written
    for module, name, buffer in before:
        new = module._buffers.get(name)
        if new is not buffer and new is not None and buffer is not None:
            module._buffers[name] = buffer
            written.append(getattr(module, name).copy_(new.detach()))


def called(model: nn.Module, args: Args, kwargs: Kwargs) -> Any:
    """The model's output."""
    with skip.tracking(model):
        return model(*args, **kwargs)


@contextmanager
def parameters_put_back(model: nn.Module) -> Iterator[dict[str, Write]]:
    """Yields the first write to each parameter that gets written to, by its name, and puts back
    what was there."""
    saved: dict[str, Write] = {}

    def save(name: str, parameter: Tensor) -> None:
        frames = [f for f in since(called) if is_model_line(f)]
        where = at(frames[-1]) if frames else "a module of PyTorch"
        saved[name] = Write(parameter.detach().clone(), where)

    try:
        with Writes(dict(model.named_parameters()), save):
            yield saved
    finally:
        for name, write in saved.items():
            model.get_parameter(name).data.copy_(write.before)


@dataclass(frozen=True)
class Write:
    """What a parameter was ahead of the first write to it."""

    before: Tensor
    where: str  # the line
