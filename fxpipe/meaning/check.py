"""The check: a model has to give the same for the whole of a sample as for the parts of the sample,
put together.

::

    example ── sampled: 4 rows ─┬─ model ─────────────────────────── whole ┐
                                ├─ model on row 0 ───────┐                 ├─ alike?
                                └─ model on rows 1 to 3 ─┴─ put together ──┘

For each tensor among the outputs, the check finds out which way of putting its parts together gives
the whole: they are joined along a dimension, averaged, added up, or all the same. The parts have
different sizes and the values differ from the example's, so that two ways hardly ever give the same
by chance; if they do, another sample is taken. A small difference in one of several samples is no
reason to refuse a call: in a model that takes decisions (the largest of some scores, say), rounding
errors may tip the balance.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir.errors import is_the_models
from fxpipe.meaning.as_said import as_said, is_plain
from fxpipe.meaning.compare import (
    MEAN,
    Reading,
    computed_with,
    difference,
    growing,
    joined_difference,
    put_together,
    reading,
    tolerance,
    unit_of,
)
from fxpipe.meaning.drawn import UNIFORM
from fxpipe.meaning.listed import is_a_row
from fxpipe.meaning.problem import Problem
from fxpipe.meaning.rounded import NOISE, RUNS, Rounded
from fxpipe.meaning.sample import (
    GIVEN,
    LEVELS,
    MIXED,
    WHOLE,
    has_fractions,
    part,
    sampled,
)
from fxpipe.meaning.single_numbers import (
    confirmed,
    no_mean,
    told_from_a_mean,
    with_small_terms,
)
from fxpipe.meaning.trial import Question, Trial, is_number
from fxpipe.meaning.widened import WIDE, widened, without_autocast
from fxpipe.runtime.microbatch import ANY, LISTED, SUM, Dim
from fxpipe.trace import checks

# An output that differs in some samples only is a problem if it differs in two of them or more, and
# in a SMALL share of its elements at least; or if it differs in a LARGE share in one sample. Less
# may be a decision between nearly equal values.
SMALL = 0.05
LARGE = 0.5


@dataclass
class Verdict:
    """The result of the check of one candidate."""

    trials: list[Trial] = field(default_factory=list)
    """The samples that have been taken, in their order; with all outputs for the last one, and with
    numbers only for those before it."""
    outputs: dict[str, Dim] = field(default_factory=dict)
    """How each output is put together, by its path."""
    problems: list[Problem] = field(default_factory=list)
    slight: list[Problem] = field(default_factory=list)
    """Differences for some samples only, or in a few elements: a decision between nearly equal
    values (a top-k, say) that rounding errors have tipped. They are no reason to refuse."""
    failure: Exception | None = None
    """The error that the model has raised for a part of a sample, or for the whole of it."""
    takes_parts: bool = True
    """Whether the model runs on the parts of a sample; False if it runs only on the whole."""
    unclear: set[str] = field(default_factory=set)
    """The outputs whose values do not tell whether they are means or sums."""
    same: set[str] = field(default_factory=set)
    """The outputs that are the same for the parts of samples as for the whole."""
    refused_sizes: frozenset[int] = frozenset()
    """Sizes of parts that are too small: the model gives something else for them."""
    goes_by_size: bool = False
    """Whether the parts of the first sizes do not make the whole, and those of others do: then it
    may be so for other numbers of rows, too."""
    mixed: Problem | None = None
    """A problem that occurs only where integers of several rows are mixed (level "mixed")."""
    uniform: float = UNIFORM[0]
    """What has stood for random numbers from 0 to 1."""

    @property
    def trial(self) -> Trial | None:
        """The last sample; None if the model takes none."""
        return self.trials[-1] if self.trials else None

    @property
    def is_wrong(self) -> bool:
        """Whether these dimensions cannot be the batch dimensions."""
        return not self.takes_parts or any(not problem.is_scalar for problem in self.problems)

    @property
    def is_exact(self) -> bool:
        """Whether all outputs have been compared, and equal the model's."""
        return self.trial is not None and not self.problems

    def is_better_than(self, likeliest: Verdict) -> bool:
        """Whether the outputs are the model's, and say that the batch is cut: some of them depend
        on the rows, and so do all that have rows by the likeliest candidate, unless that is
        wrong."""
        if not self.is_exact or self.outputs.keys() <= self.same:
            return False
        return likeliest.is_wrong or likeliest.joined <= self.joined

    def is_joined_along(self, dims: Sequence[int | None]) -> bool:
        """Whether an output is joined along a dimension along which inputs are cut, by their batch
        dimensions ``dims``; also where no output is joined."""
        return not self.joined or any(self.outputs[path] in dims for path in self.joined)

    @property
    def joined(self) -> set[str]:
        """The paths of those outputs that are joined along a batch dimension."""
        return {path for path, dim in self.outputs.items() if isinstance(dim, int)}


