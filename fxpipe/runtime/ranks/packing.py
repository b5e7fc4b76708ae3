"""What travels between processes: values, as a description and the memory of their tensors.

::

    values ── packed ──┬── description: nesting, shapes, strides, and what is no tensor
                       └── parts: the memory of each tensor, as flat tensors of bytes
                                      ┊ (to another process)
    values ── unpacked ── description, parts

A tensor arrives with the strides that it had, since kernels may sum in another order where memory
is laid out otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir._torch import pytree
from fxpipe.ir.tensors import is_shape

_NUMBERS = {int: torch.int64, float: torch.float64}
_LARGEST = 2**63
_TENSORS = {Tensor}
MARK = 32
"""The bytes with which a message begins that is not what it is expected to be."""


@dataclass(frozen=True)
class Strided:
    """The description of a tensor, whose memory travels as one part."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool

    @cached_property
    def stored(self) -> tuple[int, ...]:
        """The shape of what is stored: a dimension that repeats the same memory counts once."""
        return tuple(
            1 if stride == 0 else size
            for size, stride in zip(self.shape, self.strides, strict=True)
        )

    @cached_property
    def bytes(self) -> int:
        """The size of the part."""
        return math.prod(self.stored) * self.dtype.itemsize

    @cached_property
    def is_dense(self) -> bool:
        """Whether what is stored fills its memory, in some order of the dimensions."""
        expected = 1
        for stride, size in sorted(zip(self.strides, self.stored, strict=True)):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return True

    @cached_property
    def overlaps(self) -> bool:
        """Whether elements share memory otherwise than in dimensions of stride 0."""
        reach = 0
        for stride, size in sorted(zip(self.strides, self.stored, strict=True)):
            if size > 1:
                if stride <= reach:
                    return True
                reach += stride * (size - 1)
        return False

    @cached_property
    def is_alone(self) -> bool:
        """Whether the tensor's own memory can be sent, and begins with enough bytes for a mark."""
        is_whole = self.is_dense and self.stored == self.shape and not self.dtype.is_complex
        ordered = sorted(self.strides, reverse=True) == list(self.strides)
        return is_whole and ordered and self.bytes >= MARK

    @staticmethod
    def of(tensor: Tensor) -> Strided:
        """The description of a tensor.

        Raises TypeError for a tensor that is more than its strided memory: a sparse or quantized
        one, or one of a subclass.
        """
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.is_quantized:
            raise TypeError(f"a {type(tensor).__name__} cannot go to another rank: give a Tensor")
        if tensor.layout != torch.strided:
            raise TypeError(
                f"a tensor of layout {tensor.layout} cannot go to another rank: keep it within a "
                "stage, with partition=, or make it dense"
            )
        return _strided(tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad)

    def flat(self, tensor: Tensor) -> Tensor:
        """The memory of the tensor, as a flat tensor of bytes; a view of it where it is dense."""
        tensor = tensor.detach()
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        if self.stored != self.shape:
            for dim, (size, stored) in enumerate(zip(self.shape, self.stored, strict=True)):
                if size != stored:
                    tensor = tensor.narrow(dim, 0, 1)
        if self.is_dense and tensor.stride() == self.strides:
            tensor = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
        else:
            tensor = tensor.contiguous().flatten()
        return tensor.view(torch.uint8)

    def built(self, part: Tensor) -> Tensor:
        """Make the tensor again, from the part that has arrived. The tensor may share memory with
        the part, so the caller must not use the part for anything else."""
        memory, offset = part, part.storage_offset() // self.dtype.itemsize
        if not self.is_dense:
            stored = part.view(self.dtype).view(self.stored)
            if self.overlaps:
                return stored.expand(self.shape).requires_grad_(self.requires_grad)
            memory, offset = self._spaced(stored), 0
        # What arrives is no view: autograd forbids to detach a view in place.
        tensor = torch.empty(0, dtype=self.dtype, device=part.device)
        tensor.set_(memory.untyped_storage(), offset, self.shape, self.strides)
        return tensor.requires_grad_() if self.requires_grad else tensor

    def is_of(self, values: Any) -> bool:
        """Whether these values are such a tensor, by itself in a tuple."""
        return (
            type(values) is tuple
            and len(values) == 1
            and type(values[0]) is Tensor
            and Strided.of(values[0]) == self
            and not values[0].is_neg()
        )

    def empty(self) -> Tensor:
        """Memory for such a tensor that comes alone."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype)

    def _spaced(self, stored: Tensor) -> Tensor:
        """The tensor with the strides that it had, and holes in its memory."""
        return torch.empty_strided(
            self.stored, self.strides, dtype=self.dtype, device=stored.device
        ).copy_(stored)


@lru_cache(maxsize=4096)
def _strided(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], requires_grad: bool
) -> Strided:
    """The one description of all tensors that are alike: what follows from it is found once."""
    return Strided(dtype, tuple(shape), strides, requires_grad)


@dataclass(frozen=True)
class Number:
    """The description of an int or a float, whose value travels as a part."""

    kind: type

    @property
    def bytes(self) -> int:
        """The size of the part."""
        return 8

    def flat(self, value: float, device: torch.device) -> Tensor:
        """The part that the number travels as: its eight bytes."""
        return torch.tensor([value], dtype=_NUMBERS[self.kind]).view(torch.uint8).to(device)

    def built(self, part: Tensor) -> Any:
        """Read the number from the part that has arrived."""
        return part.view(_NUMBERS[self.kind]).item()


@dataclass(frozen=True)
class Constant:
    """What is neither a tensor nor a number, and travels in the description itself."""

    kind: type  # it keeps apart descriptions whose values are equal, such as True and 1
    value: Any


Leaf = Strided | Number | Constant


@dataclass(frozen=True)
class Description:
    """The description of values: their nesting, and each of their leaves."""

    nesting: pytree.TreeSpec
    leaves: tuple[Leaf, ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of each part."""
        return tuple(leaf.bytes for leaf in self.leaves if not isinstance(leaf, Constant))

    @cached_property
    def alone(self) -> Strided | None:
        """The tensor, if the values are a tuple of one that can travel without a description."""
        match self.leaves:
            case (Strided() as tensor,) if tensor.is_alone and self.build is tuple:
                return tensor
        return None

    @cached_property
    def build(self) -> Callable[[list[Any]], Any]:
        """A function that puts leaves, in order, into the containers that the values had."""
        nested = pytree.tree_unflatten(range(len(self.leaves)), self.nesting)
        if type(nested) is tuple and nested == tuple(range(len(self.leaves))):
            return tuple  # by far the most frequent case, where a pytree takes longer
        return partial(pytree.tree_unflatten, treespec=self.nesting)

    def __reduce__(self) -> tuple[Any, ...]:
        # The nesting is pickled as containers of numbers, since PyTorch warns when it unpickles the
        # TreeSpec of a leaf.
        nested = pytree.tree_unflatten(range(len(self.leaves)), self.nesting)
        return _restored, (nested, self.leaves)


