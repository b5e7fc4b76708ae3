"""Notice which tensors are written to.

Writes through ``.data``, which do not raise a tensor's version counter, are noticed too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fxpipe.ir._torch import TorchDispatchMode, schema_of
from fxpipe.ir.tensors import memory_of

Key = TypeVar("Key")


class Writes(TorchDispatchMode, Generic[Key]):  # type: ignore[no-untyped-call]
    """Calls ``on_write(key, tensor)`` ahead of the first operator that writes to each tensor.

    An operator's schema says which arguments it writes to. The schemas of batch norms do not name
    their running statistics, so these writes are not noticed.
    """

    supports_higher_order_operators = True

    def __init__(
        self, tensors: Mapping[Key, Tensor], on_write: Callable[[Key, Tensor], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on_write = on_write
        self.unwritten = {memory_of(tensor): (key, tensor) for key, tensor in tensors.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = schema_of(func)
        if schema is not None and schema.is_mutable:
            for i, argument in enumerate(schema.arguments):
                value = args[i] if i < len(args) else (kwargs or {}).get(argument.name)
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for each in value if isinstance(value, list | tuple) else [value]:
                        self._notice(each)
        return func(*args, **(kwargs or {}))

    def _notice(self, value: Any) -> None:
        if isinstance(value, Tensor):
            found = self.unwritten.pop(memory_of(value), None)
            if found is not None:
                self.on_write(*found)


def same_values(tensor: Tensor, before: Tensor) -> bool:
    """Whether a tensor still has the values of ``before``, a copy of it. Both may be sparse."""
    if tensor.layout == torch.strided:
        return torch.equal(tensor, before)
    one, other = (t.to_sparse(layout=torch.sparse_coo).coalesce() for t in (tensor, before))
    return torch.equal(one.indices(), other.indices()) and torch.equal(one.values(), other.values())
