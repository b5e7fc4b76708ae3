"""What a call depends on besides its arguments, kept so that the call can be repeated.

::

    first call                          between                     second call
    grad mode, autocast                 others                      the first call's
    default device, function modes      others                      the first call's
    context variables                   set by others               the first call's
    random numbers                      drawn by others             the same again
    the module's tensors                exchanged, or lent back     those of the first call
    what the module writes to           written to                  copies, as before the first call
    what it computes by and changes     changed                     as before the first call

So the second call computes what the first did, and leaves nothing behind: a batch norm counts a
batch once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from fxpipe.ir._torch import EnableTorchFunction, asks_torch_function
from fxpipe.ir.tensors import memory_of
from fxpipe.runtime.ambient import Ambient
from fxpipe.runtime.random import RandomState
from fxpipe.runtime.state import STATEFUL, State
from fxpipe.runtime.writes import ChangedTensors, Writes


class Surroundings:
    """Reads, just before ``fn`` is called, all that the call depends on besides its arguments.

    Args:
        fn: a function, a module, or a method of one.
        tensors: its arguments, whose devices are asked for their random states.
        preserve_rng_state: the second call sees the random numbers of the first.
        writes_again: the second call writes to the module's own buffers, as the first did.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        tensors: Sequence[Tensor],
        preserve_rng_state: bool,
        writes_again: bool = False,
    ) -> None:
        # Without autocast's cache: parameters that the second call casts would stay in it.
        self._ambient = replace(Ambient.here(), autocast_cache=False)
        self._asks_subclasses = asks_torch_function()
        self._context = copy_context()
        module = module_of(fn)
        self._tensors = _FirstTensors(module)
        parameters = self._tensors.parameters
        self._memories = {memory_of(p) for p in parameters}
        devices = {t.device for t in (*tensors, *parameters)}
        self._random = RandomState(devices) if preserve_rng_state else None
        self._written = _WrittenState(None if writes_again else module)
        modules = () if module is None else module.modules()
        self._state = State([each for each in modules if each in STATEFUL])

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The first call is made within this context, which notices what the module writes to."""
        with self._written.watched():
            yield

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """A context for the second call, in which everything is as it was before the first call."""
        with (
            self._tensors.as_before(),
            self._written.as_before(),
            self._state.as_before(),
            self._random.restored() if self._random else nullcontext(),
            self._ambient.applied(),
            # The backward of a tensor subclass may run with ``__torch_function__`` disabled.
            EnableTorchFunction() if self._asks_subclasses else nullcontext(),
        ):
            yield

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function with the context variables (``contextvars``) of the first call.

        The function runs in a copy of that context, so a variable that it sets is not changed for
        anybody else.
        """
        return self._context.copy().run(fn, *args, **kwargs)

    def has_parameter(self, tensor: Tensor) -> bool:
        """Whether the tensor is one of the module's parameters, or a view of one."""
        memory = memory_of(tensor)
        return memory in self._memories or memory in self._written.standing_in