def _restored(nested: Any, leaves: tuple[Leaf, ...]) -> Description:
    return Description(pytree.tree_structure(nested), leaves)


def packed(values: Any, device: torch.device) -> tuple[Description, list[Tensor]]:
    """A description of the values, and the parts, which share memory with tensors among them.

    ``device``: where numbers are put, to travel like tensors.

    Raises TypeError for a tensor that cannot travel.
    """
    leaves, nesting = _flattened(values)
    described: list[Leaf] = []
    parts: list[Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            strided = Strided.of(leaf)
            described.append(strided)
            parts.append(strided.flat(leaf))
        elif type(leaf) in _NUMBERS and (type(leaf) is float or -_LARGEST <= leaf < _LARGEST):
            number = Number(type(leaf))
            described.append(number)
            parts.append(number.flat(leaf, device))
        else:
            described.append(Constant(type(leaf), leaf))
    return Description(nesting, tuple(described)), parts


def _flattened(values: Any) -> tuple[Sequence[Any], pytree.TreeSpec]:
    if type(values) is tuple and {*map(type, values)} == _TENSORS:
        return values, _of_tuple(len(values))  # by far the most frequent case
    leaves, nesting = pytree.tree_flatten(values, is_leaf=is_shape)
    return leaves, nesting


@cache
def _of_tuple(length: int) -> pytree.TreeSpec:
    return pytree.tree_structure((0,) * length)


def unpacked(description: Description, parts: Sequence[Tensor]) -> Any:
    """Make the values again, from their description and the parts that have arrived. Tensors may be
    views of the parts, so the caller must not use the parts for anything else."""
    remaining = iter(parts)
    leaves = [
        leaf.value if isinstance(leaf, Constant) else leaf.built(next(remaining))
        for leaf in description.leaves
    ]
    return description.build(leaves)
