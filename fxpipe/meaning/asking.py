"""The check of one kind of call: candidates for its batch dimensions, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir.errors import is_the_models
from fxpipe.ir.heap import give_back
from fxpipe.ir.structure import Structure, leaves
from fxpipe.loss_weight import IGNORED, at_path
from fxpipe.meaning import messages
from fxpipe.meaning.asked import Asked, Compared, Meaning, refuse
from fxpipe.meaning.backward import backward_problem
from fxpipe.meaning.by_graph import ByGraph
from fxpipe.meaning.candidates import InDims, agree, packed, rivals, rows_in
from fxpipe.meaning.check import Verdict, check
from fxpipe.meaning.combined import is_mean_plus_sum
from fxpipe.meaning.compare import difference
from fxpipe.meaning.drawn import UNIFORM
from fxpipe.meaning.errors import BatchError
from fxpipe.meaning.lasting import lasting_problem
from fxpipe.meaning.left_out import LabelsLeftOut
from fxpipe.meaning.listed import Listed, is_a_row
from fxpipe.meaning.problem import Problem
from fxpipe.meaning.runs import ModelRuns, is_taken
from fxpipe.meaning.said import Input
from fxpipe.meaning.sample import part, sampled
from fxpipe.meaning.stilled import batch_norms, dropouts
from fxpipe.meaning.trial import SIZES, TRIALS, Question, Trial, of_own_values, ran, taken
from fxpipe.meaning.values_read import differing_value
from fxpipe.meaning.weights import (
    Fill,
    Weigh,
    named_arguments,
    remedy,
    weighed,
    with_ignored,
)
from fxpipe.meaning.widened import widened
from fxpipe.meaning.written_rows import mixed_in_buffers
from fxpipe.runtime.microbatch import WEIGHTED, Dim
from fxpipe.trace import Traced, bound_arguments, canonical
from fxpipe.trace.checks import refuse_what_is_done_once
from fxpipe.trace.gradients import has_gradient
from fxpipe.trace.isolation import called
from fxpipe.trace.itself import OnTheInputs
from fxpipe.trace.layouts import layouts_asked
from fxpipe.trace.outside import modes_asked
from fxpipe.trace.premises import Reads, attributes_read

Trace = Callable[[InDims], Traced | None]
"""``trace(dims)`` gives a graph of the model that has not been compared with it, for inputs with
these batch dimensions; None where the model has to be run first, to trace it."""


def _first_of(names: Sequence[str]) -> str:
    """The first name and the number of the others, as text."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