class _FirstTensors:
    """The parameters and buffers that a module had in the first call.

    The second call may find others in their places: ``torch.func.functional_call`` gives a module
    other tensors for one call only.
    """

    def __init__(self, module: nn.Module | None) -> None:
        modules = [] if module is None else list(module.modules())
        self.parameters = [p for m in modules for p in m._parameters.values() if p is not None]
        open_ones = [m for m in modules if not isinstance(m, torch.jit.ScriptModule)]
        owners: list[dict[str, Any]] = [m._parameters for m in open_ones]
        owners += [m._buffers for m in open_ones]
        self.places = [(owner, key, tensor) for owner in owners for key, tensor in owner.items()]

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Within this context the module has the tensors of the first call."""
        exchanged = [
            (owner, key, owner[key], tensor)
            for owner, key, tensor in self.places
            if owner.get(key, tensor) is not tensor
        ]
        try:
            for owner, key, _, tensor in exchanged:
                owner[key] = tensor
            yield
        finally:
            for owner, key, now, _ in exchanged:
                owner[key] = now


class _WrittenState:
    """Copies of the buffers and parameters that a module writes to, made before the first call.

    In the second call the module writes to copies: a batch norm must not count a batch twice, and a
    module that reads a buffer must read the same value again. The first call in each mode (training
    or not, of each submodule) notices which tensors are written to; their names are remembered.
    An accelerator says which buffers have changed only once it has done that call: until then every
    call keeps copies of all buffers.
    """

    # By identity: a module may define equality, and have no hash then.
    _known: ClassVar[Any] = WeakIdKeyDictionary()

    def __init__(self, module: nn.Module | None) -> None:
        self.module = module
        self.buffers: dict[str, Tensor] = {}
        self.parameters: dict[str, Tensor] = {}
        self.standing_in: set[int] = set()  # memory of parameters' copies in as_before()
        if self.module is None:
            return
        self.mode = tuple(module.training for module in self.module.modules())
        written = self._known.setdefault(self.module, {}).get(self.mode)
        known = None if written is None else written.settled()
        self.learning = known is None
        if known is None:
            buffers = self.module.named_buffers(remove_duplicate=False)
            known = [name for name, buffer in buffers if not is_lazy(buffer)], []
        names, parameters = known
        self.buffers = {n: self.module.get_buffer(n).detach().clone() for n in names}
        self.parameters = {n: self.module.get_parameter(n).detach().clone() for n in parameters}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The first call is made within this context.

        A parameter is copied just before the first operator that writes to it. Buffers are copied
        beforehand, and copies of those that are known not to have changed are dropped.
        """
        if self.module is None or not self.learning:
            yield
            return

        def save(name: str, parameter: Tensor) -> None:
            self.parameters[name] = parameter.detach().clone()

        tensors = (*self.module.parameters(), *self.module.buffers())
        was_lazy = any(is_lazy(tensor) for tensor in tensors)
        with Writes(dict(self.module.named_parameters()), save):
            yield
        now = self.module.get_buffer
        comparison = ChangedTensors({name: (now(name), old) for name, old in self.buffers.items()})
        changed = comparison.changed()
        if changed is not None:
            self.buffers = {name: self.buffers[name] for name in changed}
        if not was_lazy:  # a lazy module has made tensors in this call, which were not watched
            written = _Written(comparison, [*self.parameters])
            self._known[self.module].setdefault(self.mode, written)

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Within this context the module has copies of these tensors, with the values that they had
        before the first call."""
        if self.module is None:
            yield
            return
        homes = [(*_owner(self.module, name), old) for name, old in self.buffers.items()]
        buffers = [home[key] for home, key, _ in homes]
        parameters = [(self.module.get_parameter(n), old) for n, old in self.parameters.items()]
        data = [parameter.data for parameter, _ in parameters]
        try:
            for home, key, old in homes:
                home[key] = old.clone()
            for parameter, old in parameters:
                parameter.data = old.clone()
            self.standing_in = {memory_of(p) for p, _ in parameters}
            yield
        finally:
            self.standing_in = set()
            for (home, key, _), buffer in zip(homes, buffers, strict=True):
                home[key] = buffer
            for (parameter, _), now in zip(parameters, data, strict=True):
                parameter.data = now


@dataclass(frozen=True)
class _Written:
    """The buffers and parameters that a module writes to, as its first call has shown."""

    buffers: ChangedTensors[str]
    parameters: list[str]

    def settled(self) -> tuple[list[str], list[str]] | None:
        """Their names; None as long as an accelerator has not compared the buffers."""
        changed = self.buffers.changed()
        return None if changed is None else (changed, self.parameters)


def _owner(module: nn.Module, name: str) -> tuple[dict[str, Tensor | None], str]:
    """The dictionary that holds a buffer, and the buffer's key in it."""
    path, _, key = name.rpartition(".")
    return module.get_submodule(path)._buffers, key


def module_of(fn: Callable[..., Any]) -> nn.Module | None:
    """The module that a call of ``fn`` runs: ``fn`` itself, or the module whose method it is, also
    within a ``functools.partial``. None if it is neither."""
    while isinstance(fn, partial):
        fn = fn.func
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None
