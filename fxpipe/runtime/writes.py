"""Notice which tensors are written to.

Writes through ``.data``, which do not raise a tensor's version counter, are noticed too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fxpipe.ir._torch import TorchDispatchMode, schema_of, version_of
from fxpipe.ir.tensors import memory_of
from fxpipe.runtime.streams import current, has_streams

Key = TypeVar("Key")


class Writes(TorchDispatchMode, Generic[Key]):  # type: ignore[no-untyped-call]
    """Calls ``on_write(key, tensor)`` ahead of the first operator that writes to each tensor.

    An operator's schema says which arguments it writes to. The schemas of batch norms do not name
    their running statistics: these writes are noticed with ``statistics``
    (:func:`statistics_written_by`).
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        tensors: Mapping[Key, Tensor],
        on_write: Callable[[Key, Tensor], None],
        *,
        statistics: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on_write, self._statistics = on_write, statistics
        self.unwritten = {memory_of(tensor): (key, tensor) for key, tensor in tensors.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = written_by(func, args, kwargs or {})
        if self._statistics:
            written = chain(written, statistics_written_by(func, args, kwargs or {}))
        for tensor in written:
            found = self.unwritten.pop(memory_of(tensor), None)
            if found is not None:
                self.on_write(*found)
        return func(*args, **(kwargs or {}))


def writes_counted(tensor: Tensor) -> int:
    """How many times a tensor has been written to, as far as autograd counts: not at all where it
    has been made in inference mode."""
    return 0 if tensor.is_inference() else version_of(tensor)


class WrittenMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the memory that operators write to. A version counter does not tell of all: not of a
    write by way of ``.data``, nor of running statistics, nor of a fake tensor in a list.

    The memory of a tensor that has been freed may be that of another one by now: ask for tensors
    that have been there all along.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers: set[int] = set()
        """By :func:`fxpipe.ir.tensors.memory_of`."""
        self.statistics: set[int] = set()
        """Of these, the running statistics of norms."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.numbers.update(map(memory_of, written_by(func, args, kwargs or {})))
        statistics = set(map(memory_of, statistics_written_by(func, args, kwargs or {})))
        self.statistics |= statistics
        self.numbers |= statistics
        return func(*args, **(kwargs or {}))

    def has(self, tensor: Tensor) -> bool:
        """Whether something has been written to the memory of a tensor."""
        return memory_of(tensor) in self.numbers


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors among the arguments of an operator that it writes to, as its schema says."""
    schema = schema_of(func)
    if schema is None or not schema.is_mutable:
        return
    for i, argument in enumerate(schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            several = value if isinstance(value, list | tuple) else [value]
            yield from (each for each in several if isinstance(each, Tensor))


_WRITES_STATISTICS = {
    "aten::batch_norm": "training",
    "aten::_batch_norm_impl_index": "training",
    "aten::native_batch_norm": "training",
    "aten::cudnn_batch_norm": "training",
    "aten::miopen_batch_norm": "training",
    "aten::instance_norm": "use_input_stats",
    "aten::batch_norm_update_stats": None,
    "aten::batch_norm_gather_stats": None,
    "aten::batch_norm_gather_stats_with_counts": None,
}
"""Operators that write to their arguments ``running_mean`` and ``running_var``, of which their
schemas say nothing; each with the argument that must be true for it to do so, or None if it always
does. The schemas of all others that have such arguments (``_native_batch_norm_legit``, say) name
their writes."""


def statistics_written_by(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[Tensor]:
    """The running statistics among the arguments of a norm that it writes to, which its schema does
    not say."""
    schema = schema_of(func)
    if schema is None or schema.name not in _WRITES_STATISTICS:
        return
    names = (argument.name for argument in schema.arguments)
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    condition = _WRITES_STATISTICS[schema.name]
    if condition is None or given.get(condition):
        running = given.get("running_mean"), given.get("running_var")
        yield from (each for each in running if isinstance(each, Tensor))


@contextmanager
def values_put_back(tensors: Iterable[Tensor]) -> Iterator[None]:
    """A context at whose end tensors have the values that they had at its beginning, but for those
    that have no memory of one piece. One is copied only ahead of the first write to it."""
    strided = (t for t in tensors if t.layout == torch.strided and not t.is_meta)
    watched = {memory_of(tensor): tensor for tensor in strided}
    written: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def save(_: int, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        written.append((storage, storage.clone()))  # type: ignore[no-untyped-call]

    try:
        with Writes(watched, save) if watched else nullcontext():
            yield
    finally:
        for storage, before in written:
            if storage.nbytes() == before.nbytes():
                storage.copy_(before, non_blocking=False)


def same_values(tensor: Tensor, before: Tensor) -> bool:
    """Whether a tensor still has the values of ``before``, a copy of it. Both may be sparse."""
    if tensor.layout == torch.strided:
        return torch.equal(tensor, before)
    one, other = (t.to_sparse(layout=torch.sparse_coo).coalesce() for t in (tensor, before))
    return torch.equal(one.indices(), other.indices()) and torch.equal(one.values(), other.values())


class ChangedTensors(Generic[Key]):
    """Which tensors differ from copies that were made of them earlier.

    On the CPU this is known at once. An accelerator compares when it gets there, and the host does
    not wait for it: its answers are copied to the host's memory, to be read once they have come.

    Args:
        pairs: the tensors, each with its copy.
    """

    def __init__(self, pairs: Mapping[Key, tuple[Tensor, Tensor]]) -> None:
        self._changed: list[Key] | None = None  # once it is known
        self._on_host: list[Key] = []
        self._asked: list[tuple[list[Key], Tensor, torch.Event]] = []
        asked: dict[torch.device, list[Key]] = {}
        for key, (tensor, before) in pairs.items():
            is_like = tensor.shape == before.shape and tensor.dtype == before.dtype
            is_plain = is_like and tensor.layout == torch.strided
            if is_plain and tensor.device == before.device and has_streams(tensor.device):
                asked.setdefault(tensor.device, []).append(key)
            elif not same_values(tensor, before):
                self._on_host.append(key)
        with torch.no_grad():
            for device, keys in asked.items():
                answers = torch.stack([(pairs[key][0] != pairs[key][1]).any() for key in keys])
                on_host = answers.to("cpu", non_blocking=True)
                (computing,) = current([device])
                self._asked.append((keys, on_host, computing.record_event()))

    def changed(self) -> list[Key] | None:
        """The tensors that have changed; None as long as an accelerator has not answered."""
        if self._changed is None and all(event.query() for _, _, event in self._asked):
            found = list(self._on_host)
            for keys, answers, _ in self._asked:
                found += [key for key, has in zip(keys, answers.tolist(), strict=True) if has]
            self._changed = found
        return self._changed
