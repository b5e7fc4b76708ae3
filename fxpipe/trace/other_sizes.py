"""The check of a graph at other sizes than the example's: other lengths, heights, widths.

torch.export says for which sizes its graph is right (:mod:`fxpipe.trace.sizes`). It is not trusted:
the graph is run beside the model once more, on inputs that are cut to other sizes. Where that does
not show that the graph is right for other sizes of a dimension, this dimension is pinned: the graph
then serves only calls that have the example's size there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor

from fxpipe.ir.errors import is_the_models
from fxpipe.runtime.microbatch import first_rows
from fxpipe.trace.checks import EXPORT_TOLERANCE, Reference, difference
from fxpipe.trace.errors import may_be_the_models
from fxpipe.trace.example import Effects, Example, Traced
from fxpipe.trace.settled import matters_later
from fxpipe.trace.sizes import Place, Sizes, near

REFUSED = "the model has taken no other size in the check of its graph"
DIFFERS = "with another size the graph has given something else than the model"
SETS = "with another size the model sets attributes on which later calls depend"
TRIES = 4  # of sizes for one dimension, where the model refuses them

Choice = dict[Place, int]
"""A size for each of some dimensions."""


def with_proven_sizes(example: Example, reference: Reference, traced: Traced) -> Sizes | None:
    """The sizes of inputs for which a graph is right, with every dimension pinned for which other
    sizes have not been seen to give what the model gives.

    Where all dimensions can change together, one run of the model and one of its graph are enough.
    If these fail, dimensions of equal size are changed by themselves, and then those that have to
    be equal.

    Args:
        reference: a run of the model that the graph has been compared with; as many rows are taken.
    """
    sizes = traced.sizes
    if sizes is None:
        return None
    resized = _Resized(example, reference, traced, sizes)
    left: dict[Place, str] = dict.fromkeys(sizes.free, REFUSED)
    for grouped in (lambda _: None), resized.size, sizes.same_as:
        groups: dict[Any, list[Place]] = {}
        for place in left:
            groups.setdefault(grouped(place), []).append(place)
        for group in groups.values():
            if why := resized.why_not(group):
                left |= dict.fromkeys(group, why)
            else:
                left = {place: why for place, why in left.items() if place not in group}
    return sizes.pinned(left)


@dataclass(frozen=True)
class _Resized:
    """Runs a model and its graph on inputs of other sizes."""

    example: Example
    reference: Reference
    traced: Traced
    sizes: Sizes

    def size(self, place: Place) -> int:
        """The size of a dimension in the example."""
        i, dim = place
        return self.example.tensors[i].shape[dim]

    def why_not(self, group: Sequence[Place]) -> str:
        """Why dimensions cannot change together; "" if they can."""
        choices = (choice for choice in self._choices(group) if self._is_admitted(choice))
        for choice in islice(choices, TRIES):
            if (failure := self.fails(choice)) != REFUSED:
                return failure
        return REFUSED

    def _choices(self, group: Sequence[Place]) -> Iterator[Choice]:
        """Other sizes of some dimensions, all changed in the same way."""
        others = [list(near(self.size(place))) for place in group]
        return (dict(zip(group, sizes, strict=True)) for sizes in zip(*others, strict=True))

    def fails(self, choice: Choice) -> str:
        """What is wrong with the graph on inputs of these sizes; "" if nothing is."""
        tensors = self._inputs(choice)
        try:
            expected = self._run(tensors)
        except Exception as error:
            if not is_the_models(error):
                raise
            return REFUSED
        if expected.changed and matters_later(self.example, self.reference, tensors):
            return SETS
        try:
            actual = self._run(tensors, self.traced)
        except Exception as error:
            if not may_be_the_models(error):
                raise
            return DIFFERS
        pairs = (expected.output, actual.output), (expected.buffers, actual.buffers)
        is_right = not any(difference(one, other, EXPORT_TOLERANCE) for one, other in pairs)
        return "" if is_right else DIFFERS

    def _is_admitted(self, choice: Choice) -> bool:
        shapes = [list(tensor.shape) for tensor in self.example.tensors]
        for (i, dim), size in choice.items():
            shapes[i][dim] = size
        return self.sizes.broken(shapes, [self.reference.rows or self.example.batch or 1]) is None

    def _inputs(self, choice: Choice) -> list[Tensor]:
        """The inputs, cut to these sizes, or with their parts repeated where they are larger."""
        rows = self.reference.rows
        tensors = self.example.resized(rows) if rows else list(self.example.tensors)
        for (i, dim), size in choice.items():
            tensors[i] = first_rows(tensors[i], dim, size)
        return tensors

    def _run(self, tensors: Sequence[Tensor], traced: Traced | None = None) -> Effects:
        written = bool(self.reference.result.written)
        return self.example.run(tensors, traced, watched=written)
