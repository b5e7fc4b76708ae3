"""A state of the stages: tensors that a call returns, and the next call takes.

::

    call       keys ─┬─ mb 0 ─ stage 1 ─┬─ keys        one tensor for the caller,
                     └─ mb 1 ─ stage 1 ─┘              and two on the device of stage 1

    next call  keys ─┬─ mb 0 ─ stage 1 ─┬─ keys        nothing is joined, cut or sent
                     └─ mb 1 ─ stage 1 ─┘

A cache of keys and values goes through a pipeline with every token. To join the micro-batches'
parts, and to cut them again for the next call, would copy all of it each time. So it is one tensor
for the caller, which has parts in its place until somebody computes with it: then they are joined,
once for all, and the next call cuts it, as it cuts any input. Whoever reorders the rows between the
calls, as a beam search does, gets what it expects.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpipe.ir._torch import no_torch_function, pytree, wrapper_tensor
from fxpipe.runtime.microbatch import Parts, rows_of_each


class Apart(Tensor):
    """A tensor of which each micro-batch has a part."""

    _parts: Parts | None
    _whole: Tensor | None

    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(cls, parts: Parts) -> Apart:
        first, dim = parts.values[0], parts.dim
        assert dim is not None
        shape = list(first.shape)
        shape[dim] = sum(part.shape[dim] for part in parts.values)
        made: Apart = wrapper_tensor(cls, tuple(shape), first.dtype, first.device)
        made._parts, made._whole = parts, None
        return made

    def __init__(self, parts: Parts) -> None:
        super().__init__()

    @property
    def is_in_parts(self) -> bool:
        """Whether nobody has computed with it yet."""
        return self._parts is not None

    def whole(self) -> Tensor:
        """A plain tensor with these values, joined from the parts. From then on this tensor has it
        in place of the parts."""
        if self._parts is not None:
            self._whole, self._parts = self._parts.joined(), None
        assert self._whole is not None
        return self._whole

    def cut(self, dim: Any, chunks: int) -> Parts | Tensor:
        """What a call is to take as the input: the parts, if it cuts the rows into the same ones;
        else the whole."""
        parts = self._parts
        if parts is not None and dim == parts.dim:
            rows = [part.shape[dim] for part in parts.values]
            if rows == rows_of_each(sum(rows), chunks):
                return parts
        return self.whole()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.whole())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy the values into a plain tensor, as :meth:`copied` does."""
        memo[id(self)] = copied = self.copied()
        return copied

    def copied(self) -> Tensor:
        """A plain copy of this tensor, which stays in parts if it is."""
        return self._parts.joined() if self._parts is not None else self.whole().clone()

    def numpy(self, *, force: bool = False) -> Any:
        """The values, as ``Tensor.numpy`` gives them."""
        return self.whole().numpy(force=force)

    def tolist(self) -> Any:
        """The values, as ``Tensor.tolist`` gives them."""
        return self.whole().tolist()

    def data_ptr(self) -> int:
        """Where the values are, as ``Tensor.data_ptr`` says it."""
        return self.whole().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory of the values, of the parts joined, as ``Tensor.untyped_storage`` gives it."""
        return self.whole().untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        some, named = pytree.tree_map(whole, (args, kwargs or {}))
        return func(*some, **named)


def whole(value: Any) -> Any:
    """A tensor that is in parts as a plain one; any other value as it is."""
    return value.whole() if isinstance(value, Apart) else value


def plain(value: Any) -> Any:
    """A plain copy of a tensor that is in parts, for a compilation, which leaves it there; any
    other value as it is."""
    return value.copied() if isinstance(value, Apart) and value.is_in_parts else whole(value)


def as_tensors(output: Any) -> Any:
    """The output of a program, with each of its states as one tensor."""
    made: dict[int, Apart] = {}

    def one(leaf: Any) -> Any:
        is_state = isinstance(leaf, Parts) and leaf.dim is not None
        return made.setdefault(id(leaf), Apart(leaf)) if is_state else leaf

    return pytree.tree_map(one, output)


def all_whole(output: Any) -> Any:
    """The output of a program, with its states joined."""
    return pytree.tree_map(_joined, output)


def _joined(leaf: Any) -> Any:
    return leaf.joined() if isinstance(leaf, Parts) and leaf.dim is not None else leaf