def check(
    question: Question, ignored: Callable[[str], bool] = lambda path: False, *, is_likely: bool
) -> Verdict:
    """Check whether the outputs for the parts of a mini-batch, put together, are the outputs for
    the whole.

    The first of the sizes are tried by themselves. If the parts do not give the whole then, the
    other sizes decide. If with these they do, parts of the smallest of the first sizes are refused.

    Args:
        ignored: says of an output's path whether the output is left out of the comparison.
        is_likely: whether one sample is enough; for an unlikely candidate several samples are
            taken, and have to fit with mixed integers, too, so that it is not accepted by chance.
    """
    few, *more = question.sizes
    is_enough = is_likely and not question.counts
    of_rows = _of_likely_rows if is_likely else _of_any_rows
    verdict = of_rows(replace(question, sizes=(few,)), ignored, is_enough)
    if not verdict.is_exact and more:
        # Where the first samples differ, a single one that does not may do so by chance.
        is_enough = is_enough and not verdict.problems
        larger = of_rows(replace(question, sizes=more), ignored, is_enough)
        if larger.is_exact and verdict.trial is not None and verdict.is_wrong:
            larger.refused_sizes = frozenset({min(few)})
        larger.goes_by_size = larger.is_exact
        verdict = larger
    if verdict.is_exact and (verdict.mixed is not None or verdict.slight):
        _confirm(verdict, question, ignored)
    return verdict


def check_graph(question: Question) -> Verdict:
    """The verdict where a graph of the model is run on the parts of samples, of the first sizes
    only: where it is no clear one, it does not tell whether the graph or the rows are the reason.
    """
    few, *_ = question.sizes
    return _checked(replace(question, sizes=(few,)), lambda path: False, True, LEVELS)


def _confirm(verdict: Verdict, question: Question, ignored: Callable[[str], bool]) -> None:
    """Where something has differed that may do no harm, let the example itself decide, cut into its
    own micro-batches: in a few of its rows what mixes them may be rare. (Of a graph's edges, say,
    hardly two of a handful meet at a node.)"""
    own = replace(question, sizes=question.sizes[-1:])
    trial = _trial(own, 0, None, Verdict(), (GIVEN,))
    if trial is None:
        return
    verdict.problems = [
        found
        for path, found in _but_for_rounding(own, trial, _Wide(own))
        if isinstance(found, Problem) and not ignored(path)
        if found.difference is None or found.difference.share >= SMALL
    ]
    if verdict.problems:
        verdict.trials = [*(each.of_numbers() for each in verdict.trials), trial]
        verdict.mixed, verdict.slight = None, []


def _of_any_rows(question: Question, ignored: Callable[[str], bool], is_enough: bool) -> Verdict:
    """The verdict of samples of these sizes, of the first level that the model takes."""
    return _checked(question, ignored, is_enough, question.levels)


