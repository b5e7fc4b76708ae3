"""What the forward of a module changes in the module itself, undone while it is run again.

::

    first call                          between                     second call
    the buffers that it writes to       written to                  copies, as before the first call
    the parameters that it writes to    written to                  copies, as before the first call
    attributes by which it computes     changed                     as before the first call

So a batch norm counts a batch once, though its forward runs twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from fxpipe.ir.tensors import memory_of
from fxpipe.runtime.state import STATEFUL, State
from fxpipe.runtime.writes import ChangedTensors, Writes

_NOTHING: AbstractContextManager[None] = nullcontext()
_stood_for: Any = WeakIdKeyDictionary()
"""By copies of buffers that second calls have used: the buffers themselves."""


class ModuleEffects:
    """What one call of a module changes in the module, read just before that call.

    Args:
        modules: the module, and all modules within it; none for a function that is no module.
        writes_again: the second call writes to the module's own buffers, as the first did.
    """

    def __init__(self, modules: Sequence[nn.Module], writes_again: bool = False) -> None:
        module = modules[0] if modules and not writes_again else None
        self._written = None if module is None else _WrittenState(module, modules)
        # Most models have no such module, and to look each module up takes longer.
        stateful = [each for each in modules if each in STATEFUL] if len(STATEFUL) else []
        self._state = State(stateful) if stateful else None

    def watched(self) -> AbstractContextManager[None]:
        """A context for the first call, which notices what the module writes to."""
        is_learning = self._written is not None and self._written.is_learning
        return self._written.watched() if is_learning else _NOTHING  # type: ignore[union-attr]

    def as_before(self) -> AbstractContextManager[None]:
        """A context for the second call, in which all of this is as it was before the first."""
        is_written = self._written is not None and self._written.has_copies
        return self._as_before() if is_written or self._state is not None else _NOTHING

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        with (
            self._written.as_before() if self._written is not None else _NOTHING,
            self._state.as_before() if self._state is not None else _NOTHING,
        ):
            yield

    @property
    def written_parameters(self) -> Sequence[Tensor]:
        """The parameters that the module writes to, once the first call has been made."""
        return () if self._written is None else self._written.own_parameters()

    @property
    def standing_in(self) -> set[int]:
        """The memory of the parameters' copies, during the second call."""
        return set() if self._written is None else self._written.standing_in


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

    def __init__(self, module: nn.Module, modules: Sequence[nn.Module]) -> None:
        self.module = module
        self.standing_in: set[int] = set()  # memory of parameters' copies in as_before()
        self.mode = tuple([each.training for each in modules])
        written = self._known.setdefault(module, {}).get(self.mode)
        known = None if written is None else written.settled()
        self.is_learning = known is None
        if known is None:
            buffers = module.named_buffers(remove_duplicate=False)
            known = [name for name, buffer in buffers if not is_lazy(buffer)], []
        names, parameters = known
        self.buffers = {n: module.get_buffer(n).detach().clone() for n in names}
        self.parameters = {n: module.get_parameter(n).detach().clone() for n in parameters}

    @property
    def has_copies(self) -> bool:
        """Whether there is anything that the module writes to."""
        return bool(self.buffers or self.parameters)

    def own_parameters(self) -> list[Tensor]:
        """The module's own parameters of which there are copies."""
        return [self.module.get_parameter(name) for name in self.parameters]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The first call is made within this context.

        A parameter is copied just before the first operator that writes to it. Buffers are copied
        beforehand, and copies of those that are known not to have changed are dropped.
        """

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
                _stood_for[home[key]] = buffer
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


def original(tensor: Tensor) -> Tensor:
    """The buffer for which a copy stood in a second call that has ended; any other tensor itself.

    A checkpoint within that second call has seen the copy. When it runs its own function again, in
    the backward, the module has its buffer back.
    """
    buffer: Tensor = _stood_for.get(tensor, tensor)
    return buffer


def _owner(module: nn.Module, name: str) -> tuple[dict[str, Tensor | None], str]:
    """The dictionary that holds a buffer, and the buffer's key in it."""
    path, _, key = name.rpartition(".")
    return module.get_submodule(path)._buffers, key
