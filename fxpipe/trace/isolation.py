"""Running a model without side effects: whatever the run changes on the model is put back after it,
and the user's hooks are not called."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe import skip
from fxpipe.ir._torch import gradient_hooks
from fxpipe.ir.hooks import hooks_of, is_torchs, records
from fxpipe.ir.progress import phase
from fxpipe.runtime.random import HostRandomState, RandomState
from fxpipe.runtime.state import State, same_entries
from fxpipe.runtime.writes import Writes, same_values
from fxpipe.trace.errors import at, is_model_line, since
from fxpipe.trace.outer import OuterVariable, Outside
from fxpipe.trace.replaced import Held
from fxpipe.trace.spread import devices_used

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

MODE = "training"
"""The attribute of a module that tells its mode, train or eval."""

_NOTHING: dict[Any, Any] = {}


class _NowUntouched(threading.local):
    """The models for which this thread is inside a block of :func:`untouched`."""

    models: frozenset[nn.Module] | set[nn.Module] = frozenset()


_here = _NowUntouched()


@dataclass(frozen=True)
class Since:
    """Tells what a model has done since the block of :func:`untouched` began."""

    _random: RandomState
    _host: HostRandomState
    _state: State
    _tensors: list[tuple[Tensor, Tensor]]  # the modules' tensors, without parameters, and copies
    _outside: Outside
    _held: Held
    _modes: list[tuple[nn.Module, bool]]

    def drew_random_numbers(self) -> bool:
        """Whether random numbers have been drawn since then."""
        return self.drew_with_torch() or self.drew_on_the_host()

    def drew_with_torch(self) -> bool:
        """Whether random numbers of PyTorch's generators have been drawn since then."""
        return self._random.has_changed

    def drew_on_the_host(self) -> bool:
        """Whether random numbers of Python's or NumPy's generator have been drawn since then."""
        return self._host.has_changed

    def changed(self) -> list[tuple[nn.Module, str]]:
        """The attributes of modules that have been assigned anew, or whose contents have changed,
        since then."""
        return self._state.changed()

    def modes_changed(self) -> list[tuple[nn.Module, str]]:
        """The modules that are in another mode by now, train or eval: each with the attribute."""
        return [(each, MODE) for each, training in self._modes if each.training is not training]

    def changed_outside(self) -> list[str]:
        """The containers outside of modules into which tensors have been put since then."""
        return self._outside.changed()

    def assigned(self) -> list[OuterVariable]:
        """The variables outside of modules that have got other values since then."""
        return self._outside.assigned()

    def replaced(self) -> list[tuple[nn.Module, str, str]]:
        """What the model has done to its tensors themselves since then
        (:mod:`fxpipe.trace.replaced`)."""
        return self._held.replaced()

    def written(self) -> list[Tensor]:
        """The buffers, and tensors in attributes of modules, whose values have changed since
        then."""
        return [tensor for tensor, before in self._tensors if not same_values(tensor, before)]