def _of_likely_rows(question: Question, ignored: Callable[[str], bool], is_enough: bool) -> Verdict:
    """The verdict of samples of these sizes. If the parts do not give the whole for a sample whose
    integers are mixed, this counts only if they do not for whole rows either: the model may not be
    made for rows with mixed integers."""
    verdict = _of_any_rows(question, ignored, is_enough)
    mixed = next((trial for trial in verdict.trials if trial.level == MIXED), None)
    if mixed is None or not verdict.is_wrong or not _has_what_is_mixed(question, mixed.sizes):
        return verdict
    less = _checked(question, ignored, False, LEVELS[1:])
    if less.trial is None or less.is_wrong:
        return verdict
    less.mixed = next(problem for problem in verdict.problems if not problem.is_scalar)
    return less


def _has_what_is_mixed(question: Question, sizes: Sequence[int]) -> bool:
    """Whether some sample whose integers are mixed differs from the one of whole rows. Where inputs
    have real numbers only, none does, and to ask for whole rows were to ask the same again."""
    own, dims, counts = question.tensors, question.dims, question.counts
    for seed in question.seeds:
        mixed, whole = (
            sampled(own, dims, sizes, level, seed, counts, seed in question.twins)
            for level in (MIXED, WHOLE)
        )
        if not all(map(_is_same, mixed, whole)):
            return True
    return False


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values of samples are known to be the same."""
    are_known = all(
        isinstance(t, Tensor) and t.layout == torch.strided and not t.is_meta for t in (one, other)
    )
    return are_known and torch.equal(one, other)


def _checked(
    question: Question,
    ignored: Callable[[str], bool],
    is_enough: bool,
    levels: Sequence[str],
) -> Verdict:
    """The verdict of several samples, all of the first of these levels that the model takes."""
    verdict = Verdict()
    fits: dict[str, tuple[Dim, ...]] = {}
    failed: dict[str, list[Problem]] = {}
    trial: Trial | None = None
    wide = _Wide(question)
    count = 0
    remaining = set(question.needed)
    for seed in question.seeds:
        taken = _trial(question, seed, trial, verdict, levels)
        if taken is None:
            break
        if trial is not None and _is_empty(taken.whole):
            continue  # any way of putting parts together fits
        verdict.trials = [*(each.of_numbers() for each in verdict.trials), taken]
        trial, count = taken, count + 1
        remaining.discard(seed)
        if question.is_void():
            break
        for path, compared in _but_for_rounding(question, trial, wide):
            found = told_from_a_mean(question, trial, path, compared)
            if ignored(path):
                fits[path] = (LISTED,) if is_a_row(path) else _by_shape(trial, path)
                continue
            if isinstance(found, Problem):
                failed.setdefault(path, []).append(found)
                fits.setdefault(path, ())
            else:
                before = fits.get(path) or found
                fits[path] = tuple(way for way in before if way in found) or found
                if not set(before) & set(found):  # each sample has a way, and another one
                    means = (confirmed(each, path, MEAN) for each in verdict.trials)
                    if wrong := list(filter(None, means)):
                        failed.setdefault(path, []).extend(wrong)
        if not question.has_values:
            break  # all samples are the same
        if all(_is_refuted(trial, path, failed.get(path, ())) for path in fits):
            break
        clear = all(_is_clear(ways) for ways in fits.values()) and not failed
        if clear and is_enough and not remaining and not _may_fit_by_chance(trial, question.dims):
            break
    for problems in failed.values():
        share = max((p.difference.share for p in problems if p.difference), default=1.0)
        often = len(problems) == count or (len(problems) > 1 and share >= SMALL) or share > LARGE
        (verdict.problems if often else verdict.slight).append(problems[0])
    if verdict.trial is not None:  # what is accepted although it differs is joined by its shape
        for path in failed.keys() & verdict.trial.whole.keys():
            fits[path] = fits[path] or _by_shape(verdict.trial, path)
    verdict.outputs = {path: _way(ways) for path, ways in fits.items() if ways}
    told = {problem.path for problem in verdict.problems}
    verdict.unclear = {path for path, ways in fits.items() if not _is_clear(ways)} - told
    verdict.same = {path for path, ways in fits.items() if ANY in ways}
    return verdict


def _is_refuted(trial: Trial, path: str, problems: Sequence[Problem]) -> bool:
    """Whether further samples cannot change what is said of an output: it has rows, and for one
    sample it has differed in so many elements that it is a problem whatever others give. (Of single
    numbers several samples tell how they are made.)"""
    is_large = any(p.difference is not None and p.difference.share > LARGE for p in problems)
    return is_large and bool(_by_shape(trial, path)) and not is_number(trial.whole[path])


class _Wide:
    """Numbers, such as losses, of the samples of a question, computed in single precision at least,
    where a lower one has taken part: its rounding errors would hide what is no mean, or look like
    that."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._is_met = True  # whether a lower precision may take part
        self._known: tuple[Trial, list[dict[str, Any]]] | None = None

    def compared(
        self, trial: Trial, path: str, found: tuple[Dim, ...] | Problem
    ) -> tuple[Dim, ...] | Problem:
        """How a number is put together, or what differs, by what it is in single precision, which
        the sample has from then on; what has been found (``found``) where that is no other."""
        whole = trial.whole.get(path)
        if not is_number(whole) or whole.is_meta or not whole.is_floating_point():
            return found
        if not isinstance(found, Problem) and unit_of(whole) <= torch.finfo(WIDE).eps:
            return found
        if self._known is None or self._known[0] is not trial:
            self._known = trial, self._outputs(trial) if self._is_met else []
        numbers: list[Any] = [output.get(path) for output in self._known[1]]
        if not numbers or not all(map(is_number, numbers)):
            return found
        for output, number in zip((trial.whole, *trial.parts), numbers, strict=True):
            output[path] = number
        with without_autocast():
            return _tensors(path, numbers[0], numbers[1:], trial)

    def _outputs(self, trial: Trial) -> list[dict[str, Any]]:
        """The outputs for the whole sample and for its parts; none where no lower precision has
        taken part, or where the model does not take a higher one."""
        question, tensors = self._question, trial.tensors
        starts = accumulate(trial.sizes, initial=0)
        try:
            with widened() as mode:
                whole = part(tensors, [None] * len(tensors), 0, 0)
                found = [question.outputs(whole, sum(trial.sizes))[0]]
                self._is_met = mode.met
                for each, rows, start in zip(
                    trial.each(question.dims), trial.sizes, starts, strict=False
                ):
                    if self._is_met:
                        found.append(question.outputs(each, rows, start)[0])
        except Exception as error:
            if not is_the_models(error):
                raise
            self._is_met = False
        return found if self._is_met else []


