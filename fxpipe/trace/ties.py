"""Ties: which names of a model's tensors are names of one and the same tensor.

::

    self.head.weight = self.tok.weight        ahead of the trace: two names, one tensor

A graph reads the tensor by one of its names, and takes at each call what the model has there. Once
the other name has a tensor of its own, the graph would never see it; so it is right for the ties
only that it was made with. That holds for new ties, too: a graph of two parameters adds up the
gradients of each, and steps each, by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import NamedTuple

from torch import Tensor, nn

_TABLES = "_parameters", "_buffers"


class TensorName(NamedTuple):
    """A name of a parameter or buffer: its module, the module's table of these, and its name."""

    module: nn.Module
    table: dict[str, Tensor | None]
    name: str

    @property
    def tensor(self) -> Tensor | None:
        """The parameter or buffer that has this name now; None if there is none."""
        return self.table.get(self.name)


class Ties:
    """The ties of a model, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._tables = [
            (module, table)
            for module in model.modules()
            for table in map(vars(module).get, _TABLES)
            if table and isinstance(table, dict)  # TorchScript has tables of another kind
        ]
        self._values = [table.values for _, table in self._tables]
        self._count = self._distinct()
        self._groups = _by_tensor(self._places())
        self._tied = [pair for group in self._groups.values() for pair in pairwise(group)]

    def hold(self) -> bool:
        """Whether the same names are names of one tensor. That no others are follows from the
        number of tensors, which takes the least time to see."""
        return self._distinct() == self._count and all(
            one.tensor is other.tensor for one, other in self._tied
        )

    def held(self, tensors: Iterable[Tensor]) -> list[tuple[TensorName, Tensor]]:
        """Those of the tensors that were parameters or buffers of the model at first, each with its
        place."""
        return [(self._groups[id(t)][0], t) for t in tensors if id(t) in self._groups]

    def changed(self) -> tuple[TensorName, TensorName, bool] | None:
        """The first two names of which a tie has been made or undone, and whether they are names of
        one tensor now; None if there are none."""
        for one, other in self._tied:
            if one.tensor is not other.tensor:
                return one, other, False
        before = {(id(p.table), p.name): key for key, g in self._groups.items() for p in g}
        for group in _by_tensor(self._places()).values():
            for one, other in pairwise(group):
                then = [before.get((id(place.table), place.name)) for place in (one, other)]
                if then[0] != then[1]:
                    return one, other, True
        return None

    def _places(self) -> Iterator[TensorName]:
        return (TensorName(module, table, name) for module, table in self._tables for name in table)

    def _distinct(self) -> int:
        """The number of tensors that have names. (None, in the place of one, counts as another.)"""
        return len(set(map(id, chain.from_iterable(values() for values in self._values))))


def _by_tensor(places: Iterable[TensorName]) -> dict[int, list[TensorName]]:
    """The places of each tensor, by its id."""
    found: dict[int, list[TensorName]] = {}
    for place in places:
        if place.tensor is not None:
            found.setdefault(id(place.tensor), []).append(place)
    return found
