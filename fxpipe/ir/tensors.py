"""The tensors in a value, how large they are, and which of them share memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fxpipe.ir._torch import DisableTorchFunction, memory_number, pytree, stored_values
from fxpipe.ir.text import kind

_WITHOUT_TENSORS = {type(None), bool, int, float, str, slice, torch.dtype, torch.device}


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a value (any pytree), in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    own = type(value)  # usual kinds come first: every pass calls this for every node
    if own in _WITHOUT_TENSORS:
        return []
    if own in (tuple, list, dict):
        parts = value.values() if own is dict else value
        return [tensor for part in parts for tensor in tensors_of(part)]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def is_shape(value: Any) -> bool:
    """Whether a value is a shape, which is a leaf wherever a value is taken apart and built again.

    PyTorch registers ``torch.Size`` as a pytree that is built again as a tuple, of which nobody can
    ask ``numel()``.
    """
    return isinstance(value, torch.Size)


_PLAIN = "torch", "fxpipe"


def class_of(tensor: Tensor) -> type[Tensor]:
    """The class of a tensor, if it is one of the user's or of another library's; else Tensor, since
    a part of a parameter, say, is a plain tensor."""
    kind = type(tensor)
    return Tensor if kind.__module__.partition(".")[0] in _PLAIN else kind


def attributes_of(tensor: Tensor) -> tuple[str, ...]:
    """The names of the attributes that have been set on a tensor. Those of a subclass of PyTorch's
    or ours are its own affair."""
    is_known = type(tensor) is Tensor or class_of(tensor) is not Tensor
    return tuple(sorted(vars(tensor))) if is_known else ()


def with_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A value (any pytree) with each tensor replaced by what the function gives for it."""
    if isinstance(value, Tensor):
        return function(value)
    return pytree.tree_map_only(Tensor, function, value, is_leaf=is_shape)


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in a value (any pytree; fake tensors count as real ones); of a sparse
    tensor, those of its values."""
    return sum(
        (tensor.numel() if tensor.layout == torch.strided else stored_values(tensor))
        * tensor.element_size()
        for tensor in tensors_of(value)
    )


def devices_of(tensors: Iterable[Tensor]) -> set[torch.device]:
    """The devices that tensors are on, whatever a torch function mode lets them say."""
    with DisableTorchFunction():
        return {tensor.device for tensor in tensors}


def no_scalar(value: Any) -> str:
    """What a value is in place of a scalar tensor; empty if it is one."""
    if not isinstance(value, Tensor):
        return kind(value)
    return "" if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"


def memory_of(tensor: torch.Tensor) -> int:
    """A number that stands for the tensor's memory, the same for all its views. A tensor that has
    no memory of one piece (it is sparse, say, or a lazy parameter) stands for itself."""
    with DisableTorchFunction():
        if is_lazy(tensor) or tensor.layout != torch.strided:
            return id(tensor)
        return memory_number(tensor)


_NEW = itertools.count(-1, -1)


def new_memory() -> int:
    """A number for a memory of which there is no tensor yet: no other memory has it."""
    return next(_NEW)


def memory_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the memory of a tensor, of which it may use a part only; of a sparse tensor, those
    of its values."""
    if tensor.layout == torch.strided:
        return tensor.untyped_storage().nbytes()
    return stored_values(tensor) * tensor.element_size()


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether what is written to one tensor may change the other: whether they have elements in the
    same places of one memory. Views of different columns do not, though their rows alternate."""
    if memory_of(one) != memory_of(other) or not one.numel() or not other.numel():
        return False
    if one.layout != torch.strided or other.layout != torch.strided:
        return True
    if one.dtype.itemsize != other.dtype.itemsize:
        return True  # their elements are not in the same places: views of bytes, say
    begin, end = max(_span(one)[0], _span(other)[0]), min(_span(one)[1], _span(other)[1])
    if begin >= end:
        return False
    is_taken = torch.zeros(max(_span(one)[1], _span(other)[1]), dtype=torch.bool)
    places = [is_taken.as_strided(t.shape, t.stride(), t.storage_offset()) for t in (one, other)]
    places[0].fill_(True)
    return bool(places[1].any())


def _span(tensor: Tensor) -> tuple[int, int]:
    """The places of a tensor's first element in its memory, and the one after its last."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    begin = int(tensor.storage_offset())
    return begin, begin + sum((int(size) - 1) * stride for size, stride in sizes) + 1


def overlapping(tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """The pairs of different tensors that overlap (:func:`overlap`)."""
    memories: dict[int, list[Tensor]] = {}
    for tensor in {id(each): each for each in tensors}.values():
        memories.setdefault(memory_of(tensor), []).append(tensor)
    for same in memories.values():
        if len(same) == 1:
            continue
        # All weights of a model may be views of one memory: in order, few are compared.
        spans = {id(t): [place * t.element_size() for place in _span(t)] for t in same}
        open_ones: list[Tensor] = []
        for tensor in sorted(same, key=lambda each: spans[id(each)][0]):
            begin = spans[id(tensor)][0]
            open_ones = [each for each in open_ones if spans[id(each)][1] > begin]
            yield from ((each, tensor) for each in open_ones if overlap(each, tensor))
            open_ones.append(tensor)


def in_memory_of_others(groups: Iterable[Iterable[Tensor]]) -> set[int]:
    """The ids of those tensors that overlap with a tensor which their own groups do not have."""
    tensors: dict[int, Tensor] = {}
    met: dict[int, set[int]] = {}  # the numbers of each tensor's groups
    for number, group in enumerate(groups):
        for tensor in group:
            tensors[id(tensor)] = tensor
            met.setdefault(id(tensor), set()).add(number)
    pairs = [(id(one), id(other)) for one, other in overlapping(tensors.values())]
    return {each for a, b in pairs if len(met[a] | met[b]) > 1 for each in (a, b)}


def is_in_parts(tensor: Any) -> bool:
    """Whether a tensor is a ``DTensor``, of which each rank has a part."""
    return hasattr(tensor, "full_tensor")


def own_part(tensor: Any) -> Any:
    """This rank's part of a tensor that is in parts. Any other tensor is returned as it is."""
    return tensor.to_local() if is_in_parts(tensor) else tensor


def whole(tensor: Any) -> Any:
    """All of a tensor that is in parts: its ranks have to call this together. Any other tensor is
    returned as it is."""
    return tensor.full_tensor() if is_in_parts(tensor) else tensor


PIECE = 2**20
"""How many elements are compared at a time: what that needs beside the tensors is no larger."""


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The elements of tensors of one shape, some at a time, in the same order of all of them."""
    flat = (tensor.detach().reshape(-1) for tensor in tensors)
    yield from zip(*(torch.split(each, PIECE) for each in flat), strict=True)


def largest_of(tensor: Tensor) -> float:
    """The largest absolute value of the elements that are finite; 0.0 if there are none."""
    largest = 0.0
    for (piece,) in pieces(tensor):
        if not (piece.is_floating_point() or piece.is_complex()):
            piece = piece.double()
        if piece.numel():
            sizes = torch.where(piece.isfinite(), piece.abs(), 0)
            largest = max(largest, sizes.max().item())
    return largest