def _but_for_rounding(
    question: Question, trial: Trial, wide: _Wide
) -> Iterator[tuple[str, tuple[Dim, ...] | Problem]]:
    """How each output is put together, or what differs. An output that differs by no more than
    rounding errors make of it is joined by its shape: of a difference of equal numbers, say, errors
    are all that is left."""

    @functools.cache
    def rounded() -> list[tuple[dict[str, Any], float]]:
        return [_rounded(question, trial, seed, dtypes) for seed in range(RUNS)]

    dtypes = set[torch.dtype]()
    for path, given in _compared(trial, question.said):
        found = wide.compared(trial, path, given)
        if isinstance(found, Problem) and _is_double(trial.whole.get(path)) and rounded():
            # A value that has been computed in float32, within the model only, say.
            with computed_with(dtypes):
                found = dict(_compared(trial, question.said))[path]
        apart = found.difference if isinstance(found, Problem) else None
        ways = _by_shape(trial, path) if apart is not None and apart.share else ()
        whole = trial.whole[path] if ways else None
        if apart is not None and isinstance(whole, Tensor) and whole.is_floating_point():
            scale = max(largest for _, largest in rounded())
            others = [outputs.get(path) for outputs, _ in rounded()]
            effects = [
                difference(whole, other).largest
                for other in others
                if isinstance(other, Tensor) and other.shape == whole.shape
            ]
            allowed = min(tolerance(whole) * scale, NOISE * max(effects, default=0.0))
            if apart.largest <= allowed:
                yield path, ways
                continue
        yield path, with_small_terms(trial, path, found, rounded)


