"""The check of the backward: gradients of a model on some rows at once, beside those on the same
rows in parts, added up.

A model whose outputs are right for any rows has the right gradients too, unless its backward is
not the derivative of its forward: one that a user has written (``torch.autograd.Function``), or
that hooks change, may put rows together. So a backward runs only where the histories of the whole
and of a part are not the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from fxpipe.ir.structure import leaves
from fxpipe.meaning.check import Problem, Trial
from fxpipe.meaning.sample import part
from fxpipe.runtime.microbatch import ANY, SUM, Dim
from fxpipe.trace.gradients import (
    Projections,
    apart,
    coarsest,
    has_gradient,
    history_of,
    listed,
    projections,
    total,
    uneven,
)

Recorded = Callable[[list[Tensor], Callable[[Any, bool], Any]], Any]
"""Runs a model on tensors, with a history, and gives what a function makes of its output; the
function is told, too, whether hooks may change gradients."""


def backward_problem(
    recorded: Recorded,
    model: nn.Module,
    trial: Trial,
    dims: Sequence[int | None],
    outputs: Mapping[str, Dim],
) -> Problem | None:
    """What differs between the gradients of the whole of a sample and those of its parts.

    Args:
        recorded: runs the model.
        trial: the sample.
        dims: the batch dimensions of the inputs.
        outputs: how outputs are put together, by their paths; gradients begin at these.
    """
    pieces = trial.each(dims)
    whole = part(trial.tensors, [None] * len(trial.tensors), 0, 0)
    if recorded(whole, _history) == recorded(pieces[0], _history):
        return None
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}

    def gradients(tensors: list[Tensor], weight: Callable[[str], Tensor | None]) -> Projections:
        """Those of the parameters, where outputs have these gradients."""

        def go_back(output: Any, _: bool) -> Projections:
            ends = []
            for path, value in leaves(output, "output"):
                own = weight(path) if path in outputs and has_gradient(value) else None
                if own is not None:
                    ends.append((value, own.to(value)))
            return projections([end for end, _ in ends], [own for _, own in ends], trained)

        found: Projections = recorded(tensors, go_back)
        return found

    whole = part(trial.tensors, [None] * len(trial.tensors), 0, 0)
    expected = gradients(whole, lambda path: _given(path, trial.whole[path]))
    parts = [
        gradients(tensors, partial(_given_to_part, trial, outputs, number))
        for number, tensors in enumerate(trial.each(dims))
    ]
    found = apart(expected, total(parts), coarsest(trained.values()))
    if not found:
        return None
    rows, sizes = sum(trial.sizes), " and ".join(map(str, trial.sizes))
    by_themselves = f"from {sizes} rows by themselves"
    if found.lost:
        text = f"{listed(found.lost)} has no gradient {by_themselves}, and has one"
    elif found.gained:
        text = f"{listed(found.gained)} has a gradient {by_themselves}, and has none"
    else:
        name = found.others[0]
        one, other = expected[name], total(parts)[name]
        assert one is not None and other is not None
        by = max(abs(a - b) for a, b in zip(one.numbers, other.numbers, strict=True))
        text = (
            f"the gradient of {listed(found.others)} depends on which rows go through the backward "
            f"together: added up from {sizes} rows it differs by {by:.2g} (in a random direction; "
            f"its size is {one.size:.2g}) from that"
        )
    return Problem("gradient", f"{text} of {rows} rows at once")


def _history(output: Any, hooked: bool) -> Hashable:
    history = history_of([value for _, value in leaves(output)])
    return object() if hooked else history  # hooks may do anything: it is equal to no other


def _given(path: str, like: Tensor) -> Tensor:
    """The gradient of an output of all rows, with which the backward begins."""
    return uneven(like.shape, zlib.crc32(path.encode()) % 1000)


def _given_to_part(
    trial: Trial, outputs: Mapping[str, Dim], number: int, path: str
) -> Tensor | None:
    """The gradient of an output of the part of that number."""
    dim, weight = outputs[path], _given(path, trial.whole[path])
    if isinstance(dim, int):
        sizes = [output[path].shape[dim] for output in trial.parts]
        return weight.narrow(dim, sum(sizes[:number]), sizes[number])
    if dim == ANY:
        return weight if number == 0 else None
    return weight if dim == SUM else weight * (trial.sizes[number] / sum(trial.sizes))
