"""The weights of the losses of micro-batches: the user's ``loss_weight`` is compared with the loss
that the model gives for a whole sample, and a ``loss_weight`` is suggested where one is needed."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir.structure import Structure
from fxpipe.ir.text import told_apart
from fxpipe.loss_weight import IGNORED, at_path, observed, tokens
from fxpipe.meaning.check import Verdict
from fxpipe.meaning.compare import Difference, difference, put_together
from fxpipe.meaning.left_out import MOST, LabelCondition
from fxpipe.meaning.loss import ROWS
from fxpipe.meaning.problem import Problem
from fxpipe.meaning.trial import Trial
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
    is_wrong = len(others) < len(verdict.problems)
    is_clear = path not in verdict.unclear and not is_wrong
    outputs = {**verdict.outputs, path: said}
    if said != WEIGHTED:
        if is_clear and {found, said} == {None, SUM}:
            is_sum = found == SUM
            first, second = ("sum", "mean") if is_sum else ("mean", "sum")
            return verdict, (
                f"{path} is a {first} over the rows, and loss_weight={loss_weight!r} says that it "
                f"is a {second}: give loss_weight={SUM if is_sum else ROWS!r}, or let the loss be "
                f"a {second}"
            )
        texts = (_apart_as_said(trial, path, loss_weight) for trial in verdict.trials)
        wrong = next((each for each in texts if is_wrong and each is not None), None)
        problems = verdict.problems if wrong is None else [wrong, *others]
        return replace(verdict, outputs=outputs, problems=problems), ""
    if is_clear and found == SUM:
        return verdict, (
            f"{path} is a sum over the rows, and loss_weight weighs means: leave loss_weight out, "
            "or let the loss be a mean"
        )
    compared = (_apart(trial, path, weigh, dims) for trial in verdict.trials)
    found_wrong = next((each for each in compared if each is not None and each[0]), None)
    more = []
    if found_wrong is not None:
        apart, text = found_wrong
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


def _apart_as_said(trial: Trial, path: str, loss_weight: str) -> Problem | None:
    """What is wrong with a loss that is said to be a mean over the rows, or a sum, for a sample;
    None if nothing is."""
    whole, parts = trial.whole[path], [output[path] for output in trial.parts]
    value = put_together(dim_of(loss_weight), parts, trial.sizes)
    largest = max(part.abs().nan_to_num().item() for part in parts)
    apart = difference(whole, value.to(whole.dtype), largest)
    if not apart:
        return None
    so, other = told_apart(whole.item(), value.item())
    sizes, few = " and ".join(map(str, trial.sizes)), 4
    of = f"{sizes} of them" if len(trial.sizes) <= few else f"{len(trial.sizes)} micro-batches"
    kind = "sum" if loss_weight == SUM else "mean"
    text = (
        f"{path} is not the {kind} over the rows that loss_weight={loss_weight!r} says: it is {so} "
        f"for {sum(trial.sizes)} rows made from those of the example, and {other} as the {kind} of "
        f"those of {of}"
    )
    return Problem(path, text, is_scalar=True, difference=apart)


@dataclass(frozen=True)
class _Remedy:
    """A function that a user may give as ``loss_weight``, with its code.

    ``is_guess``: whether nothing but its numbers tells that a loss is a mean by it. It may be the
    number of rows of some class. Masks, and labels that losses leave out, are made for it.
    """

    code: str
    function: Callable[..., Any]
    is_guess: bool = False


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
    trials: Sequence[Trial],
    path: str,
    named: Sequence[tuple[str | int, int]],
    weigh: Callable[[Callable[..., Any]], Weigh],
    dims: Sequence[int | None],
    of_target: bool = False,
    conditions: Sequence[LabelCondition] = (),
    weight: tuple[str, Tensor] | None = None,
) -> str:
    """The ``loss_weight`` with which the losses of the parts give the loss of the whole in each of
    several samples, as code that the user can write; "" if there is none. Of several that do, one
    that may have been meant for it comes ahead of others, then the one that comes closest.

    Args:
        trials: the samples. In one of them a count of something else may be in the same proportion.
        named: the tensors that may be labels or masks: their names (as arguments of the model, or
            keys of the target; empty for a target that is a tensor) and places in the sample.
        weigh: makes the function for a micro-batch's weight from a ``loss_weight``.
        of_target: whether the tensors are parts of the target.
        conditions: by what the loss may tell which values count.
        weight: those of the classes in a cross entropy, and what the user's code calls them.
    """
    found: list[tuple[bool, float, str]] = []
    for name, place in named:
        values = [trial.tensors[place] for trial in trials]
        first = values[0]
        if first.is_meta or first.is_complex() or first.layout != torch.strided:
            continue
        for each in _Remedies(name, values, of_target, conditions, weight):
            farthest = _farthest(trials, path, weigh(each.function), dims)
            if farthest is not None:
                found.append((each.is_guess, farthest, each.code))
    return min(found)[2] if found else ""


def _farthest(
    trials: Sequence[Trial], path: str, weigh: Weigh, dims: Sequence[int | None]
) -> float | None:
    """How far the weighted losses of the parts are from those of the whole samples at most; None if
    this is more than rounding errors in any sample, or if the weights are zero in all; or in one
    that has a loss all the same, so that the loss is no mean by these weights."""
    compared = [_apart(trial, path, weigh, dims) for trial in trials]
    for trial, found in zip(trials, compared, strict=True):
        whole = trial.whole[path]
        if found is None and bool(whole.isfinite()) and bool(whole):
            return None
    apart = [each[0] for each in compared if each is not None]
    return None if not apart or any(apart) else max(each.largest for each in apart)


class _Remedies:
    """Functions that a user may give as ``loss_weight``: they count the values in a tensor that a
    loss is a mean over, or add up a mask.

    Args:
        name: that of the tensor, see :func:`remedy`.
        values: the tensor in several samples.
        of_target: whether it is a part of the target, and no argument of the model.
        conditions: by what the loss may tell which values count.
        weight: those of the classes in a cross entropy, and what the user's code calls them.
    """

    def __init__(
        self,
        name: str | int,
        values: Sequence[Tensor],
        of_target: bool,
        conditions: Sequence[LabelCondition],
        weight: tuple[str, Tensor] | None,
    ) -> None:
        self.name, self.conditions, self.weight = name, conditions, weight
        self.has_dims = values[0].ndim > 0
        self.is_text = values[0].ndim == 2  # a row of tokens, which may be those to predict
        self.tensor = torch.cat([each.flatten() for each in values])
        self.is_argument = not of_target and name != ""
        self.is_integer = not self.tensor.is_floating_point() and self.tensor.dtype.is_signed
        self.has_ignored = self.is_integer and bool((self.tensor == IGNORED).any())

    def __iter__(self) -> Iterator[_Remedy]:
        if self.is_integer and self.tensor.numel():
            yield from self._weighted_classes()
            yield from self._labels()
        if self.has_ignored:
            return
        if bool(((self.tensor == 0) | (self.tensor == 1)).all()):
            yield self._of("{}.sum()", _add)
            yield self._of("({} == 0).sum()", functools.partial(_count, torch.eq, 0))
            return
        if self.tensor.is_floating_point() and bool(self.tensor.isnan().any()):
            yield self._observed()
        yield from self._compared()
        if self.has_dims and bool(((self.tensor >= 0) & self.tensor.isfinite()).all()):
            yield self._of("{}.sum()", _add, is_guess=True)

    def _left_out(self) -> Iterator[tuple[int, bool]]:
        """Labels that a loss may leave out, and whether that is a guess. Losses that leave out
        another one than IGNORED mostly leave out the smallest or the largest one, or compare labels
        with it."""
        if self.has_ignored:
            yield IGNORED, False
            return
        equal = [c.number for c in self.conditions[:MOST] if c.comparison == "eq"]
        told = [int(number) for number in equal if math.isfinite(number)]
        ends = int(self.tensor.amin()), int(self.tensor.amax())
        for label in dict.fromkeys((*told, *ends)):
            yield label, label not in told

    def _labels(self) -> Iterator[_Remedy]:
        """Counts of labels that are not left out."""
        quoted = [_quoted(self.name)] * bool(self.name)
        for label, is_guess in self._left_out():
            if isinstance(self.name, int):
                count = functools.partial(_count, torch.ne, label)
                yield self._of(f"({{}} != {label}).sum()", count, is_guess)
                continue
            named = quoted + [f"ignore_index={label}"] * (label != IGNORED)
            for shifted in (False, True) if self.is_text else (False,):
                given = ", ".join(named + ["shifted=True"] * shifted)
                function = tokens(self.name or "labels", ignore_index=label, shifted=shifted)
                yield _Remedy(f"fxpipe.loss_weight.tokens({given})", function, is_guess)

    def _weighted_classes(self) -> Iterator[_Remedy]:
        """The sum of the weights of the labels' classes, by which a cross entropy divides: of all
        labels, or of those that are not left out."""
        if self.weight is None:
            return
        said, weight = self.weight
        every = "{}", self.tensor, IGNORED, False
        of_others = (
            (f"{{0}}[{{0}} != {label}]", self.tensor[self.tensor != label], label, is_guess)
            for label, is_guess in self._left_out()
            if bool((self.tensor == label).any())
        )
        for labels, known, label, is_guess in (every, *of_others):
            if known.numel() and int(known.amin()) >= 0 and int(known.amax()) < len(weight):
                weigh = functools.partial(_weigh_classes, weight, label)
                yield self._of(f"{said}[{labels}].sum()", weigh, is_guess)

    def _observed(self) -> _Remedy:
        if isinstance(self.name, int):
            return self._of("(~{}.isnan()).sum()", lambda values: (~values.isnan()).sum())
        given = _quoted(self.name) if self.name else ""
        function = observed(self.name or "target")
        return _Remedy(f"fxpipe.loss_weight.observed({given})", function)

    def _compared(self) -> Iterator[_Remedy]:
        """Counts of values that a number tells from others with which the loss compares them."""
        for condition in self.conditions[:MOST]:
            if not math.isfinite(condition.number):
                continue  # a loss compares what it has computed with that, and no labels
            for sign, compare in _SIGNS.get(condition.comparison, {}).items():
                if self.is_integer and sign == "!=":
                    continue  # see _labels
                count = functools.partial(_count, compare, condition.number)
                yield self._of(f"({{}} {sign} {condition.number:g}).sum()", count)

    def _of(self, text: str, count: Callable[[Tensor], Tensor], is_guess: bool = False) -> _Remedy:
        """A function of the tensor, with its code; "{}" stands for the tensor."""
        if self.is_argument:
            argument, *keys = str(self.name).split(".")
            part = argument + "".join(f"[{_quoted(key)}]" for key in keys)
            code = f"lambda {argument}, **_: {text.format(part)}"
        else:
            part = f"target[{_quoted(self.name)}]" if self.name != "" else "target"
            code = f"lambda target: {text.format(part)}"
        return _Remedy(code, _Function(self.name, count), is_guess)


_SIGNS: dict[str, dict[str, Callable[..., Tensor]]] = {
    "eq": {"!=": torch.ne, "==": torch.eq},
    "lt": {">=": torch.ge, "<": torch.lt},
    "le": {">": torch.gt, "<=": torch.le},
}
"""By what a loss compares values, how those that count may be told: the likelier way first."""


def _add(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float64)


def _weigh_classes(weight: Tensor, left_out: int, labels: Tensor) -> Tensor:
    return weight.to(labels.device)[labels[labels != left_out]].sum(dtype=torch.float64)


def _count(compare: Callable[..., Tensor], number: float, values: Tensor) -> Tensor:
    return compare(values, number).sum()


def _quoted(name: str | int) -> str:
    return f'"{name}"' if isinstance(name, str) else str(name)


@dataclass(frozen=True)
class _Function:
    """A function of one tensor in the target, or among the model's arguments."""

    name: str | int
    count: Callable[[Tensor], Tensor]

    def __call__(self, *target: Any, **inputs: Any) -> Tensor:
        if not target:
            return self.count(at_path(inputs, str(self.name)))
        return self.count(target[0] if self.name == "" else target[0][self.name])