def _is_double(value: Any) -> bool:
    """Whether a value has double precision."""
    return isinstance(value, Tensor) and value.dtype in (torch.float64, torch.complex128)


def _rounded(
    question: Question, trial: Trial, seed: int, dtypes: set[torch.dtype]
) -> tuple[dict[str, Any], float]:
    """The outputs for the whole sample, with other last bits, and the largest number that has been
    rounded; no outputs if the model does not take these bits. The dtypes of what has been rounded
    are added to ``dtypes``."""
    whole = part(trial.tensors, [None] * len(trial.tensors), 0, 0)
    try:
        with Rounded(seed) as mode:
            outputs, _ = question.outputs(whole, sum(trial.sizes))
    except Exception as error:
        if not is_the_models(error):
            raise
        return {}, 0.0
    dtypes |= mode.dtypes
    return outputs, mode.largest


def is_joined(trial: Trial, outputs: Mapping[str, Dim]) -> bool:
    """Whether the parts, put together, are the whole as nearly as a graph has to be the model."""
    for path, whole in trial.whole.items():
        parts = [output[path] for output in trial.parts]
        if isinstance(whole, Tensor):
            if whole.layout != torch.strided:
                return False
            dim, tolerance = outputs[path], checks.EXPORT_TOLERANCE
            if isinstance(dim, int):
                errors = checks.with_rounding(tolerance, whole.dtype)
                apart: object = joined_difference(whole, parts, dim, errors)
            else:
                together = put_together(dim, parts, trial.sizes).to(whole.dtype)
                apart = checks.difference(whole, together, tolerance)
            if apart:
                return False
    return True


def differs(trial: Trial, path: str) -> bool:
    """Whether the parts of a sample do not give what the whole gives for an output."""
    return any(isinstance(found, Problem) for other, found in _compared(trial, {}) if other == path)


def _by_shape(trial: Trial, path: str) -> tuple[Dim, ...]:
    """How an output is put together whose values are not compared: by its shapes."""
    values = [trial.whole[path], *(output.get(path) for output in trial.parts)]
    if not all(isinstance(value, Tensor) for value in values):
        return ()
    try:
        rows = growing(values[0], values[1:])
    except ValueError:  # its shapes do not fit together
        return ()
    return () if rows is None else (rows,)


def _goes_by_values(trial: Trial) -> bool:
    """Whether the size of some output does not follow from the number of rows. It then depends on
    values, so that the parts may have fitted the whole by chance."""
    rows = sum(trial.sizes)
    for path, whole in trial.whole.items():
        dim = next(iter(_by_shape(trial, path)), None)
        if isinstance(dim, int) and any(
            output[path].shape[dim] * rows != whole.shape[dim] * size
            for size, output in zip(trial.sizes, trial.parts, strict=True)
        ):
            return True
    return False


def _may_fit_by_chance(trial: Trial, dims: Sequence[int | None]) -> bool:
    """Whether the parts of one sample may give the whole although those of another do not. So it is
    where integers or flags go into a mean (each row of the sample may have as many labels), also as
    real numbers, or values that are missing; or where they come out (places of largest values,
    say), for there are few different ones; and where sizes of outputs go by values."""
    cut = [t for t, dim in zip(trial.tensors, dims, strict=True) if dim is not None]
    values = [value for value in trial.whole.values() if isinstance(value, Tensor)]
    counts = any(map(_may_be_counted, cut)) and not all(value.ndim for value in values)
    return counts or any(map(_is_of_integers, values)) or _goes_by_values(trial)