@contextmanager
def untouched(model: nn.Module, *, but: frozenset[nn.Module] = frozenset()) -> Iterator[Since]:
    """Make runs and traces of a model inside the ``with`` block free of side effects.

    At the end of the block the modules' attributes and what they contain, the values of buffers,
    the gradients and the states of the random number generators are put back, and what functions
    of the model keep outside of it (:mod:`fxpipe.trace.outer`). Inside the block the user's hooks
    are not called, except those that record outputs of modules for the model's own output.
    PyTorch's hooks are called: that of the older ``weight_norm`` computes a weight. The same holds
    for modules that the model has in a list, or reads from a global variable, say.

    Yields an object that tells what the model has done inside the block so far.

    Args:
        but: modules that are not looked after, as an outer block does so.
    """
    modules, parameters = list(model.modules()), list(model.parameters())
    contents, outside, held = State(modules), Outside(model), Held(modules)
    modes = [(each, each.training) for each in modules]
    around = dict.fromkeys([*contents.met, *outside.met])
    known = but.union(modules)
    others = [each for each in around if isinstance(each, nn.Module) and each not in known]
    of_others = [each for each in around if isinstance(each, nn.Parameter)]
    attributes: list[dict[Any, Any]] = [vars(module) for module in modules]
    attributes += [d for owner in attributes for d in owner.values() if isinstance(d, dict)]
    on_parameters = [hooks for p in parameters for hooks in _hooks_on(p)]
    attributes += on_parameters
    # Most of these dictionaries are empty. They share one empty copy, as copying every one of them
    # would keep the garbage collector busy.
    saved_attributes = [(owner, dict(owner) if owner else _NOTHING) for owner in attributes]
    tensors = [
        value
        for value in _tensors([value for owner in attributes for value in owner.values()])
        if not isinstance(value, nn.Parameter) and not value.is_meta
    ]
    saved_tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]
    trained = [tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad]
    leaves = dict.fromkeys((*parameters, *trained, *of_others))
    gradients = [(leaf, leaf.grad) for leaf in leaves]
    devices = devices_used((*parameters, *tensors))
    state, host = RandomState(devices), HostRandomState()
    outer = _here.models
    try:
        _here.models = {*outer, model}
        # In a nested block no hooks are removed: those that are there now have been registered by
        # the forward of the model, in the outer block.
        for hooks in () if model in outer else on_parameters:
            hooks.clear()
        for module in () if model in outer else modules:
            for hooks in hooks_of(module):
                for key, hook in list(hooks.items()):
                    if not is_torchs(hook) and (module is model or not records(model, hook)):
                        del hooks[key]
        for leaf, _ in gradients:  # a forward that runs a backward may add to gradients
            leaf.grad = None
        with _eagerly(), ExitStack() as stack:
            for other in others:
                stack.enter_context(untouched(other, but=known))
            yield Since(state, host, contents, saved_tensors, outside, held, modes)
    finally:
        _here.models = outer
        held.put_back()  # first: of a tensor that a trace has changed, the values are read below
        contents.put_back()
        outside.put_back()
        for owner, saved in saved_attributes:
            if not same_entries(owner, saved):
                owner.clear()
                owner.update(saved)
        for leaf, gradient in gradients:
            leaf.grad = gradient
        with torch.no_grad():
            for tensor, value in saved_tensors:
                # If autograd has saved a buffer for a backward, any later write to the buffer makes
                # that backward an error: so only buffers whose values have changed are written to.
                if not same_values(tensor, value):
                    tensor.copy_(value)
        state.put_back()
        host.put_back()


def _tensors(values: list[Any]) -> list[Tensor]:
    """The tensors among many values, nearly all of which are none: each type is looked at once."""
    kinds = {kind for kind in set(map(type, values)) if issubclass(kind, Tensor)}
    return [value for value in values if type(value) in kinds]


def _eagerly() -> AbstractContextManager[Any]:
    """A context in which functions compiled by ``torch.compile`` run as plain Python.

    A trace cannot look into compiled code, and compiled code does not run the Python lines that the
    patches of this package watch.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; the import would take long
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _hooks_on(parameter: nn.Parameter) -> list[dict[int, Any]]:
    """The dictionaries of hooks on a parameter's gradient, those that are not empty: hooks that are
    called with the gradient, and hooks that are called once the gradient has been accumulated."""
    kinds: Any = gradient_hooks(parameter)
    return [hooks for hooks in kinds if hooks]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside the ``with`` block all modules of a model are in evaluation mode."""
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
    """Turn assignments to buffers into writes: where the forward has assigned ``self.mean = new``,
    the old buffer is put back at the end of the block, and ``new`` is copied into it.

    A graph can write to a model's tensor, but it cannot put another tensor in its place.

    Yields a list that is empty inside the block; at its end it gets the results of the writes.
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
    """Call a model and return its output. ``fxpipe.skip`` learns which module is running, and
    context variables that the model sets are set during this call only."""
    with skip.tracking(model), phase("model", quiet=True):
        return copy_context().run(model, *args, **kwargs)


@contextmanager
def parameters_put_back(model: nn.Module) -> Iterator[dict[str, Write]]:
    """Put back the values of parameters that the model writes to inside the ``with`` block.

    Yields the first write to each such parameter by its name, in a dictionary that grows.
    """
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
    """The first write to a parameter: the values before it, and the line of code that writes."""

    before: Tensor
    where: str  # "file:line: code", or "a module of PyTorch"
