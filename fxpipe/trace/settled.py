"""What the first call of a model sets on its modules, and later calls find set.

::

    def forward(self, x):
        if x.shape[1] <= self.window:      the first short x makes the window small,
            self.window = x.shape[1]       also for all longer ones that come later
        ...

A graph has no such line, so that a call of other sizes would find another ``window`` than in the
model. Where a call of other sizes is seen to depend on such attributes, and numbers and names are
all that a call changes, the graph is for the sizes of its example, and a pipeline sets the
attributes ahead of each call, as the call itself would. Where a call changes more than that (a flag
says that a table has been made, say), nothing is set: a graph makes the table in every call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir.hooks import HOOKS
from fxpipe.runtime.microbatch import first_rows
from fxpipe.runtime.state import PLAIN, STATEFUL, Attribute, State
from fxpipe.trace.checks import Reference
from fxpipe.trace.errors import suppressed
from fxpipe.trace.example import Example
from fxpipe.trace.isolation import parameters_put_back, untouched
from fxpipe.trace.sizes import near
from fxpipe.trace.state import differs

TRIES = 3  # of other sizes that the model takes

Settled = Mapping[tuple[nn.Module, str], Any]
"""Attributes of modules, and the values that they have after a call."""


def settled(example: Example, reference: Reference) -> Settled:
    """The attributes that a call of the model sets once for all, so that a second call, with
    another number of rows, changes none of them. Nothing if calls of other sizes do not depend on
    them, or if a call changes anything beside numbers and names.

    Args:
        reference: a run of the model on few rows.
    """
    units = [unit for unit in reference.result.changed if unit[0] not in STATEFUL]
    if not units or reference.result.written:
        return {}
    others = islice(_taken(example, _other_inputs(reference, example.batch_dims)), TRIES)
    if not any(matters_later(example, reference, tensors) for tensors in others):
        return {}
    model = example.model
    with untouched(model), torch.no_grad(), parameters_put_back(model):
        first = _Beside.of(model)
        example.call([tensor.clone() for tensor in example.tensors])
        values = {(module, name): vars(module).get(name) for module, name in units}
        state, second = State(model.modules()), _Beside.of(model)
        example.call([tensor.clone() for tensor in reference.tensors])
        third = _Beside.of(model)
        # A buffer that only the first call writes to is what a flag among the attributes is about.
        is_settled = not state.changed() and second.since(first) == third.since(second)
    is_plain = all(isinstance(value, PLAIN) for value in values.values())
    return values if is_settled and is_plain and first.has == third.has else {}


def matters_later(example: Example, reference: Reference, tensors: Sequence[Tensor]) -> bool:
    """Whether a call of the model with these inputs leaves attributes behind with which it gives
    something else than the reference."""
    model = example.model
    with untouched(model), torch.no_grad(), parameters_put_back(model):
        before = State(model.modules())
        example.call([tensor.clone() for tensor in tensors])
        setters = [Attribute(*unit).set for unit in before.changed()]
    return bool(setters) and differs(example, reference, setters)


def _taken(example: Example, several: Iterable[list[Tensor]]) -> Iterator[list[Tensor]]:
    """Those of several inputs that the model takes."""
    for tensors in several:
        is_taken = False
        with suppressed():
            example.run(tensors)
            is_taken = True
        if is_taken:
            yield tensors


def _other_inputs(reference: Reference, batch_dims: Sequence[int | None]) -> Iterator[list[Tensor]]:
    """Inputs of which all dimensions of one size, other than the batch's, are of another size; the
    largest size first."""
    pairs = list(zip(reference.tensors, batch_dims, strict=True))
    sizes = {n for tensor, dim in pairs for d, n in enumerate(tensor.shape) if d != dim and n > 1}
    for size in sorted(sizes, reverse=True):
        for other in islice(near(size), TRIES):
            yield [_resized(tensor, dim, size, other) for tensor, dim in pairs]


def _resized(tensor: Tensor, batch_dim: int | None, size: int, other: int) -> Tensor:
    for dim, n in enumerate(tensor.shape):
        if n == size and dim != batch_dim:
            tensor = first_rows(tensor, dim, other)
    return tensor


@dataclass(frozen=True)
class _Beside:
    """What the modules of a model have at one time, beside attributes of Python."""

    has: list[Any]  # the parts, hooks and tensors of each module
    writes: list[int]  # how often each tensor has been written to in place

    @staticmethod
    def of(model: nn.Module) -> _Beside:
        tables = [
            getattr(module, kind)
            for module in model.modules()
            for kind in ("_modules", "_parameters", "_buffers", *HOOKS)
            if getattr(module, kind, None)
        ]
        has = [[(key, id(value)) for key, value in table.items()] for table in tables]
        tensors = (*model.parameters(), *model.buffers())
        return _Beside(has, [tensor._version for tensor in tensors])

    def since(self, other: _Beside) -> list[int]:
        """How often each tensor has been written to since another snapshot was made."""
        return [now - then for now, then in zip(self.writes, other.writes, strict=False)]