def _may_be_counted(value: Any) -> bool:
    """Whether a mean may be one over some values of an input: integers, flags or known ones."""
    if not isinstance(value, Tensor) or value.is_complex() or value.layout != torch.strided:
        return False
    if value.is_meta:
        return _is_of_integers(value)
    has_only_fractions = value.is_floating_point() and has_fractions(value)
    return not has_only_fractions or not bool(value.isfinite().all())


def _is_of_integers(value: Any) -> bool:
    is_of_tensors = isinstance(value, Tensor)
    return is_of_tensors and not (value.is_floating_point() or value.is_complex())


def _is_clear(ways: tuple[Dim, ...]) -> bool:
    """Whether there is one way, or several of which none is a sum: they give the same result."""
    return len(ways) < 2 or SUM not in ways


def _way(ways: tuple[Dim, ...]) -> Dim:
    """The way to put an output together, where several fit. A value that is the same in all parts
    (a penalty on weights) is averaged: then its gradient is right as well, which it would not be
    if the first part's value were taken."""
    return ways[0] if len(ways) == 1 and ways[0] != ANY else MEAN if ANY in ways else ways[0]


def _trial(
    question: Question, seed: int, before: Trial | None, verdict: Verdict, levels: Sequence[str]
) -> Trial | None:
    """Run the model on one sample and on its parts. None if the model takes no sample.

    The first sample is tried with the levels and sizes in order, until the model takes one; the
    samples after it (``before`` is the last one) have the same sizes and, if the model takes that,
    the same level, and other values.
    """
    if before is None:
        ways = _ways(question, levels)
    else:
        ways = ((before.sizes, level) for level in levels[levels.index(before.level) :])
    first: Trial | None = None  # of those that say nothing, taken where all are so
    for sizes, level in ways:
        own, dims, counts = question.tensors, question.dims, question.counts
        tensors = sampled(own, dims, sizes, level, seed, counts, seed in question.twins)
        trial = Trial(sizes, level, tensors, {}, [])
        try:
            whole = part(tensors, [None] * len(tensors), 0, 0)
            outputs, history = question.outputs(whole, sum(sizes))
            trial.whole.update(outputs)
            trial.histories.append(history)
        except Exception as error:
            if not is_the_models(error):
                raise
            verdict.failure = verdict.failure or error
            continue
        try:
            starts = accumulate(sizes, initial=0)
            for tensors, rows, start in zip(trial.each(question.dims), sizes, starts, strict=False):
                outputs, history = question.outputs(tensors, rows, start)
                trial.parts.append(outputs)
                trial.histories.append(history)
        except Exception as error:
            if not is_the_models(error):
                raise
            verdict.failure, verdict.takes_parts = error, False
            if question.run_parts is not None:
                return None
            continue
        says_nothing = before is None and _is_empty(trial.whole)
        if says_nothing and level != GIVEN:
            first = first or trial
            continue
        verdict.failure, verdict.takes_parts = None, True
        return first if says_nothing and first is not None else trial
    return None


def _ways(question: Question, levels: Sequence[str]) -> Iterator[tuple[tuple[int, ...], str]]:
    """The sizes of the parts and the levels of a sample, in the order in which they are tried."""
    several = [sizes for sizes in question.sizes if len(sizes) > 1]
    return ((sizes, level) for sizes in several for level in levels)


def _is_empty(output: dict[str, Any]) -> bool:
    """Whether some output fits its parts however these are put together: all of its values are NaN,
    or it is one number and that is infinite, as the CTC loss of a text that is too long."""
    return any(
        bool(t.isnan().all()) or (is_number(t) and bool(t.isinf().all()))
        for t in output.values()
        if isinstance(t, Tensor) and t.is_floating_point() and t.numel() and not t.is_meta
    )


