"""What the forward of a module changes in the module itself, undone while it is run again.

::

    first call                          between                     second call
    the buffers that it writes to       written to                  copies, as before the first call
    the parameters that it writes to    written to                  copies, as before the first call
    attributes by which it computes     changed                     as before the first call
    train or eval mode                  changed by others           as before the first call
    its other tensors                   unchanged                   read again
                                        written to by others        an error

So a batch norm counts a batch once, though its forward runs twice.

Others may be an optimizer, or a user's loop. Autograd notices their writes to what it saves for a
backward. The second call reads more than that: a bias, or a buffer that is added, is not saved.

A graph, and a module of PyTorch, write to the same tensors in each call, so that the first call
says to which. The code of a user's module may write to others in a later call, depending on values
(``if x.max() > self.bound: self.bound.mul_(2)``): it is watched in each call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from fxpipe.ir.source import is_users_type
from fxpipe.ir.tensors import memory_of
from fxpipe.runtime.state import STATEFUL, State, refill
from fxpipe.runtime.writes import ChangedTensors, Writes, WrittenMemory, writes_counted

_NOTHING: AbstractContextManager[None] = nullcontext()
_stood_for: Any = WeakIdKeyDictionary()
"""By copies of buffers that second calls have used: the buffers themselves."""
_raised: Any = WeakIdKeyDictionary()
"""How often the versions of parameters have been raised by second calls, which have written to
copies of them."""


class ModuleEffects:
    """What one call of a module changes in the module, read just before that call.

    Args:
        modules: the module, and all modules within it; none for a function that is no module.
        writes_again: the second call writes to the module's own buffers, as the first did.
    """

    def __init__(self, modules: Sequence[nn.Module], writes_again: bool = False) -> None:
        module = modules[0] if modules and not writes_again else None
        self._written = None if module is None else _WrittenState(module, modules)
        within = [] if module is None else _users_within(module)
        users = [found for each in within if each.is_users and (found := each.reference())]
        # Most models have no such module, and to look each module up takes longer.
        stateful = [each for each in modules if each in STATEFUL] if len(STATEFUL) else []
        stateful = [*dict.fromkeys([*users, *stateful])]
        self._state = State(stateful) if stateful else None
        self._modes = [(each, each.training) for each in modules]

    def watched(self) -> AbstractContextManager[None]:
        """A context for the first call, which notices what the module writes to."""
        return _NOTHING if self._written is None else self._written.watched()

    def as_before(self) -> AbstractContextManager[None]:
        """A context for the second call, in which all of this is as it was before the first.

        Raises RuntimeError if others have written to what the second call reads.
        """
        if self._written is not None:
            self._written.check()
        is_written = self._written is not None and self._written.has_copies
        others = [(each, was) for each, was in self._modes if each.training is not was]
        if is_written or others or self._state is not None:
            return self._as_before(others)
        return _NOTHING

    @contextmanager
    def _as_before(self, others: Sequence[tuple[nn.Module, bool]]) -> Iterator[None]:
        """``others``: the modules that are in another mode now, each with its mode before."""
        now = [(each, each.training) for each, _ in others]
        with (
            self._state.as_before() if self._state is not None else _NOTHING,
            self._written.as_before() if self._written is not None else _NOTHING,
        ):
            try:
                for each, training in others:
                    each.training = training
                yield
            finally:
                for each, training in now:
                    each.training = training

    @property
    def standing_in(self) -> set[int]:
        """The memory of the parameters' copies, during the second call."""
        return set() if self._written is None else self._written.standing_in


_lock = threading.Lock()
_calls: weakref.WeakSet[_WrittenState] = weakref.WeakSet()
"""The calls of users' modules whose second call may still come."""
_here = threading.local()
_users: Any = WeakIdKeyDictionary()
"""By a module: the users' modules within it, with all within these."""


