"""The check of the backward: the gradients of a model on a whole sample are compared with the sum
of its gradients on the parts of the sample.

If the outputs of the parts, put together, are those of the whole, then so are the gradients, as
long as the backward is the derivative of the forward. A backward that a user has written
(``torch.autograd.Function``), or that hooks change, need not be: it may mix rows. So a backward
runs only where the autograd graphs of the whole and of a part are not equal; a graph with such a
backward equals no other.

Whether rows meet in a backward does not hang on its precision, so it is found out in float32, also
under autocast or for a model of bfloat16 (:mod:`fxpipe.meaning.widened`). In bfloat16 the gradients
of parts are off by a hundredth. Where they nearly cancel, that is much beside their sum: it would
be taken for rows that meet; or if it were allowed for, rows that meet might be taken for it. What
remains are the gradients of parameters of bfloat16, which autograd rounds to bfloat16 once they are
computed. A model with a kernel that takes its own precision only is compared in this one. There a
difference has to be larger than the rounding errors of the lowest precision that products and sums
are computed in, which the dtypes of the parameters do not tell.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir._torch import next_sequence_number
from fxpipe.ir.structure import Structure, leaves
from fxpipe.meaning.compare import Difference, difference
from fxpipe.meaning.problem import Problem
from fxpipe.meaning.rounded import NOISE, RUNS, Rounded
from fxpipe.meaning.sample import part
from fxpipe.meaning.trial import Trial
from fxpipe.meaning.widened import is_low
from fxpipe.runtime.microbatch import ANY, SUM, Dim
from fxpipe.trace.checkpoints import with_any_backward
from fxpipe.trace.gradients import (
    SMALL,
    TOLERANCE,
    Projection,
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

SLIGHT = 0.1
"""A difference that is a smaller part of a gradient is slight (:class:`Problem`)."""

Recorded = Callable[[list[Tensor], Callable[[list[Any], bool], Any]], Any]
"""``recorded(tensors, use)`` runs a model on tensors while autograd records, and returns
``use([output], hooked)``; ``hooked`` says whether the run has registered hooks on tensors, which
may change gradients."""


def backward_problem(
    recorded: Recorded,
    model: nn.Module,
    trial: Trial,
    dims: Sequence[int | None],
    outputs: Mapping[str, Dim],
    inputs: Mapping[int, str],
) -> Problem | None:
    """What differs between the gradients on the whole sample and the sum of those on its parts;
    None if nothing does. The gradients are those of the parameters and of inputs.

    Args:
        recorded: runs the model.
        trial: the sample.
        dims: the batch dimensions of the inputs.
        outputs: how the outputs of the parts are put together, by the outputs' paths. The backward
            begins at these outputs.
        inputs: the names of the inputs whose gradients are compared, by their places.
    """
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}

    def gradients(
        tensors: list[Tensor], weight: Callable[[str], Tensor | None]
    ) -> tuple[Projections, dict[int, Tensor]]:
        """The gradients of the parameters, and those of the inputs, on these rows, where the
        backward begins with the gradient ``weight(path)`` at each output."""

        def go_back(held: list[Any], _: bool) -> Projections:
            ends = []
            for path, value in leaves(held.pop(), "output"):
                given = weight(path) if path in outputs and has_gradient(value) else None
                if given is not None:
                    ends.append((value, given.to(value)))
            begin, weights = [end for end, _ in ends], [given for _, given in ends]
            whole = list(own.values())
            return projections(begin, weights, trained, inputs=whole, since=first)

        first = next_sequence_number()
        given, own = differentiable(tensors, inputs)
        with with_any_backward():
            found: Projections = recorded(given, go_back)
        none = torch.zeros_like
        return found, {i: none(t) if t.grad is None else t.grad for i, t in own.items()}

    def on_the_whole() -> tuple[Projections, dict[int, Tensor]]:
        whole = part(trial.tensors, [None] * len(trial.tensors), 0, 0)
        return gradients(whole, partial(_given_to_whole, trial))

    expected, of_inputs = on_the_whole()
    pairs = [
        gradients(tensors, partial(_given_to_part, trial, outputs, number))
        for number, tensors in enumerate(trial.each(dims))
    ]
    parts = [found for found, _ in pairs]

    computed_in = set[torch.dtype]()

    @cache
    def noisy() -> list[tuple[Projections, dict[int, Tensor]]]:
        """The gradients on the whole sample, computed by operators that round otherwise."""
        several = []
        for seed in range(RUNS):
            with Rounded(seed) as mode:
                several.append(on_the_whole())
            computed_in.update(mode.dtypes)
        return several

    found = gradient_difference(expected, total(parts), 0.0)
    if found.others:
        # Rounding may be amplified: only what is larger than its effect is a difference.
        noise = [grads for grads, _ in noisy()]
        found = gradient_difference(expected, total(parts), largest_eps(computed_in))
        others = [
            name
            for name in found.others
            if not _is_rounding(name, expected, total(parts), noise, trained[name].dtype)
        ]
        found = replace(found, others=others)
    if not found:
        sizes_of = [each.size for each in expected.values() if each]
        largest = max(
            [*sizes_of, *(grad.norm().item() for grad in of_inputs.values())], default=0.0
        )
        # Beside the largest gradient, a rounding error may be as large as a small gradient.
        for place, name in inputs.items():
            own = [grads[place] for _, grads in pairs]
            apart = _apart_in_parts(of_inputs[place], own, dims[place])
            if apart and apart.largest > TOLERANCE * max(apart.scale, SMALL * largest):
                far = [(grads[place] - of_inputs[place]).abs().max() for _, grads in noisy()]
                if apart.largest > NOISE * max(far).item():
                    text = _about_an_input(name, apart, trial)
                    slight = apart.largest <= SLIGHT * apart.scale
                    return Problem("gradient", text, is_slight=slight)
        return None
    rows, sizes = sum(trial.sizes), " and ".join(map(str, trial.sizes))
    alone, together = f"{sizes} rows by themselves", f"{rows} rows at once"
    is_slight = False
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
        by = _apart(one, other)
        text = (
            f"the gradient of {listed(found.others)} depends on which rows go through the backward "
            f"together: added up from {sizes} rows it differs by {by:.2g} (in a random direction; "
            f"its size is {one.size:.2g}) from the gradient of {together}"
        )
        is_slight = all(
            _apart(one, other) <= SLIGHT * one.size
            for one, other in ((expected[n], total(parts)[n]) for n in found.others)
            if one is not None and other is not None
        )
    return Problem("gradient", text, is_slight=is_slight)


def _is_rounding(
    name: str,
    expected: Projections,
    actual: Projections,
    noise: Sequence[Projections],
    dtype: torch.dtype,
) -> bool:
    """Whether two gradients differ by no more than what other last bits make of them, or than what
    is lost as those of the whole and of each part are rounded to ``dtype``, a low precision."""
    one, other = expected[name], actual[name]
    assert one is not None and other is not None
    rounded = [each[name] for each in noise]
    effect = max((_apart(one, each) for each in rounded if each is not None), default=0.0)
    lost = torch.finfo(dtype).eps * (one.size + other.size) if is_low(dtype) else 0.0
    by = _apart(one, other)
    return by <= NOISE * effect or by <= lost < math.inf


def _apart(one: Projection, other: Projection) -> float:
    return max(abs(a - b) for a, b in zip(one.numbers, other.numbers, strict=True))


def differentiable(
    tensors: Sequence[Tensor], inputs: Mapping[int, str]
) -> tuple[list[Tensor], dict[int, Tensor]]:
    """The tensors, some of which are copies of leaves that get gradients; and these leaves, by
    their places. The copies are no leaves, so that the model may write to them."""
    given, own = list(tensors), dict[int, Tensor]()
    with torch.inference_mode(False), torch.enable_grad():
        for place in inputs:
            own[place] = tensors[place].detach().clone().requires_grad_()
            given[place] = own[place].clone()
    return given, own


def _apart_in_parts(whole: Tensor, parts: Sequence[Tensor], dim: int | None) -> Difference:
    """How the gradient of an input differs if rows go through the backward in parts."""
    together = torch.cat(list(parts), dim) if dim is not None else torch.stack(list(parts)).sum(0)
    return difference(whole, together)


def _about_an_input(name: str, apart: Difference, trial: Trial) -> str:
    rows, sizes = sum(trial.sizes), " and ".join(map(str, trial.sizes))
    return (
        f"the gradient of {name} depends on which rows go through the backward together: of "
        f"{sizes} rows it differs by {apart} from the gradient of {rows} rows at once"
    )


def with_history(inputs: Sequence[Tensor], held: list[Any], hooked: bool) -> tuple[Any, Hashable]:
    """The output without its autograd graph; and this graph as a value. ``inputs`` are the leaves
    that differ from run to run. ``held`` is a list with the output, and is emptied: the graph is
    freed node by node, see :func:`~fxpipe.trace.gradients.history_of`."""
    results, structure = Structure.of(held.pop())
    values = structure.fill(t.detach() if isinstance(t, Tensor) else t for t in results)
    history = history_of(results, inputs=inputs)
    return values, object() if hooked else history  # hooks may do anything: it equals no other


def _given_to_whole(trial: Trial, path: str) -> Tensor:
    """The gradient with which the backward of the whole sample begins at an output, by its path."""
    return _given(path, trial.whole[path])


def _given(path: str, like: Tensor) -> Tensor:
    """Numbers of which a gradient of this shape consists, other ones for each output."""
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