def _compared(
    trial: Trial, said: Mapping[str, Dim]
) -> Iterator[tuple[str, tuple[Dim, ...] | Problem]]:
    lists = _lists_of_rows(trial)
    for path in lists:
        yield path, _list_of_rows(path, trial)
    within = tuple(f"{path}[" for path in lists)
    for path, whole in trial.whole.items():
        if path.startswith(within):
            continue
        if is_a_row(path):
            yield path, _of_a_row(path, whole, trial)
            continue
        if not all(path in output for output in trial.parts):
            yield path, Problem(path, f"{path} is there for some numbers of rows only")
            continue
        parts = [output[path] for output in trial.parts]
        if path in said and all(map(is_plain, (whole, *parts))):
            yield path, as_said(path, said[path], whole, parts, trial.sizes)
        elif isinstance(whole, Tensor):
            yield path, _tensors(path, whole, parts, trial)
        else:
            yield path, _constants(path, whole, parts)
    for output in trial.parts:
        for path in sorted(output.keys() - trial.whole.keys()):
            if not path.startswith(within):
                yield path, Problem(path, f"{path} is there for some numbers of rows only")


_ELEMENT = re.compile(r"\[\d+\]")


def _lists_of_rows(trial: Trial) -> list[str]:
    """The paths of the lists in the output that have as many elements as there are rows, for the
    whole of a sample and for each of its parts; of nested ones the outer lists only."""
    lengths = [_lengths(output) for output in (trial.whole, *trial.parts)]
    rows = [sum(trial.sizes), *trial.sizes]
    found: list[str] = []
    for path in lengths[0]:
        is_nested = path.startswith(tuple(f"{outer}[" for outer in found))
        if not is_nested and [each.get(path) for each in lengths] == rows:
            found.append(path)
    return found


def _lengths(output: Mapping[str, Any]) -> dict[str, int]:
    """The number of elements of each list in an output, by the list's path."""
    found: dict[str, set[str]] = {}
    for path in output:
        for element in _ELEMENT.finditer(path):
            found.setdefault(path[: element.start()], set()).add(element[0])
    return {path: len(elements) for path, elements in found.items()}


def _list_of_rows(path: str, trial: Trial) -> Problem:
    sizes = " and ".join(map(str, trial.sizes))
    text = (
        f"{path} is a list that has one element for each row ({sum(trial.sizes)} of them for "
        f"{sum(trial.sizes)} rows, {sizes} for parts of {sizes}), and the inputs are tensors, so "
        "that a pipeline would put together elements of different rows"
    )
    return Problem(path, text, is_list_of_rows=True)


def _of_a_row(path: str, whole: Any, trial: Trial) -> tuple[Dim, ...] | Problem:
    """Compare an output that belongs to one row, in a list with an element for each row. Exactly
    one of the parts has it."""
    rows = sum(trial.sizes)
    parts = [output[path] for output in trial.parts if path in output]
    if len(parts) != 1:
        return Problem(path, f"{path} is there for some numbers of rows only")
    if not isinstance(whole, Tensor) or not isinstance(parts[0], Tensor):
        row = path[: path.index("]", path.index("[*")) + 1]
        has_tensors = any(
            isinstance(value, Tensor) and other.startswith(row)
            for other, value in trial.whole.items()
        )
        if has_tensors and (whole is parts[0] or bool(whole == parts[0])):
            return (LISTED,)
        return Problem(path, f"{path} is {whole!r} for {rows} rows, and {parts[0]!r} for fewer")
    if whole.is_meta:
        return (LISTED,)
    apart = difference(whole, parts[0])
    if not apart:
        return (LISTED,)
    text = f"{path} depends on which other rows there are: in a part of {rows} rows it differs"
    return Problem(path, f"{text} by {apart}", difference=apart)