@dataclass(frozen=True)
class _UsersModule:
    """A module whose code a user has written, or one that such a module consists of.

    ``path`` is where it is within the module that is called; ``is_watched``: it is called by one
    that :class:`WatchesWrites`.
    """

    path: str
    reference: weakref.ref[nn.Module]
    is_users: bool
    is_watched: bool

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that it has now, with their paths."""
        module = self.reference()
        for name, tensor in () if module is None else _tensors_of(module):
            yield f"{self.path}.{name}".removeprefix("."), tensor


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a module itself, and the tensors among its attributes."""
    for table in (module._parameters, module._buffers, vars(module)):
        for name, tensor in table.items():
            if isinstance(tensor, Tensor) and not is_lazy(tensor):
                yield name, tensor


def _users_within(module: nn.Module) -> list[_UsersModule]:
    """The users' modules within a stage. There are none in a module that a user checkpoints by
    hand: to watch all of its operators would take longer than the checkpoint itself."""
    if module not in _users:
        named = dict(module.named_modules())
        users = {path for path, each in named.items() if is_users_type(type(each))}
        watching = [f"{path}." for path, each in named.items() if isinstance(each, WatchesWrites)]
        _users[module] = [
            _UsersModule(
                path,
                weakref.ref(each),
                path in users,
                is_watched=any(path.startswith(start) for start in watching),
            )
            for path, each in named.items()
            if "" not in users
            and (path in users or any(path.startswith(f"{user}.") for user in users))
        ]
    found: list[_UsersModule] = _users[module]
    return found


class WatchesWrites(nn.Module):
    """A module that calls a user's in a context of :func:`copied_ahead`, so that nobody else has to
    watch which tensors it writes to."""


def copied_ahead(module: nn.Module) -> AbstractContextManager[None]:
    """A context for a call of a user's module within a stage. The module may write to tensors that
    a call under a checkpoint, this one or an earlier one, has read and is to read again."""
    if not len(_calls) or getattr(_here, "is_watching", False):
        return _NOTHING
    return _copied_ahead({memory_of(t): t for m in module.modules() for _, t in _tensors_of(m)})


@contextmanager
def _copied_ahead(tensors: Mapping[int, Tensor]) -> Iterator[None]:
    """Copies these tensors ahead of the first write to each, for all calls that have read it."""

    def save(memory: int, tensor: Tensor) -> None:
        copy = tensor.detach().clone()
        with _lock:
            for call in _calls:
                call._keep(memory, tensor, copy)

    _here.is_watching = True
    try:
        with Writes(tensors, save, statistics=True):
            yield
    finally:
        _here.is_watching = False


