"""The check of the backward: the gradients of a model on a whole sample are compared with the sum
of its gradients on the parts of the sample.

If the outputs of the parts, put together, are those of the whole, then so are the gradients, as
long as the backward is the derivative of the forward. A backward that a user has written
(``torch.autograd.Function``), or that hooks change, need not be: it may mix rows. So a backward
runs only where the autograd graphs of the whole and of a part are not equal; a graph with such a
backward equals no other.
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
    gradient_difference,
    has_gradient,
    history_of,
    irregular,
    largest_eps,
    listed,
    projections,
    total,
)

Recorded = Callable[[list[Tensor], Callable[[Any, bool], Any]], Any]
"""``recorded(tensors, use)`` runs a model on tensors while autograd records, and returns
``use(output, hooked)``; ``hooked`` says whether the run has registered hooks on tensors, which may
change gradients."""


def backward_problem(
    recorded: Recorded,
    model: nn.Module,
    trial: Trial,
    dims: Sequence[int | None],
    outputs: Mapping[str, Dim],
) -> Problem | None:
    """What differs between the gradients on the whole sample and the sum of those on its parts;
    None if nothing does.

    Args:
        recorded: runs the model.
        trial: the sample.
        dims: the batch dimensions of the inputs.
        outputs: how the outputs of the parts are put together, by the outputs' paths. The backward
            begins at these outputs.
    """
    pieces = trial.each(dims)
    whole = part(trial.tensors, [None] * len(trial.tensors), 0, 0)
    if recorded(whole, _history) == recorded(pieces[0], _history):
        return None
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}

    def gradients(tensors: list[Tensor], weight: Callable[[str], Tensor | None]) -> Projections:
        """The gradients of the parameters on these rows, where the backward begins with the
        gradient ``weight(path)`` at each output."""

        def go_back(output: Any, _: bool) -> Projections:
            ends = []
            for path, value in leaves(output, "output"):
                given = weight(path) if path in outputs and has_gradient(value) else None
                if given is not None:
                    ends.append((value, given.to(value)))
            return projections([end for end, _ in ends], [given for _, given in ends], trained)

        found: Projections = recorded(tensors, go_back)
        return found

    whole = part(trial.tensors, [None] * len(trial.tensors), 0, 0)
    expected = gradients(whole, lambda path: _given(path, trial.whole[path]))
    parts = [
        gradients(tensors, partial(_given_to_part, trial, outputs, number))
        for number, tensors in enumerate(trial.each(dims))
    ]
    found = gradient_difference(expected, total(parts), largest_eps(trained.values()))
    if not found:
        return None
    rows, sizes = sum(trial.sizes), " and ".join(map(str, trial.sizes))
    alone, together = f"{sizes} rows by themselves", f"{rows} rows at once"
    if found.lost:
        names = listed(found.lost)
        text = f"{names} has no gradient from {alone}, and one from {together}"
    elif found.gained:
        names = listed(found.gained)
        text = f"{names} has a gradient from {alone}, and none from {together}"
    else:
        name = found.others[0]
        one, other = expected[name], total(parts)[name]
        assert one is not None and other is not None
        by = max(abs(a - b) for a, b in zip(one.numbers, other.numbers, strict=True))
        text = (
            f"the gradient of {listed(found.others)} depends on which rows go through the backward "
            f"together: added up from {sizes} rows it differs by {by:.2g} (in a random direction; "
            f"its size is {one.size:.2g}) from the gradient of {together}"
        )
    return Problem("gradient", text)


def _history(output: Any, hooked: bool) -> Hashable:
    history = history_of([value for _, value in leaves(output)])
    return object() if hooked else history  # hooks may do anything: the object equals no other


def _given(path: str, like: Tensor) -> Tensor:
    """The gradient with which the backward of the whole sample begins at an output."""
    return irregular(like.shape, zlib.crc32(path.encode()) % 1000)


def _given_to_part(
    trial: Trial, outputs: Mapping[str, Dim], number: int, path: str
) -> Tensor | None:
    """The gradient with which the backward of part ``number`` begins at an output, so that the sum
    over all parts is the backward of the whole sample; None if the part contributes nothing."""
    dim, weight = outputs[path], _given(path, trial.whole[path])
    if isinstance(dim, int):
        sizes = [output[path].shape[dim] for output in trial.parts]
        return weight.narrow(dim, sum(sizes[:number]), sizes[number])
    if dim == ANY:
        return weight if number == 0 else None
    return weight if dim == SUM else weight * (trial.sizes[number] / sum(trial.sizes))