def _constants(path: str, whole: Any, parts: list[Any]) -> tuple[Dim, ...] | Problem:
    try:
        if all(bool(whole == each) for each in parts):
            return (ANY,)
    except Exception:  # a comparison of the user's own
        return (ANY,)
    is_number = isinstance(whole, int | float) and not isinstance(whole, bool)
    if is_number and sum(parts) == whole:
        return (SUM,)
    # An object that is not equal to itself, such as a generator of the user's, says nothing.
    if not isinstance(whole, (int, float, bool, str, tuple)):
        return (ANY,)
    return Problem(
        path,
        f"{path} is {whole!r} and depends on the batch size, so a pipeline would return the value "
        "for a micro-batch: return tensors instead, and compute this value from them outside of "
        "the model",
    )


def _tensors(path: str, whole: Tensor, parts: list[Any], trial: Trial) -> tuple[Dim, ...] | Problem:
    shape = tuple(whole.shape)
    sizes = " and ".join(map(str, trial.sizes))
    rows = sum(trial.sizes)
    if not all(isinstance(each, Tensor) for each in parts):
        return Problem(path, f"{path} is a tensor for some numbers of rows only")
    if whole.layout.__str__() != "torch.strided":
        return (0,) if whole.ndim else (MEAN,)
    try:
        found: Reading = reading(whole, parts, trial.sizes)
    except ValueError as error:
        (differing,) = error.args
        longest = [d for d in differing if max(p.shape[d] for p in parts) == whole.shape[d]]
        if len(longest) == len(differing) - 1 > 0:
            each = " and ".join(str(part.shape[longest[0]]) for part in parts)
            return Problem(
                path,
                f"dimension {longest[0]} of {path}, {shape} for {rows} rows, depends on which rows "
                f"there are: it has size {each} for {sizes} of them, and micro-batches of "
                "different sizes cannot be joined",
                remedy="give it one size for all rows, as total_length=x.shape[1] does in "
                "torch.nn.utils.rnn.pad_packed_sequence, in a module of its own within the model "
                "that also packs (as each length is compiled by itself then, pad mini-batches to "
                "few lengths, multiples of 64, say); or compute the size from the whole batch "
                "ahead of the call, and give it to the model as an argument, an int; or give "
                "chunks=1",
            )
        if len(differing) > 1:
            return Problem(
                path,
                f"dimensions {differing} of {path}, {shape} for {rows} rows, all depend on the "
                "batch size, and a pipeline computes it for each micro-batch by itself",
                remedy="compute it outside of the model, from what it is made of, or give "
                "chunks=1; if that of each micro-batch is wanted, give out_dims with one of these "
                'dimensions, along which micro-batches are joined, and check="warn"',
            )
        others = ", ".join(str(tuple(each.shape)) for each in parts)
        return Problem(
            path,
            f"{path} has shape {shape} for {rows} rows, and {others} for {sizes} of them, which "
            "cannot be joined to the former: the model mixes rows",
        )
    if found.dims:
        return found.dims
    apart = found.difference
    if whole.ndim == 0 and whole.is_floating_point():
        return no_mean(path, whole, parts, trial, apart)
    if any(p.shape != whole.shape for p in parts):
        return Problem(
            path,
            f"{path}, {shape} for {rows} rows, depends on which other rows there are: joined of "
            f"{sizes} rows it differs by {apart}",
            difference=apart,
        )
    return Problem(
        path,
        f"{path} has shape {shape} whatever the batch size, and is neither a mean over the rows, "
        f"nor a sum, nor the same for all: the mean of {sizes} rows differs from it by {apart}",
        difference=apart,
        remedy="compute it outside of the model, or give chunks=1; a difference that does no harm "
        'is accepted with check="warn", which averages it over the micro-batches, or adds it up '
        'where out_dims says "sum" for it. If the batch is along other dimensions, give in_dims',
    )
