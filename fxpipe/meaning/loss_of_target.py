"""How the losses of micro-batches are put together to the loss of the mini-batch, for a loss
function that is given the output and a target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir.errors import is_the_models
from fxpipe.ir.structure import Structure, map_tensors
from fxpipe.ir.tensors import memory_bytes
from fxpipe.meaning import messages
from fxpipe.meaning.asked import Asked, refuse
from fxpipe.meaning.asking import Asking
from fxpipe.meaning.candidates import rows_in
from fxpipe.meaning.check import Verdict, check
from fxpipe.meaning.combined import (
    is_another_each_time,
    is_mean_plus_sum,
    is_number_plus_sum,
    is_of_means,
    may_be_weighted,
)
from fxpipe.meaning.compare import computed_with, difference, dtypes_of
from fxpipe.meaning.kept import LARGEST, KeptOutputs
from fxpipe.meaning.left_out import LabelCondition, LabelsLeftOut, whatever_it_does
from fxpipe.meaning.listed import Column, Listed, is_column
from fxpipe.meaning.loss_beside import NO_STAGES, LossBeside, StagesBeside
from fxpipe.meaning.loss_gradient import LossGradient, apart_in_the_gradient, gradient_of
from fxpipe.meaning.loss_state import left_as_it_was
from fxpipe.meaning.runs import is_taken
from fxpipe.meaning.said import named_inputs
from fxpipe.meaning.sample import GIVEN, batch_size, part, picked
from fxpipe.meaning.single_numbers import confirmed
from fxpipe.meaning.stirred import in_place_of_zeros, stirred
from fxpipe.meaning.trial import OWN, SIZES, Question, Trial, of_own_values, taken
from fxpipe.meaning.weights import (
    Weigh,
    dim_of,
    remedy,
    weighed,
)
from fxpipe.meaning.widened import Widened, without_autocast
from fxpipe.runtime.ambient import Ambient
from fxpipe.runtime.microbatch import (
    LISTED,
    SUM,
    WEIGHTED,
    Dim,
    InDim,
    ListOfRows,
    numbers,
    rows_at,
    shares,
)
from fxpipe.runtime.random import HostRandomState, RandomState
from fxpipe.trace import untouched
from fxpipe.trace.patches import unwarned
from fxpipe.trace.premises import state_of
from fxpipe.trace.twin import model_of

LOSS = "output"
"""The path of the loss in a question whose only output is the loss."""

FACTORS = torch.tensor([1.0, 6.0, 2.0, 4.0, 0.5])
"""By what the outputs for different rows are multiplied."""


def loss_dim(
    model: nn.Module,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    in_dims: Sequence[InDim],
    loss: Callable[[Any, Any], Any],
    readings: Sequence[Targets],
    asked: Asked,
    out_dims: Mapping[str, int],
    beside: StagesBeside,
) -> FoundLoss:
    """How the target is cut into micro-batches, and how their losses are put together to the loss
    of the mini-batch.

    Args:
        loss: the user's function of output and target.
        readings: the ways in which the target may be cut, the likeliest first. The first one with
            which the parts make the whole is taken; if there is none, the first one.
        out_dims: the batch dimensions of the model's outputs, by their paths.
        beside: the stages that run beside the loss.

    Raises:
        BatchError: if the model does not tell, if what the user has said does not fit, or if the
            loss shares something with the stages beside it.
        BatchWarning: (a warning) for a loss that is neither a mean over the rows nor a sum.
    """
    found = [
        _LossOfTarget(model, inputs, in_dims, loss, each, asked, out_dims, beside)
        for each in readings
    ]
    place = 0
    with computed_with(dtypes_of(model, inputs)):
        if len(found) > 1:
            place = next((i for i, each in enumerate(found) if each.verdict().is_exact), 0)
        dim = found[place].dim()
    taken = found[place]
    return FoundLoss(
        place,
        dim,
        tuple(taken.may_leave_out()),
        taken.is_clear,
        taken.is_told,
        taken.is_decided,
        taken.note,
    )


def loss_takes_sizes(
    model: nn.Module,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    in_dims: Sequence[InDim],
    loss: Callable[[Any, Any], Any],
    target: Targets,
    asked: Asked,
    out_dims: Mapping[str, int],
    dim: Dim,
) -> bool:
    """Whether the losses of micro-batches, put together as it has been found out, make the loss of
    the mini-batch for micro-batches of the sizes that this one has. It takes less time than
    :func:`loss_dim`: the model runs on two rows."""
    found = _LossOfTarget(model, inputs, in_dims, loss, target, asked, out_dims)
    with computed_with(dtypes_of(model, inputs)):
        return found.takes_sizes(dim)


@dataclass(frozen=True)
class FoundLoss:
    """What the check has found out about a loss function.

    Attributes:
        place: that of the reading of the target, among those that the check was given.
        dim: how the losses of micro-batches are put together: by a sum (SUM), a mean over the rows
            (None), or with the weights of ``loss_weight`` (WEIGHTED).
        left_out: by what the loss may tell which labels count, if it is a mean over the rows with
            the labels of this mini-batch.
        is_clear: whether the check has told a mean from a sum.
        is_told: whether the user has been warned that the loss is no mean over the rows.
        is_decided: whether a step can be made by it. If not, the loss raises an error on a
            micro-batch, or there are no values yet: it is to be checked with the next mini-batch.
        note: what a report has to say of it, such as that it is no mean over the rows, and what
            makes it right.
    """

    place: int
    dim: Dim
    left_out: tuple[LabelCondition, ...] = ()
    is_clear: bool = False
    is_told: bool = False
    is_decided: bool = True
    note: str = ""


class _LossOfTarget:
    """The check of a loss function, with the target cut in one of several ways."""

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        in_dims: Sequence[InDim],
        loss: Callable[[Any, Any], Any],
        target: Targets,
        asked: Asked,
        out_dims: Mapping[str, int],
        beside: StagesBeside = NO_STAGES,
    ) -> None:
        args, kwargs = inputs
        self._with_target = partial(
            _LossOfTarget, model, inputs, in_dims, loss, asked=asked, out_dims=out_dims
        )
        self.model, self.loss, self.target, self.asked = model, loss, target, asked
        self.left_out = LabelsLeftOut()
        self.is_clear = True
        """Whether the check has told a mean from a sum."""
        self.is_told = False
        """Whether the user has been warned that the loss is no mean over the rows."""
        self.is_decided = True
        """Whether a step can be made by what has been found out."""
        self.note = ""
        """What a report has to say of the loss."""
        self.named = named_inputs(model, args, kwargs, asked.in_dims)
        listed = Listed.of(model, args, kwargs, self.named) if LISTED in in_dims else None
        if listed is not None:
            self.named, self.own = listed.inputs, listed.dims
        else:
            self.own = [dim if isinstance(dim, int) else None for dim in in_dims]
        self.asking = Asking(model, args, kwargs, self.named, asked, listed)
        self.count = len(self.asking.tensors)  # those of the inputs come first
        leaves = enumerate(target.leaves)
        self.places = [i for i, leaf in leaves if isinstance(leaf, Tensor | ListOfRows)]
        given = (target.leaves[i] for i in self.places)
        cut = [Column(leaf.elements) if isinstance(leaf, ListOfRows) else leaf for leaf in given]
        rows = rows_in(self.named, self.own) or 0
        self.out_dims, self.factors = out_dims, FACTORS[torch.arange(rows) % len(FACTORS)]
        self.ambient = Ambient.here()
        self.output_of = KeptOutputs(self._output_of, self.own, {} if listed else out_dims)
        self.is_wide = True
        """Whether the loss is computed in single precision at least, which some do not take."""
        self.with_gradients = False
        """Whether the loss is computed with gradients, which some ask for."""
        self.tensors: list[Any] = [*self.asking.tensors, *cut, self.factors]
        self.dims = [*self.own, *(0 if target.has_batch[i] else None for i in self.places), 0]
        some = Structure.of(inputs)[0]
        self.device = some[0].device if some else None
        # A term of parameters that are zero so far, such as logarithms of variances, does not show.
        self._values = in_place_of_zeros(loss) if isinstance(loss, nn.Module) else []
        self._left_as_it_was, self._call = left_as_it_was(loss), loss
        self._beside = LossBeside(model_of(model), loss, beside)

    def filled(self, tensors: Sequence[Any]) -> Any:
        """The target with these tensors, on the device of the inputs."""
        given = list(self.target.leaves)
        for place, value in zip(self.places, tensors[self.count : -1], strict=True):
            rows = self.target.leaves[place]
            brought = map_tensors(self._brought, value.tensors if is_column(value) else value)
            given[place] = type(rows.elements)(brought) if isinstance(rows, ListOfRows) else brought
        return self.target.fill(given)

    def _brought(self, value: Any) -> Any:
        return value if self.device is None else value.to(self.device)

    def _output_of(self, tensors: Sequence[Any]) -> Any:
        """The model's output, in the precision that it has in a step."""
        with self.ambient.applied():
            return self.asking.runs.output_of(tensors)

    def run(self, tensors: list[Tensor]) -> tuple[Any, None]:
        """The loss, without an autograd graph."""
        return self._loss(self.output_of(tensors[: self.count]), tensors)

    def run_apart(self, tensors: list[Tensor]) -> tuple[Any, None]:
        """The loss of outputs that are multiplied by a factor for each row. Where a model has not
        been trained, all rows have nearly the same loss, so that it hardly matters how much each of
        them counts."""
        return self._loss_apart(self.output_of(tensors[: self.count]), tensors)

    def _loss_apart(self, output: Any, tensors: list[Tensor]) -> tuple[Any, None]:
        found, structure = Structure.of(output)
        for i, (tensor, path) in enumerate(zip(found, structure.paths(), strict=True)):
            dim, factors = self.out_dims.get(path), tensors[-1]
            has_rows = dim is not None and dim < tensor.dim() and tensor.is_floating_point()
            if not has_rows or tensor.shape[dim] % len(factors):
                continue
            # A row of inputs may be several rows of an output, one after the other.
            factors = factors.to(tensor).repeat_interleave(tensor.shape[dim] // len(factors))
            shape = [-1 if k == dim else 1 for k in range(tensor.dim())]
            found[i] = tensor * factors.reshape(shape)
        return self._loss(structure.fill(found), tensors)

    def _loss(self, output: Any, tensors: list[Tensor]) -> tuple[Any, None]:
        target = self.filled(tensors)
        if self.is_wide:
            mode = Widened()
            first, second = map_tensors(mode.wide, (output, target))
            try:
                return self._given(first, second, mode), None
            except Exception as error:
                if not is_the_models(error):
                    raise
        found = self._given(output, target)
        self.is_wide = False  # it takes these values in their own precision only
        return found, None

    def _given(
        self, output: Any, target: Any, precision: AbstractContextManager[Any] | None = None
    ) -> Any:
        # The loss may draw random numbers, and count its calls, say.
        recording = torch.set_grad_enabled(self.with_gradients)
        quietly = (
            unwarned(),
            untouched(self.model),
            stirred(self._values),
            self._left_as_it_was(),
            recording,
        )
        with ExitStack() as stack:
            precisely = precision or nullcontext()
            for each in (*quietly, precisely, self.left_out, self._beside.noting()):
                stack.enter_context(each)
            if not self.with_gradients:
                return self._call(output, target)
            found = self._call(map_tensors(_with_gradient, output), target)
            return map_tensors(Tensor.detach, found)

    def _precision(self) -> AbstractContextManager[None]:
        """A context in which the loss is computed, and in which its values are compared."""
        return without_autocast() if self.is_wide else nullcontext()

    def weigh(self, function: Callable[..., Any]) -> Weigh:
        """The weight of a micro-batch by a function of its target."""
        return lambda tensors: function(self.filled(tensors))

    def verdict(self) -> Verdict:
        """The result of the check of the loss function on samples of outputs and targets: of
        outputs with factors, if the loss function takes them."""
        if self.out_dims and len(self.factors):
            verdict = self._checked(self.run_apart)
            if verdict.trial is not None and LOSS not in verdict.unclear:
                return verdict
        return self._checked(self.run)

    def takes_sizes(self, dim: Dim) -> bool:
        """Whether the losses of micro-batches, put together in this way, make that of as many rows
        as the mini-batch has."""
        with self._precision():
            return not any(confirmed(trial, LOSS, dim) for trial in self._of_all_rows(()))

    def _of_all_rows(self, known_sizes: Iterable[int]) -> list[Trial]:
        """A sample of as many rows as the mini-batch has, cut as a step cuts it: a loss may go by
        their number, as one does that takes at least so many of the largest errors, or rows in
        pairs. There is none for few rows in micro-batches of sizes that are known to be right.

        Its outputs are those of the two rows that are known, again and again, with other factors,
        so that the model need not run on all rows. There is none where that cannot be made, or
        would be larger than a whole mini-batch's outputs may be.
        """
        if not self.out_dims or any(map(is_column, self.tensors)):
            return []
        cut = [t.shape[d] for t, d in zip(self.tensors, self.dims, strict=True) if d is not None]
        rows, known = min(cut), min(2, *cut)
        if len(sizes := self.asked.sizes(rows)) < 2:
            return []
        if rows <= max(map(sum, SIZES)) and {*sizes} <= {*known_sizes}:
            return []
        try:
            few = self.output_of(
                part(self.tensors[: self.count], self.dims[: self.count], 0, known)
            )
        except Exception as error:
            if not is_the_models(error):
                raise
            return []
        found, structure = Structure.of(few)
        dims = [self.out_dims.get(path) for path in structure.paths()]
        size = sum(memory_bytes(t) for t, d in zip(found, dims, strict=True) if d is not None)
        if size * rows > known * LARGEST or any(
            dim is not None and tensor.shape[dim] != known
            for tensor, dim in zip(found, dims, strict=True)
        ):
            return []

        def loss(tensors: list[Tensor]) -> Any:
            *own, places = tensors
            repeated = [
                tensor if dim is None else rows_at(tensor, dim, places)
                for tensor, dim in zip(found, dims, strict=True)
            ]
            return self._loss_apart(structure.fill(repeated), own)[0]

        tensors = part(self.tensors, self.dims, 0, rows)
        sample = Trial(sizes, GIVEN, [*tensors, torch.arange(rows) % known], {}, [])
        return [replace(trial, tensors=tensors) for trial in taken(loss, sample, [*self.dims, 0])]

    def _checked(self, run: Callable[[list[Tensor]], tuple[Any, None]]) -> Verdict:
        question = Question(run, self.tensors, self.dims, counts=self.asked.counts, twins=())
        was_wide = self.is_wide
        with self._precision():
            verdict = check(question, is_likely=True)
        if was_wide and not self.is_wide:
            return self._checked(run)
        if verdict.trial is None and not self.with_gradients:
            self.with_gradients = True
            return self._checked(run)
        if self.asking.runs.still_more():
            self.output_of.forget()
            return self._checked(run)
        return verdict

    def dim(self) -> Dim:
        """How the losses of the micro-batches are put together. Raises BatchError, or warns."""
        verdict = self.verdict()
        for text in self._shared_with_the_model():
            self.note = text
            refuse(replace(self.asked, check=self.asked.check or "warn"), text)
        with self._precision():
            return self._dim_by(verdict)

    def _shared_with_the_model(self) -> Iterator[str]:
        """The messages for a loss that reads what the forward sets or leaves behind, or that shares
        buffers with it."""
        if of_forward := self._set_by_the_forward():
            yield messages.reads_what_the_forward_sets(self.model, of_forward)
        if left := self._beside.left_for_it():
            yield messages.reads_what_is_left(left)
        if shared := self._beside.shared_state():
            yield messages.shares_state(self.model, shared)

    def _set_by_the_forward(self) -> list[str]:
        """The attributes of the model that its forward sets and that the loss reads, which are in a
        step what they were before. An attribute that the loss itself sets first does not count."""
        changed = {*(self.asking.runs.changed or ())}
        modules = model_of(self.model).named_modules()  # the forward has run on the twin
        paths = {module: f"{name}.".lstrip(".") for name, module in modules}
        return [
            path
            for (module, name), state in self._beside.reads.items()
            if (path := f"{paths.get(module, '')}{name}") in changed
            and state == state_of(module, name)
        ]

    def _dim_by(self, verdict: Verdict) -> Dim:
        asked = self.asked
        sample = verdict.trial
        self.is_clear = sample is not None and LOSS not in verdict.unclear
        if self.is_clear and asked.check and not verdict.problems:
            for trial in self._of_all_rows({n for each in verdict.trials for n in each.sizes}):
                problem = confirmed(trial, LOSS, verdict.outputs.get(LOSS))
                weighs = callable(asked.loss_weight)  # then it is compared with the weights
                problems = [] if problem is None or weighs else [problem]
                verdict = replace(verdict, trials=[*verdict.trials, trial], problems=problems)
        otherwise = self._to_be_cut_otherwise(verdict)
        if otherwise:
            # Micro-batches would be given other parts, whatever the user accepts or says.
            self.note = otherwise
            refuse(replace(asked, check=asked.check or "warn"), otherwise)
        if verdict.trial is None and asked.check and asked.loss_weight is not None:
            verdict = self._at_own_sizes(verdict)
        if asked.loss_weight is not None:
            weigh = self.weigh(asked.loss_weight)
            if callable(asked.loss_weight) and verdict.trial is not None:
                trials = [*self._of_least_weight(weigh), *verdict.trials]
                verdict = replace(verdict, trials=trials)
            verdict, wrong = weighed(verdict, LOSS, asked.loss_weight, weigh, self.dims)
            if wrong:
                self.note = wrong.replace(LOSS, "loss_fn", 1)
                refuse(asked, self.note)
        elif verdict.trial is None or LOSS in verdict.unclear:
            if verdict.trial is None and not self._is_taken_in_a_step():
                self.is_decided = False  # the step will raise the same error
                return None
            if asked.is_again and messages.not_finite(verdict):
                return None
            # It has to be put together in some way, which is said whatever the user accepts.
            self.note = messages.unknown_loss(verdict, self._cut_as_rows())
            refuse(replace(asked, check=asked.check or "warn"), self.note)
        if verdict.trial is not None and LOSS not in verdict.trial.whole:
            self.is_decided = False  # it is no tensor: the step will raise an error
            return None
        if asked.check and verdict.problems and verdict.problems[0].is_scalar:
            self.is_told = True
            if not otherwise and (text := self._about(verdict)):
                self.note = text.replace(LOSS, "the loss", 1)
                asked.warn(self.note)
        dim: Dim = SUM if verdict.outputs.get(LOSS) == SUM else None
        if asked.loss_weight is not None:
            dim = dim_of(asked.loss_weight)
        is_first = bool(asked.check) and self.is_clear and not asked.is_again
        if not is_first or verdict.problems:
            return dim
        is_said = asked.loss_weight is not None
        if not is_said and self._is_another_after_calls(verdict):
            self.note = messages.another_after_calls()
            asked.warn(self.note)
        elif sample is not None and (text := self._in_the_gradient(sample, dim)):
            self.note = text
            asked.warn(self.note)
        return dim

    def _in_the_gradient(self, trial: Trial, dim: Dim) -> str:
        """What to say of a loss whose value is that of its parts, put together in this way, and
        whose gradient is not; "" if that is so as well, or if it has none."""
        if self.asking.listed is not None or not self.asked.training:
            return ""  # rows of lists have no dimension along which gradients are joined
        parts, by = trial.each(self.dims), (1.0,) * len(trial.sizes)
        if dim != SUM:
            weigh = self.asked.loss_weight if dim == WEIGHTED else None
            weights = numbers([*map(self.weigh(weigh), parts)]) if weigh else [*trial.sizes]
            if not any(weights):
                return ""
            by = shares(weights)
        try:
            apart = apart_in_the_gradient(self._gradient, trial, self.dims, by, self.out_dims)
        except Exception as error:
            if not is_the_models(error):
                raise
            return ""  # it has no backward
        return "" if apart is None else messages.in_the_gradient_of_the_loss(apart, trial.sizes)

    def _gradient(self, tensors: list[Tensor]) -> LossGradient:
        """The loss of outputs as the check has compared it, with its gradient."""
        found: list[LossGradient] = []
        loss, before = self.loss, self.with_gradients

        def noted(output: Any, target: Any) -> Any:
            found.append(gradient_of(loss, output, target))
            return found[-1].value

        self._call, self.with_gradients = noted, True
        try:
            (self.run_apart if self.out_dims else self.run)(tensors)
        finally:
            self._call, self.with_gradients = loss, before
        return found[-1]

    def _at_own_sizes(self, verdict: Verdict) -> Verdict:
        """The verdict of the mini-batch as a step cuts it, for a loss that does not take the sizes
        of samples, since it takes so many rows together, as groups of four: what the user has said
        of it can be checked so. Without such a sample it is the given verdict."""
        for trial in self._of_all_rows(()):
            if not isinstance(trial.whole.get(LOSS), Tensor):
                continue
            wrong = {dim: confirmed(trial, LOSS, dim) for dim in (None, SUM)}
            fitting = [dim for dim, problem in wrong.items() if problem is None]
            problem = None if fitting else wrong[None]
            return replace(
                verdict,
                trials=[trial],
                outputs={LOSS: fitting[0]} if fitting else {},
                unclear={LOSS} if len(fitting) > 1 else set(),
                problems=[problem] if problem else [],
            )
        return verdict

    def _is_another_after_calls(self, verdict: Verdict) -> bool:
        """Whether the loss of a sample is another one if the loss function has been called ahead of
        it, with the same random numbers: by what it keeps from one call to the next, which is put
        back after each call of the check."""
        if verdict.trial is None:
            return False
        tensors, loss = verdict.trial.tensors, self.loss

        def given() -> Any:
            return self.run(part(tensors, [None] * len(tensors), 0, 0))[0]

        def after_another(output: Any, target: Any) -> Any:
            states = RandomState([self.device] if self.device else []), HostRandomState()
            loss(*map_tensors(Tensor.clone, (output, target)))
            for state in states:
                state.put_back()
            return loss(output, target)

        try:
            once = given()
            self._call = after_another
            again = given()
        except Exception as error:
            if not is_the_models(error):
                raise
            return False
        finally:
            self._call = loss
        return isinstance(once, Tensor) and bool(difference(once, again))

    def _to_be_cut_otherwise(self, verdict: Verdict) -> str:
        """The message for a target that does not make the whole batch's loss as it is cut into
        micro-batches, but would if it were cut otherwise; "" if there is no such way, or if nobody
        asks.

        Which tensors are needed whole is looked for only where the loss does not take their parts:
        the model has to run for it. Elsewhere a warning says that the loss is no mean.
        """
        if verdict.is_exact or not (self.asked.check or verdict.trial is None):
            return ""
        names = self._cut_as_rows()
        found = self._along_another(names)
        return found if found or verdict.trial is not None else self._needed_whole(names)

    def _along_another(self, names: Mapping[int, str]) -> str:
        """The message for tensors that have the batch where the inputs or outputs have it, which is
        not their first dimension, and that are as large along both; "" if there are none."""
        dims = {dim: "the output" for dim in self.out_dims.values() if dim}
        dims |= {dim: "the inputs" for dim in self.own if dim}
        shapes = {i: self.target.leaves[i].shape for i in names}
        for dim, what in dims.items():
            square = [i for i, own in shapes.items() if dim < len(own) and own[dim] == own[0]]
            for some in (square, *([i] for i in square)) if square else ():
                if self._makes_the_whole(self.target, {self.places.index(i): dim for i in some}):
                    return messages.along_another([names[i] for i in some], dim, what)
        return ""

    def _needed_whole(self, names: Mapping[int, str]) -> str:
        """The message for tensors that have as many elements as the batch has rows, where the
        losses of micro-batches make that of the whole batch only if each is given all of them, or
        where the loss does not take a micro-batch otherwise; "" if there are none."""
        has_batch, rows = self.target.has_batch, rows_in(self.named, self.own) or 0
        ways = [
            (some, replace(self.target, has_batch=kept))
            for count in ((1, 2) if len(names) > 1 else ())
            for some in combinations(names, count)
            for kept in [[is_cut and i not in some for i, is_cut in enumerate(has_batch)]]
        ]
        verdicts = {}
        for some, target in ways:
            verdict = verdicts[some] = self._verdict_of(target, {})
            if verdict.is_exact and LOSS not in verdict.unclear:
                return messages.needed_whole([names[i] for i in some], rows)
        # It need not be a mean over the rows then: weights of classes make a mean by these.
        taking = [some for some, verdict in verdicts.items() if verdict.trial is not None]
        alone = [some for some in taking if len(some) == 1] or taking
        if len(alone) != 1 or self._is_taken_in_a_step():
            return ""
        return messages.needed_whole([names[i] for i in alone[0]], rows, is_taken=False)

    def _makes_the_whole(self, target: Targets, dims: Mapping[int, int]) -> bool:
        """Whether the losses of micro-batches make that of the whole batch with a target that is
        cut otherwise, see :meth:`_verdict_of`."""
        verdict = self._verdict_of(target, dims)
        return verdict.is_exact and LOSS not in verdict.unclear

    def _verdict_of(self, target: Targets, dims: Mapping[int, int]) -> Verdict:
        """The verdict with a target that is cut otherwise. ``dims``: the dimensions of some of its
        tensors, by their places in ``places``, that are not the first ones."""
        other = self._with_target(target)
        other.output_of = self.output_of  # the model need not run again for another target
        for place, dim in dims.items():
            other.dims[self.count + place] = dim
        return other.verdict()

    def _cut_as_rows(self) -> dict[int, str]:
        """The tensors of the target that are cut into micro-batches, by their places in it: what to
        write for each of them."""
        keys, found = _keys_of(self.target, self.places), dict[int, str]()
        for k, place in enumerate(self.places):
            leaf = self.target.leaves[place]
            if self.target.has_batch[place] and isinstance(leaf, Tensor):
                unnamed = f"a tensor of shape {tuple(leaf.shape)} in the target"
                written = "target" if keys.get(k) == "" else f"target[{keys.get(k)!r}]"
                found[place] = written if k in keys else unnamed
        return found

    def _is_taken_in_a_step(self) -> bool:
        """Whether the loss function takes the first micro-batch as a step gives it to it: with
        gradients, which it may ask for. What it raises in the check only, the check is to blame
        for."""
        sizes = self.asked.sizes(rows_in(self.named, self.own) or 0)

        def run(tensors: list[Tensor]) -> Any:
            output = self.asking.runs.recorded(tensors[: self.count], lambda held, _: held.pop())
            with unwarned(), self.ambient.applied(), untouched(self.model), self._left_as_it_was():
                return self.loss(output, self.filled(tensors))

        return is_taken(run, part(self.tensors, self.dims, 0, sizes[0]))

    def _of_least_weight(self, weigh: Weigh) -> list[Trial]:
        """A sample of the mini-batch's own rows, whose first part has those of the least weight, so
        that a micro-batch of them is looked at, too: where they have none, what the loss computes
        of them must not count either. There is no sample if all rows have the same weight."""
        if any(map(is_column, self.tensors)):
            return []
        rows = min(OWN, batch_size(self.tensors, self.dims) or 0)
        weights = numbers([weigh(part(self.tensors, self.dims, i, 1)) for i in range(rows)])
        order = sorted(range(rows), key=weights.__getitem__)
        lightest = weights.count(min(weights, default=0.0))
        if lightest == rows:
            return []
        tensors = picked(self.tensors, self.dims, order)
        trial = Trial((lightest, rows - lightest), GIVEN, tensors, {}, [])
        return taken(lambda tensors: self.run(tensors)[0], trial, self.dims)

    def _about(self, verdict: Verdict) -> str:
        """What to say of a loss that is neither a mean over the rows nor a sum; "" where the user
        has said what it is, and it is too random to be compared."""
        problem, trial = verdict.problems[0], verdict.trial
        if trial is None:
            return messages.across(
                problem, self.named, of_loss_fn=True, calls_are_trained=self.asked.calls_are_trained
            )

        def loss(tensors: list[Tensor]) -> Any:
            return self.run_apart(tensors)[0] if self.out_dims else self.run(tensors)[0]

        if is_another_each_time(loss, trial, self.dims):
            return messages.another_each_time() if self.asked.loss_weight is None else ""
        by = self._remedy(verdict)
        return messages.across(
            problem,
            self.named,
            by,
            of_loss_fn=True,
            has_sum=not by and is_mean_plus_sum(loss, trial, LOSS, self.dims),
            has_number=not by and is_number_plus_sum(loss, trial, LOSS, self.dims),
            has_means=not by and is_of_means(loss, trial, self.dims),
            may_be_weighted=all(may_be_weighted(each, LOSS) for each in verdict.trials),
            calls_are_trained=self.asked.calls_are_trained,
            cut=self._cut_as_rows(),
        )

    def _remedy(self, verdict: Verdict) -> str:
        """The ``loss_weight`` that makes the loss that of the whole batch, as code that the user
        can write; "" if none is known."""
        keys = _keys_of(self.target, self.places)
        labels = [
            (keys[i], self.count + i)
            for i in range(len(self.places))
            if i in keys and not is_column(self.tensors[self.count + i])
        ]
        own = of_own_values(lambda tensors: self.run(tensors)[0], self.tensors, self.dims)
        trials = [*own, *verdict.trials]
        conditions = list(self.left_out.conditions)
        weight = self.left_out.weight
        name = "weight" if getattr(self.loss, "weight", None) is None else "loss_fn.weight"
        known = None if weight is None else (name, weight)
        return remedy(trials, LOSS, labels, self.weigh, self.dims, True, conditions, known)

    def may_leave_out(self) -> Iterator[LabelCondition]:
        """By what the loss may tell which labels count; nothing where that has been told."""
        if not self.is_told:
            yield from self.left_out.conditions
            yield from whatever_it_does(enumerate(self.target.labels))


@dataclass(frozen=True)
class Targets:
    """The target of a mini-batch: its leaves, whether each of them is cut into micro-batches, and a
    function that puts it together from leaves."""

    leaves: Sequence[Any]
    has_batch: Sequence[bool]
    fill: Callable[[Sequence[Any]], Any]

    @property
    def labels(self) -> list[Tensor]:
        """The tensors that are cut into micro-batches."""
        cut = zip(self.leaves, self.has_batch, strict=True)
        return [leaf for leaf, is_cut in cut if is_cut and isinstance(leaf, Tensor)]


def _with_gradient(tensor: Tensor) -> Tensor:
    """A tensor that has a gradient, if it may have one, and may be written to."""
    is_real = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_().clone() if is_real else tensor


def _keys_of(target: Targets, places: Sequence[int]) -> dict[int, str | int]:
    """What to write behind a target for each of its tensors, by the tensor's place in ``places``:
    its key, if the target is a dictionary; its number, if it is a tuple or a list; and "" for a
    target that is a tensor itself."""
    marks = list(target.leaves)
    for i in places:
        marks[i] = torch.empty(0)
    whole = target.fill(marks)
    if isinstance(whole, Tensor):
        return {0: ""}
    if not isinstance(whole, Mapping | tuple | list):
        return {}
    items = [*(whole.items() if isinstance(whole, Mapping) else enumerate(whole))]
    return {
        k: key if isinstance(key, int) else str(key)
        for k, i in enumerate(places)
        for key, value in items
        if value is marks[i]
    }