class _WrittenState:
    """Copies of the tensors that a module writes to, made before the first call.

    In the second call the module writes to copies: a batch norm must not count a batch twice, and a
    module that reads a buffer must read the same value again. The first call in each mode (training
    or not, of each submodule, which buffers it has, and by which numbers it computes: a batch norm
    may lose its statistics, or get another momentum) notices which tensors are written to; their
    names are remembered.
    An accelerator says which buffers have changed only once it has done that call: until then every
    call keeps copies of all buffers.

    A tensor of a user's module that has not been written to so far is copied just before the first
    operator that writes to it: for the call that does so, and for all earlier ones. ::

        first call 1    reads bound              copy ◀─┐
        first call 2    writes to bound          copy ◀─┴─ bound, ahead of the write
        second call 1   reads the copy
        second call 2   reads another copy, and writes to that

    A user's module may as well assign to its buffers: the second call finds those of the first.
    """

    # By identity: a module may define equality, and have no hash then.
    _known: ClassVar[Any] = WeakIdKeyDictionary()

    def __init__(self, module: nn.Module, modules: Sequence[nn.Module]) -> None:
        self.module, self._modules = module, modules
        self.standing_in: set[int] = set()  # memory of parameters' copies in as_before()
        self.mode = tuple([_mode_of(each) if each._buffers else each.training for each in modules])
        written = self._known.setdefault(module, {}).get(self.mode)
        known = None if written is None else written.settled()
        self._is_learning = known is None
        if known is None:
            buffers = module.named_buffers(remove_duplicate=False)
            known = [name for name, buffer in buffers if not is_lazy(buffer)], []
        names, parameters = known
        self.buffers = {n: module.get_buffer(n).detach().clone() for n in names}
        self.parameters = {n: module.get_parameter(n).detach().clone() for n in parameters}
        # Of users' modules: copies of tensors among their attributes, the buffers, and by their
        # memory all tensors, and the paths of those without a copy.
        self.attributes: dict[str, Tensor] = {}
        found = [each.reference() for each in _users_within(module)]
        self._buffers = [(m, dict(m._buffers)) for m in found if m is not None and m._buffers]
        self._tensors: dict[int, Tensor] = {}
        self._uncopied: dict[int, list[str]] = {}
        # What has been read is known once the first call is done. A backward within that call may
        # ask for the second one earlier.
        self._read: list[tuple[nn.Module, str, Tensor, int]] = []
        self._note_uncopied()

    def _note_uncopied(self) -> None:
        self._uncopied.clear()
        for each in _users_within(self.module):
            for path, tensor in each.tensors():
                memory = memory_of(tensor)
                self._tensors[memory] = tensor
                if path not in {**self.buffers, **self.parameters, **self.attributes}:
                    self._uncopied.setdefault(memory, []).append(path)

    @property
    def has_copies(self) -> bool:
        """Whether there is anything that the module writes to."""
        return bool(self.buffers or self.parameters)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The first call is made within this context."""
        with (
            self._learning() if self._is_learning else _NOTHING,
            self._copying() if self._tensors else _NOTHING,
        ):
            try:
                yield
            finally:  # also of a call that fails, as the part of a graph that it leaves may be used
                self._read = [(*read, _times_written(read[-1])) for read in self._readable()]

    def _readable(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        """The tensors that the module may read: each with the module within it that has the tensor,
        and the tensor's name there."""
        for each in self._modules:
            for table in each._parameters, each._buffers:
                yield from ((each, name, t) for name, t in table.items() if t is not None)
        for users in _users_within(self.module):
            if (owner := users.reference()) is not None:
                own = vars(owner).items()
                yield from ((owner, name, t) for name, t in own if isinstance(t, Tensor))

    def _written_since(self) -> list[tuple[nn.Module, str, Tensor]]:
        """The tensors that have been written to since the first call: each with its module, and its
        name there."""
        return [
            (each, name, tensor)
            for each, name, tensor, times in self._read
            if _times_written(tensor) > times
        ]

    def check(self) -> None:
        """Raise RuntimeError if a tensor without a copy has been written to since the first
        call."""
        written = self._written_since()
        if not written:
            return
        paths = {id(each): path for path, each in self.module.named_modules()}

        def path_of(each: nn.Module, name: str) -> str:
            return f"{paths.get(id(each), type(each).__name__)}.{name}".removeprefix(".")

        copies = {*self.buffers, *self.parameters, *self.attributes}
        copied = {memory_of(t) for each, name, t, _ in self._read if path_of(each, name) in copies}
        for each, name, tensor in written:
            if memory_of(tensor) not in copied:
                raise RuntimeError(
                    f"{path_of(each, name)} has been modified by an inplace operation since the "
                    f"forward of {type(self.module).__name__}. That forward is checkpointed: the "
                    "backward runs it again, and would compute with other values than before. Call "
                    "backward() ahead of the modification, or keep what the forward computes: "
                    'without fxpipe.checkpoint, and in a pipeline with checkpoint="never"'
                )

    def _copying(self) -> AbstractContextManager[None]:
        with _lock:
            _calls.add(self)
        are_watched = all(each.is_watched for each in _users_within(self.module))
        return _NOTHING if are_watched else _copied_ahead(self._tensors)

    def _keep(self, memory: int, tensor: Tensor, copy: Tensor) -> None:
        """Take copies of the tensors in a memory, ahead of a write, as far as there are none.
        ``copy`` is one of ``tensor``."""
        for path in self._uncopied.pop(memory, ()):
            owner, _, name = path.rpartition(".")
            own = dict(_tensors_of(self.module.get_submodule(owner))).get(name)
            if own is None:
                continue
            kept = {path: copy if own is tensor else own.detach().clone()}
            # New dictionaries, as another thread may be reading the old ones.
            if name in self.module.get_submodule(owner)._buffers:
                self.buffers = self.buffers | kept
            elif isinstance(own, nn.Parameter):
                self.parameters = self.parameters | kept
            else:
                self.attributes = self.attributes | kept

    @contextmanager
    def _learning(self) -> Iterator[None]:
        """Notices what is written to, and remembers it for later calls.

        A parameter is copied just before the first operator that writes to it. Buffers are copied
        beforehand, and copies of those that are known not to have changed are dropped, unless an
        operator has written the same values to them: it may write others in a later call.
        """

        def save(name: str, parameter: Tensor) -> None:
            self.parameters[name] = parameter.detach().clone()

        tensors = (*self.module.parameters(), *self.module.buffers())
        was_lazy = any(is_lazy(tensor) for tensor in tensors)
        before = {name: self.module.get_buffer(name) for name in self.buffers}
        with WrittenMemory() as memory, Writes(dict(self.module.named_parameters()), save):
            yield
        now = self.module.get_buffer
        comparison = ChangedTensors({name: (now(name), old) for name, old in self.buffers.items()})
        same = [name for name, buffer in before.items() if memory.has(buffer)]
        written = _Written(comparison, same, [*self.parameters])
        settled = written.settled()
        if settled is not None:
            self.buffers = {name: self.buffers[name] for name in settled[0]}
            self._note_uncopied()
        if not was_lazy:  # a lazy module has made tensors in this call, which were not watched
            self._known[self.module].setdefault(self.mode, written)

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Within this context the module has copies of these tensors, with the values that they had
        before the first call."""
        assigned = [(module._buffers, dict(module._buffers)) for module, _ in self._buffers]
        for module, before in self._buffers:
            refill(module._buffers, before)
        homes = [(*_owner(self.module, name), old) for name, old in self.buffers.items()]
        for name, old in self.attributes.items():
            owner, _, key = name.rpartition(".")
            homes.append((vars(self.module.get_submodule(owner)), key, old))
        buffers = [home[key] for home, key, _ in homes]
        parameters = [(self.module.get_parameter(n), old) for n, old in self.parameters.items()]
        data = [(parameter.data, writes_counted(parameter)) for parameter, _ in parameters]
        since = {id(tensor) for _, _, tensor in self._written_since()} if parameters else set()
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
            for (parameter, _), (now, version) in zip(parameters, data, strict=True):
                parameter.data = now
                if id(parameter) in since:
                    # It has other values again than this call has seen: if the graph has saved it,
                    # autograd now says so in the backward.
                    increment_version(parameter)
                raised = writes_counted(parameter) - version
                _raised[parameter] = int(_raised.get(parameter, 0)) + raised
            for own, now_there in assigned:
                refill(own, now_there)


_NUMBERS = bool, int, float, type(None)


def _mode_of(module: nn.Module) -> tuple[Any, ...]:
    """What decides which buffers a module with buffers writes to: whether it is in training, which
    of them it has, and the numbers among its attributes.

    A user's module may count its calls in such an attribute, and is watched in each call anyway.
    """
    has = [name for name, buffer in module._buffers.items() if buffer is not None]
    of = {} if is_users_type(type(module)) else vars(module)
    return (
        *has,
        *[(name, value) for name, value in of.items() if type(value) in _NUMBERS],
        module.training,
    )


@dataclass(frozen=True)
class _Written:
    """The buffers and parameters that a module writes to, as its first call has shown: of buffers,
    those that have changed, and those to which an operator has written, maybe the same values."""

    changed: ChangedTensors[str]
    buffers: list[str]
    parameters: list[str]

    def settled(self) -> tuple[list[str], list[str]] | None:
        """Their names; None as long as an accelerator has not compared the buffers."""
        changed = self.changed.changed()
        return None if changed is None else ([*{*changed, *self.buffers}], self.parameters)


def _times_written(tensor: Tensor) -> int:
    """How often a tensor has been written to, as far as its version tells: by others than second
    calls, which write to copies."""
    return writes_counted(tensor) - (int(_raised.get(tensor, 0)) if len(_raised) else 0)


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
