"""Absent inputs: a rank that needs no values of an input may be given None in its place, or a
tensor on "meta".

::

    rank 0    step(x, target=None)        x here; the target's shape is asked of rank 1
    rank 1    step(None, target=y)        y here; x's shape is asked of rank 0

Every rank looks up and compiles the same program, for which it needs the shapes of all inputs. In
place of a tensor that it has not, it takes one that has the shape but no memory: a *ghost*. Ghosts
have values only while a kind of call is compiled, when the check needs some: then they are asked of
a rank that has them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fxpipe.compiler.loss import MiniBatch
from fxpipe.ir.structure import Structure, map_tensors
from fxpipe.ir.tensors import memory_of
from fxpipe.runtime.ranks.agreement import Agreement


@dataclass(frozen=True)
class _Shaped:
    """What is told of a tensor to a rank that has not got it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> _Shaped:
        return _Shaped(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


class Absent:
    """Makes ghosts, tells them from other tensors, and gives them values.

    Args:
        agreement: through which ranks ask each other.
        device: where a rank that had the inputs would have them.
    """

    def __init__(self, agreement: Agreement, device: torch.device) -> None:
        self._agreement, self._device = agreement, device
        self._memories: dict[int, Tensor] = {}  # the one element of each ghost's memory

    def completed(self, given: dict[str, Any], members: slice) -> dict[str, Any]:
        """The arguments of a call, by their names, with ghosts in place of tensors on "meta", and
        of None where another rank has something else.

        ``members``: the ranks that make the same call.
        """
        lacks = [name for name, value in given.items() if value is None]
        asked = self._agreement.ask("call", lacks)
        wanted = {name for each in asked[members] for name in each}
        if any(each != asked[0] for each in asked):
            has = [name for name in given if name in wanted and name not in lacks]
            told = {name: map_tensors(_Shaped.of, given[name]) for name in has}
            known = self._agreement.ask("shapes", told)[members]
            for name in lacks:
                said = next((each[name] for each in known if name in each), None)
                given = {**given, name: self._made(said)}
        return {name: map_tensors(self._without_meta, value) for name, value in given.items()}

    def _made(self, said: Any) -> Any:
        """What a rank has told, with ghosts in place of tensors."""
        if isinstance(said, _Shaped):
            return self._ghost(said)
        if isinstance(said, dict):
            return {key: self._made(value) for key, value in said.items()}
        if isinstance(said, list | tuple):
            parts = [self._made(value) for value in said]
            return type(said)(*parts) if hasattr(said, "_fields") else type(said)(parts)
        return said

    def _without_meta(self, tensor: Tensor) -> Tensor:
        return self._ghost(_Shaped.of(tensor)) if tensor.is_meta else tensor

    def _ghost(self, shaped: _Shaped) -> Tensor:
        element = torch.zeros((), dtype=shaped.dtype, device=self._device)
        self._memories = {memory_of(element): element, **dict(list(self._memories.items())[:999])}
        return element.expand(shaped.shape).requires_grad_(shaped.requires_grad)

    def is_ghost(self, value: Any) -> bool:
        """Whether a value is a ghost, or a view of one."""
        return isinstance(value, Tensor) and memory_of(value) in self._memories

    def filled(self, values: Any, members: slice) -> Any:
        """The values with those of a rank that has them in place of ghosts; on "meta" if none has.
        All ranks have to call this at the same time."""
        tensors, structure = Structure.of(values)
        lacks = [i for i, tensor in enumerate(tensors) if self.is_ghost(tensor)]
        asked = self._agreement.ask("examples", lacks)
        wanted = {i for each in asked[members] for i in each}
        if not any(asked):
            return values
        own = {i: tensors[i].detach().cpu() for i in wanted.difference(lacks)}
        known = self._agreement.ask("values of examples", own)[members]
        found = list(tensors)
        for i in lacks:
            value = next((each[i] for each in known if i in each), None)
            value = tensors[i].to("meta") if value is None else value.to(self._device)
            found[i] = value.detach().requires_grad_(tensors[i].requires_grad)
        return structure.fill(found)

    def filled_batch(self, batch: MiniBatch, members: slice) -> MiniBatch:
        """The mini-batch of a step, with values in place of ghosts."""
        given = batch.inputs, [each.leaves for each in batch.readings]
        inputs, leaves = self.filled(given, members)
        pairs = zip(batch.readings, leaves, strict=True)
        return MiniBatch(inputs, [replace(each, leaves=own) for each, own in pairs])
