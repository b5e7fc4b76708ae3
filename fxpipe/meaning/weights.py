"""The weights of the losses of micro-batches: the user's ``loss_weight`` is compared with the loss
that the model gives for a whole sample, and a ``loss_weight`` is suggested where one is needed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir.structure import Structure
from fxpipe.ir.text import told_apart
from fxpipe.loss_weight import IGNORED, tokens
from fxpipe.meaning.check import Trial, Verdict
from fxpipe.meaning.compare import Difference, difference
from fxpipe.meaning.loss import ROWS
from fxpipe.meaning.problem import Problem
from fxpipe.runtime.microbatch import SUM, WEIGHTED, Dim, numbers, shares, weighted_sum
from fxpipe.trace import bound_arguments

Weigh = Callable[[Sequence[Any]], Any]
"""A function from the tensors of a micro-batch to the weight of its loss."""

Fill = Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]
"""A function from the tensors of a call to its arguments, positional and named ones."""


def named_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Fill:
    """A function that gives the arguments of a call, all of them by name, with other tensors."""
    bound = bound_arguments(model, args, kwargs)
    _, structure = Structure.of(dict(bound.arguments))
    kinds = bound.signature.parameters
    rest = next((n for n, p in kinds.items() if p.kind is inspect.Parameter.VAR_KEYWORD), None)

    def fill(tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arguments = dict(structure.fill(tensors))
        return (), arguments | arguments.pop(rest, {})

    return fill


def dim_of(loss_weight: Any) -> Dim:
    """How the losses of micro-batches are put together, as a ``loss_weight`` that has been given
    says."""
    return None if loss_weight == ROWS else SUM if loss_weight == SUM else WEIGHTED


def weighed(
    verdict: Verdict, path: str, loss_weight: Any, weigh: Weigh, dims: Sequence[int | None]
) -> tuple[Verdict, str]:
    """The verdict with the loss at ``path`` put together as ``loss_weight`` says, and a sentence
    that says how the model contradicts this, or "" if it does not."""
    if verdict.trial is None or path not in verdict.trial.whole:
        return verdict, ""
    found, said = verdict.outputs.get(path, WEIGHTED), dim_of(loss_weight)
    others = [problem for problem in verdict.problems if problem.path != path]
    is_clear = path not in verdict.unclear
    outputs = {**verdict.outputs, path: said}
    if said != WEIGHTED:
        if is_clear and {found, said} == {None, SUM}:
            is_sum = found == SUM
            first, second = ("sum", "mean") if is_sum else ("mean", "sum")
            return verdict, (
                f"{path} is a {first} over the rows, and loss_weight={loss_weight!r} says that it "
                f"is a {second}"
            )
        return replace(verdict, outputs=outputs), ""
    if is_clear and found == SUM:
        return verdict, (
            f"{path} is a sum over the rows, and loss_weight weighs means: leave loss_weight out, "
            "or let the loss be a mean"
        )
    compared = _apart(verdict.trial, path, weigh, dims)
    more = []
    if compared is not None and compared[0]:
        apart, text = compared
        more = [Problem(path, text, is_scalar=True, difference=apart)]
    return replace(verdict, outputs=outputs, problems=[*more, *others]), ""


def _apart(
    trial: Trial, path: str, weigh: Weigh, dims: Sequence[int | None]
) -> tuple[Difference, str] | None:
    """How far the loss of a whole sample is from the weighted mean of the losses of its parts, and
    a sentence that says so; None if all weights are zero for this sample."""
    weights = numbers([weigh(tensors) for tensors in trial.each(dims)])
    if not any(weights):
        return None
    whole = trial.whole[path]
    value = weighted_sum([output[path] for output in trial.parts], shares(weights))
    largest = max(output[path].abs().nan_to_num().item() for output in trial.parts)
    so, other = told_apart(whole.item(), value.item())
    sizes = " and ".join(map(str, trial.sizes))
    return difference(whole, value, largest), (
        f"{path} is not the mean that loss_weight says: it is {so} for {sum(trial.sizes)} rows "
        f"made from those of the example, and {other} as the mean of {sizes} of them, which have "
        f"the weights {' and '.join(f'{weight:.4g}' for weight in weights)}"
    )


def with_ignored(trial: Trial, place: int, dim: int) -> Trial:
    """The sample, without outputs, with every second label of its first part replaced by IGNORED,
    the label that losses leave out. ``place`` is the labels' place among the tensors, ``dim`` their
    batch dimension."""
    tensors = list(trial.tensors)
    labels = tensors[place].clone()
    if not labels.is_floating_point() and labels.dtype.is_signed:
        first = labels.narrow(dim, 0, trial.sizes[0])
        every_second = torch.arange(first.numel(), device=first.device).view(first.shape) % 2 == 0
        first.masked_fill_(every_second, IGNORED)
    tensors[place] = labels
    return Trial(trial.sizes, trial.level, tensors, {}, [])


def remedy(
    trial: Trial,
    path: str,
    named: Sequence[tuple[str | int, int]],
    weigh: Callable[[Callable[..., Any]], Weigh],
    dims: Sequence[int | None],
    of_target: bool = False,
) -> str:
    """The ``loss_weight`` with which the losses of the parts come closest to the loss of the whole,
    as code that the user can write; "" if none fits.

    Args:
        named: the tensors that may be labels or masks: their names (as arguments of the model, or
            keys of the target; empty for a target that is a tensor) and places in the sample.
        weigh: makes the function for a micro-batch's weight from a ``loss_weight``.
        of_target: whether the tensors are parts of the target.
    """
    found: list[tuple[float, str]] = []
    for name, place in named:
        for text, function in _functions(name, trial.tensors[place], of_target):
            compared = _apart(trial, path, weigh(function), dims)
            if compared is not None and not compared[0]:
                found.append((compared[0].largest, text))
    return min(found)[1] if found else ""


def _functions(
    name: str | int, tensor: Tensor, of_target: bool
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions that a user may give as ``loss_weight``, each with its code: they count the labels
    in a tensor that a loss is a mean over, or add up a mask."""
    if tensor.is_meta or tensor.is_complex():
        return
    is_integer = not tensor.is_floating_point() and tensor.dtype.is_signed
    has_ignored = is_integer and bool((tensor == IGNORED).any())
    part = "target" if name == "" else f"target[{_quoted(name)}]"
    if is_integer and tensor.numel():
        # Losses that leave out another label mostly leave out the smallest or the largest one.
        others = [] if has_ignored else [int(tensor.amin()), int(tensor.amax())]
        for label in [IGNORED] if has_ignored else others:
            if isinstance(name, int):
                yield f"lambda target: ({part} != {label}).sum()", _Count(name, label)
                continue
            named = [_quoted(name)] * bool(name) + [f"ignore_index={label}"] * (label != IGNORED)
            for shifted in (False, True):
                given = ", ".join(named + ["shifted=True"] * shifted)
                function = tokens(name or "labels", ignore_index=label, shifted=shifted)
                yield f"fxpipe.loss_weight.tokens({given})", function
    if has_ignored:
        return
    is_mask = bool((tensor >= 0).all()) and (tensor.is_floating_point() or bool((tensor < 2).all()))
    if tensor.ndim and is_mask:
        is_argument = not of_target and name != ""
        code = (
            f"lambda {name}, **_: {name}.sum()" if is_argument else f"lambda target: {part}.sum()"
        )
        yield code, _Sum(name)


def _quoted(name: str | int) -> str:
    return f'"{name}"' if isinstance(name, str) else str(name)


@dataclass(frozen=True)
class _Sum:
    """The sum of a mask."""

    name: str | int

    def __call__(self, *target: Any, **inputs: Any) -> Tensor:
        found: Tensor = self.part(*target, **inputs).sum(dtype=torch.float64)
        return found

    def part(self, *target: Any, **inputs: Any) -> Any:
        """The tensor in the target, or among the model's arguments."""
        given: Any = target[0] if target else inputs
        return given if self.name == "" else given[self.name]


@dataclass(frozen=True)
class _Count(_Sum):
    """The number of labels that are not ``ignored``."""

    ignored: int

    def __call__(self, *target: Any, **inputs: Any) -> Tensor:
        found: Tensor = (self.part(*target, **inputs) != self.ignored).sum()
        return found
