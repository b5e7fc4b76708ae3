"""What a call depends on besides its arguments, kept so that the call can be repeated.

::

    first call                          between                     second call
    grad mode, autocast                 others                      the first call's
    default device, function modes      others                      the first call's
    context variables                   set by others               the first call's
    random numbers                      drawn by others             the same again
    the module's tensors                exchanged, or lent back     those of the first call
    what it changes in the module       changed                     as before the first call

So the second call computes what the first did, and leaves nothing behind. What a call changes in
its module is in :mod:`fxpipe.runtime.checkpointing.module_effects`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir._torch import EnableTorchFunction, asks_torch_function
from fxpipe.ir.tensors import memory_of
from fxpipe.runtime.ambient import Ambient
from fxpipe.runtime.checkpointing.module_effects import ModuleEffects, original
from fxpipe.runtime.random import RandomState


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
        modules = [] if module is None else list(module.modules())
        self._tensors = _FirstTensors(modules)
        parameters = self._tensors.parameters
        self._memories = {memory_of(p) for p in parameters}
        devices = {t.device for t in (*tensors, *parameters)}
        self._random = RandomState(devices) if preserve_rng_state else None
        self._effects = ModuleEffects(modules, writes_again)

    def watched(self) -> AbstractContextManager[None]:
        """A context for the first call, which notices what the module writes to."""
        return self._effects.watched()

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """A context for the second call, in which everything is as it was before the first call."""
        with (
            self._tensors.as_before(),
            self._effects.as_before(),
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
        return memory in self._memories or memory in self._effects.standing_in


class _FirstTensors:
    """The parameters and buffers that a module had in the first call.

    The second call may find others in their places: ``torch.func.functional_call`` gives a module
    other tensors for one call only.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.parameters = [p for m in modules for p in m._parameters.values() if p is not None]
        open_ones = [m for m in modules if not isinstance(m, torch.jit.ScriptModule)]
        owners: list[dict[str, Any]] = [m._parameters for m in open_ones]
        owners += [m._buffers for m in open_ones]
        self.places = [(owner, key, tensor) for owner in owners for key, tensor in owner.items()]

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Within this context the module has the tensors of the first call."""
        exchanged = [
            (owner, key, owner[key], original(tensor))
            for owner, key, tensor in self.places
            if owner.get(key, tensor) is not tensor and owner[key] is not original(tensor)
        ]
        try:
            for owner, key, _, tensor in exchanged:
                owner[key] = tensor
            yield
        finally:
            for owner, key, now, _ in exchanged:
                owner[key] = now


def module_of(fn: Callable[..., Any]) -> nn.Module | None:
    """The module that a call of ``fn`` runs: ``fn`` itself, or the module whose method it is, also
    within a ``functools.partial``. None if it is neither."""
    while isinstance(fn, partial):
        fn = fn.func
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None