class Asking:
    """One check of a kind of call: it asks, for one candidate after the other, whether parts of
    samples give what the whole gives.

    ``on_the_inputs``: where the model takes no sample, it raises what the model raises on the
    inputs as they are, so that no more samples are tried. None: they are not the user's."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: Sequence[Input],
        asked: Asked,
        listed: Listed | None = None,
        on_the_inputs: OnTheInputs | None = None,
    ) -> None:
        self.inputs, self.asked, self.listed = inputs, asked, listed
        self.on_the_inputs = on_the_inputs
        self.otherwise: Callable[[], Meaning | None] = lambda: None  # tried if no candidate fits
        self.arguments: Fill
        fill: Callable[[Sequence[Any]], Any]
        if listed is not None:
            self.tensors, fill = listed.values, listed.call
            self.arguments = lambda values: ((), listed.by_name(values))
        else:
            self.tensors, structure = Structure.of(canonical(model, args, kwargs))
            fill, self.arguments = structure.fill, named_arguments(model, args, kwargs)
        self.given = partial(bound_arguments, model, args, kwargs)
        real = {i: each.name for i, each in enumerate(inputs) if _is_real(each.tensor)}
        self.runs = ModelRuns(model, fill, real, asked)
        if on_the_inputs is not None:
            self.runs.refused = on_the_inputs.refuse
        self.random: set[str] = set()  # the outputs that depend on the random seed
        self.contradiction = ""  # how the model contradicts ``loss_weight``, for a message

    def _weigh(self, function: Callable[..., Any]) -> Weigh:
        """The weight of a micro-batch by a function of the model's arguments."""

        def weigh(tensors: Sequence[Any]) -> Any:
            args, kwargs = self.arguments(tensors)
            return function(*args, **kwargs)

        return weigh

    def by_graph(self, ways: Sequence[InDims], trace: Trace) -> Meaning | None:
        """The meaning by the likeliest candidate, checked together with a graph of the model; None
        where that does not tell."""
        dims, runs = ways[0], self.runs
        if self.listed is not None or self.asked.loss_weight is not None:
            return None
        if not agree(self.inputs, dims) or any(t.is_meta for t in self.tensors):
            return None
        with attributes_read(runs.model) as reads:
            traced = trace(dims)
        if traced is None:
            return None
        give_back()  # what the trace has freed: runs of the model take memory of their own
        check = ByGraph(runs, traced, self.tensors, dims)
        # What is replaced for the check on the model's modules are no premises.
        are_replaced = bool(batch_norms(runs.model) or dropouts(runs.model))
        watch = nullcontext(Reads()) if are_replaced else attributes_read(runs.model)
        with watch as by_the_check, modes_asked() as lines, layouts_asked() as of_layouts:
            verdict = check.verdict()
        if verdict is None:
            runs.still_more()
            return None
        if self._with_other_draws(dims, verdict) is not verdict:
            return None
        if not verdict.is_joined_along(dims) and rivals(ways, dims):
            return None
        found = self.meaning(dims, verdict, ways)
        # Each run records gradients: what the model does without is seen in more runs of it.
        as_it_runs = not (check.has_effects or are_replaced or lines or of_layouts)
        found.graph = Compared(traced, by_the_check | reads if as_it_runs else reads, as_it_runs)
        return found

    def best(self, ways: Sequence[InDims]) -> Meaning:
        """The meaning by the first candidate with which all outputs are the model's.

        If several candidates that are cut along the same dimensions give the model's outputs, it is
        the first that has outputs joined along one of these. With a table that has as many rows as
        the batch, ``x @ table.T`` may be cut into rows of either; the target of a step, and what
        is computed from the output, have their rows where the output has those of ``x``.

        If there is none, it is the likeliest candidate, the first one, as long as only single
        numbers (losses) differ with it: a loss across rows differs with every candidate. It is
        refuted only by another one that cuts at least the same outputs.

        A candidate does not count that gives up an input whose rows meet, and cuts another one that
        has nothing to do with it: every micro-batch would compute with all of its rows.
        """
        verdicts: list[tuple[InDims, Verdict]] = []
        fitting: tuple[InDims, Verdict, str] | None = None
        remaining = list(ways)
        while remaining:
            dims = remaining.pop(0)
            verdict = self.verdict_of(dims, is_likely=dims == ways[0])
            first = verdicts[0][1] if verdicts else Verdict(takes_parts=False)
            is_better = verdict.is_better_than(first) and not self._gives_up(ways[0], dims, verdict)
            if is_better or (not verdicts and verdict.is_exact):
                if verdict.is_joined_along(dims):
                    return self.meaning(dims, verdict, ways)
                if fitting is None:
                    fitting = dims, verdict, self.contradiction
                    remaining = rivals(remaining, dims)
            verdicts.append((dims, verdict))
        if fitting is not None:
            dims, verdict, self.contradiction = fitting
            return self.meaning(dims, verdict, ways)
        if (found := self.otherwise()) is not None:
            return found
        dims, verdict = verdicts[0]
        self.runs.uniform = verdict.uniform
        if verdict.trial is not None and not verdict.is_wrong:
            self.tell(dims, verdict)
            meaning = self.meaning(dims, verdict, ways)
            meaning.is_told = any(each.path == self.runs.loss for each in verdict.problems)
            return meaning
        return self._none(verdicts, ways)

    def _gives_up(self, likeliest: InDims, dims: InDims, verdict: Verdict) -> bool:
        """Whether an input that is cut by the likeliest candidate, and shared by this one, is
        needed whole for outputs that all micro-batches compute alike, and for no output that is
        joined of theirs. ::

            x ── x - x.mean(0) ── a         needs all rows of x, which every micro-batch would have
            y ── linear ───────── b         cut along the rows of y
            x, y ── x @ y.T ───── c         needs all rows of y for each row of x: no such case
        """
        trial = verdict.trial
        if trial is None or not verdict.same or not verdict.joined:
            return False
        pairs = enumerate(zip(likeliest, dims, strict=True))
        shared = [i for i, (first, own) in pairs if first is not None and own is None]
        moved = (self._moves(trial, i) for i in shared)
        return any(each & verdict.same and not each & verdict.joined for each in moved)

    def _moves(self, trial: Trial, place: int) -> set[str]:
        """The paths of the outputs that are others if one of a sample's inputs is."""
        tensors = part(trial.tensors, [None] * len(trial.tensors), 0, 0)
        given = tensors[place]
        if not isinstance(given, Tensor) or given.layout != torch.strided:
            return set(trial.whole)
        tensors[place] = given * 0.5 if given.is_floating_point() else given.flip(0)
        try:
            output = self.runs.output_of(tensors)
        except Exception as error:
            if not is_the_models(error):
                raise
            return set(trial.whole)
        return {
            path
            for path, value in leaves(output, "output")
            if isinstance(value, Tensor)
            and isinstance(before := trial.whole.get(path), Tensor)
            and (value.shape != before.shape or difference(before, value))
        }

    def _none(self, verdicts: list[tuple[InDims, Verdict]], ways: Sequence[InDims]) -> Meaning:
        """The meaning where no candidate fits: an error, or with ``check="warn"`` a warning and
        the first candidate."""
        # If the model raises an error on the call itself, the trace will raise the same.
        is_known = self.on_the_inputs is not None and self.on_the_inputs.are_taken
        if not is_known and not is_taken(self.runs.output_of, self.tensors):
            return Meaning(verdicts[0][0])
        tried = next((v for v in verdicts if v[1].trial is not None and v[1].is_wrong), None)
        if tried is not None:
            dims, verdict = tried
            self.runs.uniform = verdict.uniform
            self._refuse_initialisation()
            text = self._unrepeatable(verdict) or self.by_values(dims, verdict)
            text = text or messages.wrong(
                self._by_buffers(dims, verdict),
                self.inputs,
                dims,
                self._advice(),
                self._packed(),
            )
            has_lists = any(each.is_list_of_rows for each in verdict.problems)
            if self.asked.check is True or has_lists:
                raise BatchError(text)
            if self.asked.check == "warn":
                self.asked.warn(text)
            return self.meaning(dims, verdict, ways)
        (dims, verdict), *_ = verdicts
        batch = rows_in(self.inputs, dims)
        sizes = messages.sizes(self.inputs)
        if len(sizes) > 1 and self.asked.check:
            raise BatchError(
                messages.several(sizes, self._packed() + self._advice())
            ) from verdict.failure
        if not verdict.takes_parts and self.asked.check and batch != 1:
            text = messages.no_parts(
                verdict, self.inputs, dims, self.given().arguments, self._advice()
            )
            raise BatchError(text) from verdict.failure
        note = "not checked: the model takes no other number of rows"
        return Meaning(dims, notes=[note], one_row_only=batch == 1)

    def _refuse_initialisation(self) -> None:
        """Raise TraceError if the first call of the model initialises its parameters by the rows
        that it is given: a pipeline would do so in every call, and other calls may mix no rows."""
        model = self.runs.model
        parameters = dict(model.named_parameters())
        if any(name in parameters for name in self.runs.changed or ()):
            given = self.runs.fill([tensor.clone() for tensor in self.tensors])
            refuse_what_is_done_once(model, lambda: called(model, *given))

    def _unrepeatable(self, verdict: Verdict) -> str:
        """What to say of a model that gives something else at each call, for the same inputs; an
        empty string if it does not."""
        trial = verdict.trial
        assert trial is not None
        output = self.runs.output_of(part(trial.tensors, [None] * len(trial.tensors), 0, 0))
        for path, value in leaves(output, "output"):
            before = trial.whole.get(path)
            if isinstance(value, Tensor) and isinstance(before, Tensor) and not value.is_meta:
                apart = difference(before, value)
                if apart:
                    return messages.unrepeatable(path, apart)
        return ""

    def _by_buffers(self, dims: InDims, verdict: Verdict) -> Verdict:
        """The same verdict, whose first problem says so if rows are mixed by way of buffers."""
        trial = verdict.trial
        if trial is None or self.listed is not None or any(t.is_meta for t in trial.tensors):
            return verdict
        place = next(i for i, each in enumerate(verdict.problems) if not each.is_scalar)
        problem = verdict.problems[place]
        buffers = mixed_in_buffers(self.runs, trial, dims, problem.path)
        if not buffers:
            return verdict
        problems = list(verdict.problems)
        problems[place] = messages.blamed_on_buffers(problem, buffers)
        return replace(verdict, problems=problems)

    def _advice(self) -> str:
        arguments = self.given().arguments
        return messages.advice_on(self.runs.model, arguments, self.inputs)

    def _packed(self) -> str:
        """Advice on rows of one input that belong together, as many to each row of another input;
        "" if the model, given the first of them alone, does not give the first row of its output.
        """
        rows = messages.sizes(self.inputs)
        text = packed(rows) if len(rows) > 1 else ""
        if not text or self.listed is not None or any(t.is_meta for t in self.tensors):
            return ""
        few, many = sorted(list(rows)[:2])
        first = {few: 1, many: many // few}
        try:
            whole, one = (
                dict(leaves(self.runs.output_of(each), "output"))
                for each in (
                    [t.clone() for t in self.tensors],
                    [t[: first.get(t.shape[0])].clone() if t.ndim else t for t in self.tensors],
                )
            )
        except Exception as error:
            if not is_the_models(error):
                raise
            return ""
        values = [(value, one.get(path)) for path, value in whole.items()]
        fits = [
            isinstance(part, Tensor) and part.shape[:1] == (1,) and not difference(all_[:1], part)
            for all_, part in values
            if isinstance(all_, Tensor) and all_.shape[:1] == (few,)
        ]
        return text if fits and all(fits) else ""

    def by_values(self, dims: InDims, verdict: Verdict) -> str:
        """What to say of a model that reads a value of its inputs as a number, which is another one
        for a micro-batch; an empty string if it does not."""
        trial = verdict.trial
        if trial is None or self.listed is not None or any(t.is_meta for t in trial.tensors):
            return ""
        names = [each.name for each in self.inputs]
        for seed in range(TRIALS):  # the samples of the check: in some the values may be the same
            rows, counts = [sum(trial.sizes), *trial.sizes], self.asked.counts
            tensors = sampled(self.tensors, dims, trial.sizes, trial.level, seed, counts)
            parts = replace(trial, tensors=tensors).each(dims)
            try:
                found = differing_value(self.runs.output_of, names, tensors, parts, rows)
            except Exception as error:
                if not is_the_models(error):
                    raise
                continue  # it has taken another sample of these
            if found:
                return messages.by_values(verdict, found)
        return ""

    def meaning(self, dims: InDims, verdict: Verdict, ways: Sequence[InDims]) -> Meaning:
        """The meaning with these batch dimensions, once the backward has been checked as well."""
        self.runs.uniform = verdict.uniform
        if self.contradiction:
            refuse(self.asked, self.contradiction)
        if self.random:
            refuse(self.asked, messages.not_stilled(sorted(self.random)))
        problem = self.in_the_backward(dims, verdict)
        notes = self._notes(dims, verdict, ways)
        for lasting in (self._lasting(dims, verdict), self._statistics_read()):
            if lasting is not None:
                notes.append(lasting.text)
                self.asked.warn(messages.lasting(lasting.text), about=f"lasting {lasting.path}")
        if problem is not None:
            text = messages.in_the_backward(problem)
            if self.asked.check is True:
                raise BatchError(text)
            self.asked.warn(text)
            notes.append(problem.text)
        return Meaning(
            dims,
            verdict.outputs,
            is_checked=verdict.trial is not None,
            differing=frozenset(each.path for each in verdict.problems),
            unclear=self._unclear(verdict),
            notes=notes,
            refused_sizes=verdict.refused_sizes,
            goes_by_size=verdict.goes_by_size,
        )

    def _unclear(self, verdict: Verdict) -> dict[str, bool]:
        """The outputs that may be means or sums for all that the check sees, and whether each has
        a gradient."""
        said = self.asked.loss_weight is not None and self.runs.returns_loss and self.runs.loss
        unclear = {path for path in verdict.unclear if not self._ignored(path) and path != said}
        if not unclear or not self.asked.check or verdict.trial is None:
            return {}

        def trained(held: list[Any], _: bool) -> dict[str, bool]:
            found = dict(leaves(held.pop(), "output"))
            return {path: has_gradient(found.get(path)) for path in unclear}

        tensors = verdict.trial.tensors
        try:
            whole = part(tensors, [None] * len(tensors), 0, 0)
            found: dict[str, bool] = self.runs.recorded(whole, trained)
        except Exception as error:
            if not is_the_models(error):
                raise
            return dict.fromkeys(unclear, False)
        return found

    def in_the_backward(self, dims: InDims, verdict: Verdict) -> Problem | None:
        """What is wrong with the gradients although the outputs are right; None if nothing is."""
        trial = verdict.trial
        if not self.asked.check or trial is None or any(t.is_meta for t in trial.tensors):
            return None
        if not self.asked.training:
            return None  # no backward is going to run
        wrong = {problem.path for problem in verdict.problems}
        unknown = wrong | self.random | {p for p, d in verdict.outputs.items() if d == WEIGHTED}
        known = {p: d for p, d in verdict.outputs.items() if p not in unknown and not is_a_row(p)}
        if not known:
            return None
        if trial.has_one_history:
            return None
        problem = self._of_gradients(trial, dims, known)
        if problem is None or not problem.is_slight or self.listed is not None:
            return problem
        # Where a decision has been tipped by rounding errors, it is another one in another sample.
        other = self._another(trial, dims)
        return problem if other is None or self._of_gradients(other, dims, known) else None

    def _another(self, trial: Trial, dims: InDims) -> Trial | None:
        """A further sample like this one; None if the model does not take it."""
        counts = self.asked.counts
        tensors = sampled(self.tensors, dims, trial.sizes, trial.level, TRIALS, counts)
        other = Trial(trial.sizes, trial.level, tensors, {}, [])
        return next(iter(taken(self.runs.output_of, other, dims)), None)

    def _of_gradients(self, trial: Trial, dims: InDims, known: Mapping[str, Dim]) -> Problem | None:
        """How the gradients of this sample differ from those of its parts; None if they do not.

        They are computed in single precision at least, and in the model's own only if it takes no
        other: see :mod:`fxpipe.meaning.backward`."""
        recorded, model, real = self.runs.recorded, self.runs.model, self.runs.real
        precisions: list[Callable[[], AbstractContextManager[object]]] = [widened, nullcontext]
        for inputs, precision in product([real, {}] if real else [{}], precisions):
            try:
                with precision():
                    return backward_problem(recorded, model, trial, dims, known, inputs)
            except Exception as error:
                if not is_the_models(error):
                    raise  # else it takes no inputs with gradients, or has no backward
        return None

    def _lasting(self, dims: InDims, verdict: Verdict) -> Problem | None:
        """What differs where parts find the state that the parts before them have left."""
        trial, runs, changed = verdict.trial, self.runs, self.runs.changed or ()
        if self.asked.deferred_batch_norm:  # their count goes up once for each mini-batch
            counts = {f"{name}.num_batches_tracked" for name in batch_norms(runs.model)}
            changed = [name for name in changed if name not in counts]
        if not (self.asked.check and changed) or trial is None or self.listed is not None:
            return None
        try:
            return lasting_problem(runs.in_sequence, runs.keeping, trial, dims, changed)
        except Exception as error:
            if not is_the_models(error):
                raise
            return None  # it takes no second call in the state that the first one leaves

    def _statistics_read(self) -> Problem | None:
        """What is to be told of running statistics of batch norms that the forward itself reads. As
        batch norms are stilled while the model is checked, no run shows what depends on them."""
        names = list(self.runs.statistics_read)
        if not self.asked.check or not names:
            return None
        return Problem(
            "statistics",
            f"the forward reads {_first_of(names)}, which a batch norm in train mode updates in "
            "each call, and each micro-batch is a call: it reads what the micro-batches so far "
            "have left, not the statistics of the mini-batch",
        )

    def _notes(self, dims: InDims, verdict: Verdict, ways: Sequence[InDims]) -> list[str]:
        notes = []
        if dims != ways[0]:
            notes.append(messages.other_dims(self.inputs, dims))
        if any(t.is_meta for t in self.tensors):
            notes.append('not checked: on the device "meta" nothing has values')
        if self.random:
            notes.append("not checked: the outputs that depend on random numbers")
        names = batch_norms(self.runs.model) or ["batch_norm"] * self.runs.met_batch_norm
        if names:
            running = "with deferred_batch_norm=True the running ones are those of the mini-batch"
            if self.asked.deferred_batch_norm:
                running = "the running ones are those of the mini-batch (deferred_batch_norm=True)"
            notes.append(
                f"batch statistics are those of each micro-batch ({_first_of(names)}); {running}"
            )
        drawing = dropouts(self.runs.model)
        if drawing or self.runs.met_random_numbers or self.runs.drew:
            by = f" ({_first_of(drawing)})" if drawing else ""
            notes.append(
                f"random numbers are drawn for each micro-batch by itself{by}, and are others than "
                "those of the model on the whole batch"
            )
        if by := self._once_masked(dims, verdict):
            notes.append(
                f"the loss is a mean over the rows as long as no labels are {IGNORED}; for those "
                f"that are, give loss_weight={by}"
            )
        if verdict.mixed is not None:
            notes.append(
                f"{verdict.mixed.text}; this is so only where integers of several rows are mixed, "
                "not for rows like those of the example"
            )
        notes += [f"{problem.text}, for some rows only" for problem in verdict.slight]
        notes += [problem.text for problem in verdict.problems]
        return notes

    def tell(self, dims: InDims, verdict: Verdict) -> None:
        """Warn of each problem of a verdict, with its remedy."""
        if self.asked.check:
            for problem in verdict.problems:
                by = self._remedy(dims, verdict, problem)
                has_sum = not by and self._has_sum(dims, verdict, problem)
                trained = self.asked.calls_are_trained
                self.asked.warn(
                    messages.across(
                        problem, self.inputs, by, has_sum=has_sum, calls_are_trained=trained
                    )
                )

    def _has_sum(self, dims: InDims, verdict: Verdict, problem: Problem) -> bool:
        """Whether a number is a mean over the rows plus a sum over them."""

        def number(tensors: list[Tensor]) -> Any:
            return dict(leaves(self.runs.output_of(tensors), "output"))[problem.path]

        if verdict.trial is None or self.listed is not None:
            return False
        with widened():
            return is_mean_plus_sum(number, verdict.trial, problem.path, dims)

    def _remedy(self, dims: InDims, verdict: Verdict, problem: Problem) -> str:
        """The ``loss_weight`` that makes a loss equal to the model's, as code that the user can
        write; "" if none is known."""
        is_the_loss = self.runs.returns_loss and self.runs.loss == problem.path
        if verdict.trial is None or not is_the_loss:
            return ""
        given = dict(self.given().arguments)
        labels = [
            (each.name, i)
            for i, each in enumerate(self.inputs)
            if at_path(given, each.name) is not None
        ]
        with LabelsLeftOut() as left_out:
            with widened():
                own = of_own_values(self.runs.output_of, self.tensors, dims)
            own = own or of_own_values(self.runs.output_of, self.tensors, dims)
        trials, loss, weigh = [*own, *verdict.trials], self.runs.loss, self._weigh
        conditions = list(left_out.conditions)
        weight = None if left_out.weight is None else ("weight", left_out.weight)
        return remedy(trials, loss, labels, weigh, dims, conditions=conditions, weight=weight)

    def _once_masked(self, dims: InDims, verdict: Verdict) -> str:
        """The ``loss_weight`` that a loss needs once some labels are IGNORED; "" if it needs none.

        The example may have no such label. Then all its rows have the same number of labels, and
        the check sees a plain mean over the rows.
        """
        trial, loss = verdict.trial, self.runs.loss
        is_mean = loss in verdict.outputs and verdict.outputs[loss] is None
        if trial is None or not is_mean or self.asked.loss_weight is not None:
            return ""
        for i, each in enumerate(self.inputs):
            if "label" not in each.name or dims[i] is None or not each.name.isidentifier():
                continue
            masked = with_ignored(trial, i, dims[i] or 0)
            try:
                sample = ran(self.runs.output_of, masked, dims)
            except Exception as error:
                if not is_the_models(error):
                    raise
                continue  # this model does not take the label IGNORED
            if by := remedy([sample], loss, [(each.name, i)], self._weigh, dims):
                return by
        return ""

    # ---------------------------------------------------------------------------- asking the model

    def verdict_of(
        self, dims: InDims, is_likely: bool, sizes: Sequence[tuple[int, ...]] = ()
    ) -> Verdict:
        """The verdict of the check on one candidate.

        ``sizes``: the sizes of the parts of samples, in the order in which they are tried; by
        default two small samples, and then the micro-batches that the example is cut into.
        """
        batch = rows_in(self.inputs, dims) or 0
        if not agree(self.inputs, dims) or not batch:
            return Verdict(takes_parts=True)
        self.runs.drew, self.runs.uniform = False, UNIFORM[0]
        question = self._question(dims, sizes or (*SIZES, self.asked.sizes(batch)))
        is_asked_again = True
        while is_asked_again:
            modes = len(self.runs.modes)
            verdict = check(question, self._ignored, is_likely=is_likely)
            # Else what it gives in two modes would be compared, or with other random numbers.
            is_asked_again = len(self.runs.modes) < modes or self.runs.still_more()
        if self.runs.drew and not verdict.is_exact and verdict.trial is not None:
            self.random = self._moving(verdict.trial)
            verdict = check(question, self._ignored, is_likely=is_likely)
        verdict = self._with_other_draws(dims, verdict)
        if not (self.runs.loss and self.runs.returns_loss and self.asked.loss_weight is not None):
            return verdict
        weigh = self._weigh(self.asked.loss_weight)
        verdict, self.contradiction = weighed(
            verdict, self.runs.loss, self.asked.loss_weight, weigh, dims
        )
        return verdict

    def _question(self, dims: InDims, sizes: Sequence[tuple[int, ...]]) -> Question:
        return Question(
            *(self.runs.ran, self.tensors, dims, sizes, self.listed is not None),
            counts=self.asked.counts,
            said=self.runs.said,
            is_void=lambda: self.runs.has_more_to_still,
        )

    def _with_other_draws(self, dims: InDims, verdict: Verdict) -> Verdict:
        """The same verdict; or another one, where something shows with other random numbers only:
        rows that are mixed where a number is below a rate, or an output that is zero, so that it
        may be a mean or a sum, where a mask leaves nothing."""
        trial = verdict.trial
        if not (self.runs.met_uniform and self.asked.check and verdict.is_exact) or trial is None:
            return verdict
        for uniform in UNIFORM[1:]:
            self.runs.uniform = uniform
            other = check(self._question(dims, [trial.sizes]), self._ignored, is_likely=True)
            other.uniform = uniform
            if other.problems:
                return other
            says_more = other.unclear < verdict.unclear or other.same < verdict.same
            if other.is_exact and says_more:
                verdict = other
        return verdict

    def _ignored(self, path: str) -> bool:
        """Whether an output is not compared: it depends on random numbers, or ``out_dims`` says how
        it is put together, and nothing is to be refused or warned of."""
        return path in self.random or (path in self.runs.said and not self.asked.check)

    def _moving(self, trial: Trial) -> set[str]:
        """The outputs that differ between two runs with different random seeds."""
        undivided = [None] * len(trial.tensors)
        first, second = (
            dict(leaves(self.runs.output_of(part(trial.tensors, undivided, 0, 0), seed)))
            for seed in (1, 2)
        )
        return {
            f"output{path}"
            for path, value in first.items()
            if isinstance(value, Tensor)
            and not (path in second and torch.equal(value, second[path]))
        }


def _is_real(tensor: Any) -> bool:
    """Whether an input may get a gradient."""
    is_plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided
    return is_plain and tensor.is_floating_point() and not tensor.is_meta
