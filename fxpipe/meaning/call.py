"""What micro-batching means for one kind of call, and whether it gives what the model gives.

The batch dimensions that inputs may have (the candidates) are checked one after the other. The
first is taken with which micro-batches, put together, give the model's outputs; if there is none,
the call is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fxpipe.ir.errors import is_the_models
from fxpipe.ir.structure import Structure, leaves, map_tensors
from fxpipe.loss_weight import IGNORED
from fxpipe.meaning import messages
from fxpipe.meaning.backward import backward_problem, differentiable, with_history
from fxpipe.meaning.candidates import InDims, agree, candidates
from fxpipe.meaning.check import SIZES, Problem, Question, Trial, Verdict, check, ran
from fxpipe.meaning.compare import difference
from fxpipe.meaning.errors import BatchError, BatchWarning
from fxpipe.meaning.lasting import lasting_problem
from fxpipe.meaning.listed import Column, Listed, any_row, is_a_row, is_column
from fxpipe.meaning.loss import own_loss
from fxpipe.meaning.said import INFER, Input, broadcast, named_inputs
from fxpipe.meaning.sample import part
from fxpipe.meaning.stilled import batch_norms, dropouts, still
from fxpipe.meaning.stirred import Values, in_place_of_zeros, stirred
from fxpipe.meaning.weights import (
    Fill,
    Weigh,
    dim_of,
    named_arguments,
    remedy,
    weighed,
    with_ignored,
)
from fxpipe.runtime.microbatch import LISTED, SUM, WEIGHTED, Dim, InDim, ListOfRows
from fxpipe.runtime.random import seed_host
from fxpipe.trace import called, canonical, parameters_put_back, untouched
from fxpipe.trace.gradients import has_gradient, without_saved_tensors
from fxpipe.trace.isolation import Since
from fxpipe.trace.patches import tensor_hooks
from fxpipe.trace.twin import model_of


@dataclass
class Meaning:
    """How a call is cut into micro-batches, and how their outputs are put together."""

    in_dims: Sequence[InDim]
    outputs: dict[str, Dim] = field(default_factory=dict)
    """How each output is put together, by its path; empty where the model could not be run."""
    unclear: dict[str, bool] = field(default_factory=dict)
    """The outputs, by their paths, that are zero for every sample, so that they may be means or
    sums: whether each has a gradient."""
    notes: list[str] = field(default_factory=list)
    """Remarks for the report, such as that dropout masks are those of each micro-batch."""
    one_row_only: bool = False
    """Whether the example has one row, and the model does not run on more than one."""
    listed: Listed | None = None
    """The call, if it has lists with one element for each row."""
    refused_sizes: frozenset[int] = frozenset()
    """The sizes of micro-batches for which the model gives something else than for the same rows
    among others."""


@dataclass
class Asked:
    """The options with which a user says how a call is to be read.

    Args:
        in_dims, out_dims: as for :func:`fxpipe.compile`.
        check: True: what differs from the model is refused; "warn": it is warned of; False: it is
            accepted.
        sizes: a function from the number of rows of a mini-batch to the sizes of its micro-batches.
        loss_weight: as for :func:`fxpipe.compile`.
        returns_loss: whether ``loss_weight`` is about a loss that the model returns.
    """

    in_dims: Any = None
    out_dims: Any = None
    check: bool | str = True
    sizes: Callable[[int], tuple[int, ...]] = lambda batch: ()
    loss_weight: Any = None
    returns_loss: bool = False


_LAYOUTS = torch.strided, torch.sparse_coo
"""The layouts of tensors that can be cut into micro-batches. A call with a tensor of another layout
is not checked: tracing refuses it, with its own message."""

_FOUND: WeakKeyDictionary[nn.Module, dict[Any, Sequence[InDim]]] = WeakKeyDictionary()
"""The batch dimensions that an earlier check has found for a model, by the names of the tensors."""


def known_dims(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], in_dims: Any = None
) -> Sequence[InDim] | None:
    """The batch dimension of each tensor among the inputs, if that has been found for a call like
    this one, or if there is no choice."""
    inputs = named_inputs(model, args, kwargs, in_dims)
    found = _FOUND.get(model_of(model), {}).get(_key(inputs))
    if found is None or LISTED not in found:
        return found if found is not None and agree(inputs, found) else None
    listed = Listed.of(model, args, kwargs, inputs)
    return found if listed is not None and found == listed.in_dims(listed.rows) else None


def meaning_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Asked
) -> Meaning:
    """How a call is cut into micro-batches whose outputs, put together, are the model's outputs.

    Raises:
        BatchError: if there is no such way, or what the user has said does not fit.
        BatchWarning: (a warning) for numbers, such as losses, that depend on all rows.
    """
    inputs = named_inputs(model, args, kwargs, asked.in_dims)
    ways = candidates(inputs)
    is_said = not ways
    listed = Listed.of(model, args, kwargs, inputs)
    if len(asked.sizes(8)) == 1:  # always one micro-batch, so that there is nothing to check
        return Meaning(ways[0] if ways else [None] * len(inputs))
    before = _FOUND.get(model_of(model), {}).get(_key(inputs))
    is_known = before is not None and LISTED in before
    if listed is not None and (is_said or is_known or listed.is_likely):
        found = _in_lists(model, args, kwargs, listed, asked, is_said)
        if found is not None:
            _FOUND.setdefault(model_of(model), {})[_key(inputs)] = found.in_dims
            return found
        listed = None
    elif before is not None and agree(inputs, before):
        first = [None if dim is None else int(dim) for dim in before]
        ways = [first, *(way for way in ways if way != first)]
    batch = _batch(inputs, ways[0])
    is_one = not batch and listed is None
    if is_one or any(each.tensor.layout not in _LAYOUTS for each in inputs):
        return Meaning(ways[0])
    asking = _Asking(model, args, kwargs, inputs, asked)
    if listed is not None:
        asking.otherwise = partial(_in_lists, model, args, kwargs, listed, asked, False)
    found = asking.best(ways)
    _FOUND.setdefault(model_of(model), {})[_key(inputs)] = found.in_dims
    return found


def check_at_size(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    meaning: Meaning,
    asked: Asked,
) -> None:
    """Check a meaning with as many rows as the example has, cut into the micro-batches that it
    will be cut into: for a model whose branches depend on the number of rows.

    Raises:
        BatchError: if the parts do not make the whole, or a warning, as :func:`meaning_of`.
    """
    dims = [dim if isinstance(dim, int) else None for dim in meaning.in_dims]
    inputs = named_inputs(model, args, kwargs, asked.in_dims)
    sizes = asked.sizes(_batch(inputs, dims) or 0)
    if len(sizes) < 2 or not asked.check or any(each.tensor.is_meta for each in inputs):
        return
    asking = _Asking(model, args, kwargs, inputs, asked)
    verdict = asking.verdict_of(dims, True, (sizes,))
    if verdict.trial is None:
        return
    if not verdict.problems:
        if problem := asking.in_the_backward(dims, verdict):
            _refuse(asked, messages.in_the_backward(problem))
        return
    text = messages.by_size(verdict.problems[0], sizes)
    if verdict.is_wrong:
        _refuse(asked, text)
    else:
        warnings.warn(text, BatchWarning, stacklevel=2)


def _in_lists(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    listed: Listed,
    asked: Asked,
    is_said: bool,
) -> Meaning | None:
    """The meaning of a call whose lists have one element for each row.

    If cutting these lists does not give the model's output, this is an error if the user has asked
    for it (``is_said``); else the result is None.
    """
    asking = _Asking(model, args, kwargs, listed.inputs, asked, listed)
    if is_said:
        found = asking.best([listed.dims])
        if not found.outputs:
            raise BatchError(
                f"the model takes no lists of another length for {listed.names}, so that they "
                "cannot be cut between their elements, one for each row: give chunks=1"
            )
    else:
        verdict = asking.verdict_of(listed.dims, is_likely=False)
        if verdict.trial is None or verdict.is_wrong:
            return None
        asking.tell(listed.dims, verdict)
        found = asking.meaning(listed.dims, verdict, [listed.dims])
    found.in_dims = listed.in_dims(listed.rows)
    found.outputs = {any_row(path): dim for path, dim in found.outputs.items()}
    found.listed = listed
    found.notes.insert(0, f"the batch is found by the check: {listed.names} along the list")
    return found


def _key(inputs: Sequence[Input]) -> Any:
    return tuple((each.name, each.tensor.ndim, each.said) for each in inputs)


def _batch(inputs: Sequence[Input], dims: Sequence[int | None]) -> int | None:
    pairs = zip(inputs, dims, strict=True)
    return next((each.tensor.shape[dim] for each, dim in pairs if dim is not None), None)


def loss_dim(
    model: nn.Module,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    in_dims: Sequence[InDim],
    loss: Callable[[Any, Any], Any],
    readings: Sequence[Targets],
    asked: Asked,
) -> tuple[int, Dim]:
    """How the target is cut into micro-batches, as a place among the readings; and how the losses
    of the micro-batches are put together to the loss of the mini-batch: by a sum (SUM), a mean over
    the rows (None), or with the weights of ``loss_weight`` (WEIGHTED).

    Args:
        loss: the user's function of output and target.
        readings: the ways in which the target may be cut, the likeliest first. The first one with
            which the parts make the whole is taken; if there is none, the first one.

    Raises:
        BatchError: if the model does not tell, or if what the user has said does not fit.
        BatchWarning: (a warning) for a loss that is neither a mean over the rows nor a sum.
    """
    found = [_LossOfTarget(model, inputs, in_dims, loss, each, asked) for each in readings]
    if len(found) == 1:
        return 0, found[0].dim()
    place = next((i for i, each in enumerate(found) if each.verdict().is_exact), 0)
    return place, found[place].dim()


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
    ) -> None:
        args, kwargs = inputs
        self.model, self.loss, self.target, self.asked = model, loss, target, asked
        self.named = named_inputs(model, args, kwargs, asked.in_dims)
        listed = Listed.of(model, args, kwargs, self.named) if LISTED in in_dims else None
        if listed is not None:
            self.named, self.own = listed.inputs, listed.dims
        else:
            self.own = [dim if isinstance(dim, int) else None for dim in in_dims]
        self.asking = _Asking(model, args, kwargs, self.named, asked, listed)
        self.count = len(self.asking.tensors)  # those of the inputs come first
        leaves = enumerate(target.leaves)
        self.places = [i for i, leaf in leaves if isinstance(leaf, Tensor | ListOfRows)]
        given = (target.leaves[i] for i in self.places)
        cut = [Column(leaf.elements) if isinstance(leaf, ListOfRows) else leaf for leaf in given]
        self.tensors: list[Any] = [*self.asking.tensors, *cut]
        self.dims = [*self.own, *(0 if target.has_batch[i] else None for i in self.places)]
        some = Structure.of(inputs)[0]
        self.device = some[0].device if some else None

    def filled(self, tensors: Sequence[Any]) -> Any:
        """The target with these tensors, on the device of the inputs."""
        given = list(self.target.leaves)
        for place, value in zip(self.places, tensors[self.count :], strict=True):
            rows = self.target.leaves[place]
            brought = map_tensors(self._brought, value.tensors if is_column(value) else value)
            given[place] = type(rows.elements)(brought) if isinstance(rows, ListOfRows) else brought
        return self.target.fill(given)

    def _brought(self, value: Any) -> Any:
        return value if self.device is None else value.to(self.device)

    def run(self, tensors: list[Tensor]) -> tuple[Any, None]:
        """The loss, without an autograd graph."""
        output = self.asking.output_of(tensors[: self.count])
        with untouched(self.model), torch.no_grad():  # the loss may draw random numbers
            return self.loss(output, self.filled(tensors)), None

    def weigh(self, function: Callable[..., Any]) -> Weigh:
        """The weight of a micro-batch by a function of its target."""
        return lambda tensors: function(self.filled(tensors))

    def verdict(self) -> Verdict:
        """What the check comes to."""
        question = Question(self.run, self.tensors, self.dims)
        verdict = check(question, is_likely=True)
        if self.asking.drew and not self.asking.stilled:
            self.asking.stilled = True
            verdict = check(question, is_likely=True)
        return verdict

    def dim(self) -> Dim:
        """How the losses of the micro-batches are put together. Raises BatchError, or warns."""
        asked, verdict = self.asked, self.verdict()
        if asked.loss_weight is not None:
            weigh = self.weigh(asked.loss_weight)
            verdict, wrong = weighed(verdict, LOSS, asked.loss_weight, weigh, self.dims)
            if wrong:
                _refuse(asked, wrong.replace(LOSS, "loss_fn", 1))
        elif verdict.trial is None or LOSS in verdict.unclear:
            sizes = asked.sizes(_batch(self.named, self.own) or 0)
            first = part(self.tensors, self.dims, 0, sizes[0])
            if verdict.trial is None and not _is_taken(self.run, first):
                return None  # it raises an error on a micro-batch: the step will raise the same
            _refuse(asked, messages.unknown_loss(verdict))
        if asked.check and verdict.problems and verdict.problems[0].is_scalar:
            by = ""
            if verdict.trial is not None and asked.loss_weight is None:
                keys = _keys_of(self.target, self.places)
                count = self.count
                labels = [
                    (keys[i], count + i)
                    for i in range(len(self.places))
                    if i in keys and not is_column(self.tensors[count + i])
                ]
                by = remedy(verdict.trial, LOSS, labels, self.weigh, self.dims)
            text = messages.across(verdict.problems[0], self.named, by)
            warnings.warn(text.replace(LOSS, "the loss", 1), BatchWarning, stacklevel=2)
        if asked.loss_weight is not None:
            return dim_of(asked.loss_weight)
        return SUM if verdict.outputs.get(LOSS) == SUM else None


LOSS = "output"
"""The path of the loss in a question whose only output is the loss."""


@dataclass(frozen=True)
class Targets:
    """The target of a mini-batch: its leaves, whether each of them is cut into micro-batches, and a
    function that puts it together from leaves."""

    leaves: Sequence[Any]
    has_batch: Sequence[bool]
    fill: Callable[[Sequence[Any]], Any]


def _keys_of(target: Targets, places: Sequence[int]) -> dict[int, str]:
    """The key of each tensor in a target that is a dictionary, by the tensor's place in ``places``;
    "" for a target that is a tensor itself."""
    marks = list(target.leaves)
    for i in places:
        marks[i] = torch.empty(0)
    whole = target.fill(marks)
    if isinstance(whole, Tensor):
        return {0: ""}
    if not isinstance(whole, Mapping):
        return {}
    return {
        k: str(key)
        for k, i in enumerate(places)
        for key, value in whole.items()
        if value is marks[i]
    }


def _is_taken(run: Callable[[list[Tensor]], Any], tensors: Sequence[Tensor]) -> bool:
    """Whether the model, or the loss, takes these tensors."""
    try:
        run([tensor.detach().clone() for tensor in tensors])
    except Exception as error:
        if not is_the_models(error):
            raise
        return False
    return True


def _refuse(asked: Asked, text: str) -> None:
    """Raise BatchError, or warn, or do nothing, as the option ``check`` says."""
    if asked.check is True:
        raise BatchError(text)
    if asked.check:
        warnings.warn(text, BatchWarning, stacklevel=3)


def refuse_unclear(meaning: Meaning, check: bool | str, path: str) -> None:
    """Raise an error for an output that is zero for every sample, so that it may be a mean or a
    sum, if it has a gradient; warn of one that has none."""
    if path in meaning.unclear and check:
        text = messages.unclear(path)
        if meaning.unclear[path] and check is True:
            raise BatchError(text)
        warnings.warn(text, BatchWarning, stacklevel=2)


def _first_of(names: Sequence[str]) -> str:
    """The first name and the number of the others, as text."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


class _Asking:
    """One check of a kind of call: it runs the model on samples of the inputs, without effect on
    the model, and notes what it meets (random numbers, batch statistics, the path of the loss)."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: Sequence[Input],
        asked: Asked,
        listed: Listed | None = None,
    ) -> None:
        self.model, self.inputs, self.asked = model, inputs, asked
        self.listed = listed
        self.otherwise: Callable[[], Meaning | None] = lambda: None  # tried if no candidate fits
        self.arguments: Fill
        self.fill: Callable[[Sequence[Any]], Any]
        if listed is not None:
            self.tensors, self.fill = listed.values, listed.call
            self.arguments = lambda values: ((), listed.by_name(values))
        else:
            self.tensors, structure = Structure.of(canonical(model, args, kwargs))
            self.fill, self.arguments = structure.fill, named_arguments(model, args, kwargs)
        self.stilled = model.training  # whether the model runs without randomness, see ``still``
        # The inputs of real numbers, by their places: they get gradients while the model runs.
        self.real = {i: each.name for i, each in enumerate(inputs) if _is_real(each.tensor)}
        # How the model is run, the first way that it takes: with gradients for the parameters and
        # for these inputs, or without any gradients (None).
        self.modes: list[Mapping[int, str] | None] = [self.real] if self.real else []
        self.modes += [{}, None]
        self.drew = False  # whether a run of the model has drawn random numbers
        self.met_batch_norm = False  # whether it has called a batch norm that is no module
        self.met_random_numbers = False  # whether a draw (of dropout, say) has been replaced
        self.said: set[str] = set()  # the outputs that ``out_dims`` says something of
        self.random: set[str] = set()  # the outputs that depend on the random seed
        self.loss = ""  # the path of the loss among the model's outputs, "" if it has none
        self.returns_loss = asked.returns_loss
        self.contradiction = ""  # how the model contradicts ``loss_weight``, for a message
        # The names of the buffers, parameters and attributes that the forward changes, once known.
        self.changed: list[str] | None = None
        self._values: Values | None = None  # for parameters of zeros, see ``stirred``

    def _weigh(self, function: Callable[..., Any]) -> Weigh:
        """The weight of a micro-batch by a function of the model's arguments."""

        def weigh(tensors: Sequence[Any]) -> Any:
            args, kwargs = self.arguments(tensors)
            return function(*args, **kwargs)

        return weigh

    def best(self, ways: Sequence[InDims]) -> Meaning:
        """The meaning by the first candidate with which all outputs are the model's.

        If there is none, it is the likeliest candidate, the first one, as long as only single
        numbers (losses) differ with it: a loss across rows differs with every candidate.
        """
        verdicts: list[tuple[InDims, Verdict]] = []
        for dims in ways:
            verdict = self.verdict_of(dims, is_likely=dims == ways[0])
            if verdict.is_exact:
                return self.meaning(dims, verdict, ways)
            verdicts.append((dims, verdict))
        if (found := self.otherwise()) is not None:
            return found
        dims, verdict = verdicts[0]
        if verdict.trial is not None and not verdict.is_wrong:
            self.tell(dims, verdict)
            return self.meaning(dims, verdict, ways)
        return self._none(verdicts, ways)

    def _none(self, verdicts: list[tuple[InDims, Verdict]], ways: Sequence[InDims]) -> Meaning:
        """The meaning where no candidate fits: an error, or with ``check="warn"`` a warning and
        the first candidate."""
        # If the model raises an error on the call itself, the trace will raise the same.
        if not _is_taken(self.output_of, self.tensors):
            return Meaning(verdicts[0][0])
        tried = next((v for v in verdicts if v[1].trial is not None and v[1].is_wrong), None)
        if tried is not None:
            dims, verdict = tried
            text = self._unrepeatable(verdict) or messages.wrong(verdict, self.inputs, dims)
            if self.asked.check is True:
                raise BatchError(text)
            if self.asked.check == "warn":
                warnings.warn(text, BatchWarning, stacklevel=2)
            return self.meaning(dims, verdict, ways)
        (dims, verdict), *_ = verdicts
        batch = _batch(self.inputs, dims)
        sizes = messages.sizes(self.inputs)
        if len(sizes) > 1 and self.asked.check:
            raise BatchError(messages.several(sizes, self.inputs)) from verdict.failure
        if not verdict.takes_parts and self.asked.check and batch != 1:
            raise BatchError(messages.no_parts(verdict, self.inputs, dims)) from verdict.failure
        note = "not checked: the model takes no other number of rows"
        return Meaning(dims, notes=[note], one_row_only=batch == 1)

    def _unrepeatable(self, verdict: Verdict) -> str:
        """What to say of a model that gives something else at each call, for the same inputs; an
        empty string if it does not."""
        trial = verdict.trial
        assert trial is not None
        output = self.output_of(part(trial.tensors, [None] * len(trial.tensors), 0, 0))
        for path, value in leaves(output, "output"):
            before = trial.whole.get(path)
            if isinstance(value, Tensor) and isinstance(before, Tensor) and not value.is_meta:
                apart = difference(before, value)
                if apart:
                    return messages.unrepeatable(path, apart)
        return ""

    def meaning(self, dims: InDims, verdict: Verdict, ways: Sequence[InDims]) -> Meaning:
        """The meaning with these batch dimensions, once the backward has been checked as well."""
        if self.contradiction:
            _refuse(self.asked, self.contradiction)
        problem = self.in_the_backward(dims, verdict)
        notes = self._notes(dims, verdict, ways)
        if lasting := self._lasting(dims, verdict):
            notes.append(lasting)
            warnings.warn(messages.lasting(lasting), BatchWarning, stacklevel=2)
        if problem is not None:
            text = messages.in_the_backward(problem)
            if self.asked.check is True:
                raise BatchError(text)
            warnings.warn(text, BatchWarning, stacklevel=2)
            notes.append(problem.text)
        unclear, refused = self._unclear(verdict), verdict.refused_sizes
        return Meaning(dims, verdict.outputs, unclear, notes, refused_sizes=refused)

    def _unclear(self, verdict: Verdict) -> dict[str, bool]:
        """The outputs that may be means or sums for all that the check sees, and whether each has
        a gradient."""
        said = self.asked.loss_weight is not None and self.returns_loss and self.loss
        unclear = {path for path in verdict.unclear if not self._ignored(path) and path != said}
        if not unclear or not self.asked.check or verdict.trial is None:
            return {}

        def trained(output: Any, _: bool) -> dict[str, bool]:
            found = dict(leaves(output, "output"))
            return {path: has_gradient(found.get(path)) for path in unclear}

        tensors = verdict.trial.tensors
        try:
            whole = part(tensors, [None] * len(tensors), 0, 0)
            found: dict[str, bool] = self._recorded(whole, trained)
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
        wrong = {problem.path for problem in verdict.problems}
        unknown = wrong | self.random | {p for p, d in verdict.outputs.items() if d == WEIGHTED}
        known = {p: d for p, d in verdict.outputs.items() if p not in unknown and not is_a_row(p)}
        if not known:
            return None
        if trial.has_one_history:
            return None
        for inputs in (self.real, {}) if self.real else ({},):
            try:
                return backward_problem(self._recorded, self.model, trial, dims, known, inputs)
            except Exception as error:
                if not is_the_models(error):
                    raise  # else it takes no inputs with gradients, or has no backward
        return None

    def _lasting(self, dims: InDims, verdict: Verdict) -> str:
        """What differs where parts find the state that the parts before them have left."""
        trial = verdict.trial
        if not (self.asked.check and self.changed) or trial is None or self.listed is not None:
            return ""
        try:
            return lasting_problem(self._in_sequence, trial, dims, self.changed)
        except Exception as error:
            if not is_the_models(error):
                raise
            return ""  # it takes no second call in the state that the first one leaves

    def _notes(self, dims: InDims, verdict: Verdict, ways: Sequence[InDims]) -> list[str]:
        notes = []
        if dims != ways[0]:
            notes.append(messages.other_dims(self.inputs, dims))
        if any(t.is_meta for t in self.tensors):
            notes.append('not checked: on the device "meta" nothing has values')
        if self.random:
            notes.append("not checked: the outputs that depend on random numbers")
        names = batch_norms(self.model) or ["batch_norm"] * self.met_batch_norm
        if names:
            notes.append(
                f"batch statistics are those of each micro-batch ({_first_of(names)}): "
                "deferred_batch_norm=True makes the running ones those of the mini-batch"
            )
        drawing = dropouts(self.model)
        if drawing or self.met_random_numbers or self.drew:
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
                text = messages.across(problem, self.inputs, self._remedy(dims, verdict, problem))
                warnings.warn(text, BatchWarning, stacklevel=2)

    def _remedy(self, dims: InDims, verdict: Verdict, problem: Problem) -> str:
        """The ``loss_weight`` that makes a loss equal to the model's, as code that the user can
        write; "" if none is known."""
        says = self.asked.loss_weight is not None
        if verdict.trial is None or says or not (self.loss == problem.path and self.returns_loss):
            return ""
        labels = [(each.name, i) for i, each in enumerate(self.inputs) if each.name.isidentifier()]
        return remedy(verdict.trial, self.loss, labels, self._weigh, dims)

    def _once_masked(self, dims: InDims, verdict: Verdict) -> str:
        """The ``loss_weight`` that a loss needs once some labels are IGNORED; "" if it needs none.

        The example may have no such label. Then all its rows have the same number of labels, and
        the check sees a plain mean over the rows.
        """
        trial, loss = verdict.trial, self.loss
        is_mean = loss in verdict.outputs and verdict.outputs[loss] is None
        if trial is None or not is_mean or self.asked.loss_weight is not None:
            return ""
        for i, each in enumerate(self.inputs):
            if "label" not in each.name or dims[i] is None or not each.name.isidentifier():
                continue
            masked = with_ignored(trial, i, dims[i] or 0)
            try:
                sample = ran(self.output_of, masked, dims)
            except Exception as error:
                if not is_the_models(error):
                    raise
                continue  # this model does not take the label IGNORED
            if by := remedy(sample, loss, [(each.name, i)], self._weigh, dims):
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
        batch = _batch(self.inputs, dims) or 0
        if not agree(self.inputs, dims) or not batch:
            return Verdict(takes_parts=True)
        is_listed = self.listed is not None
        sizes = sizes or (*SIZES, self.asked.sizes(batch))
        question = Question(self.ran, self.tensors, dims, sizes, is_listed)
        self.drew = False
        modes = len(self.modes)
        verdict = check(question, self._ignored, is_likely=is_likely)
        if len(self.modes) < modes:  # else what it gives in two modes would be compared
            verdict = check(question, self._ignored, is_likely=is_likely)
        if self.drew and not self.stilled:
            self.stilled, self.drew = True, False
            verdict = check(question, self._ignored, is_likely=is_likely)
        if self.drew and not verdict.is_exact and verdict.trial is not None:
            self.random = self._moving(verdict.trial)
            verdict = check(question, self._ignored, is_likely=is_likely)
        if not (self.loss and self.returns_loss and self.asked.loss_weight is not None):
            return verdict
        weigh = self._weigh(self.asked.loss_weight)
        verdict, self.contradiction = weighed(
            verdict, self.loss, self.asked.loss_weight, weigh, dims
        )
        return verdict

    def _ignored(self, path: str) -> bool:
        """Whether an output is not compared: ``out_dims`` says how it is put together, or it
        depends on random numbers."""
        return path in self.said or path in self.random

    def _moving(self, trial: Trial) -> set[str]:
        """The outputs that differ between two runs with different random seeds."""
        first, second = (
            dict(
                leaves(self.output_of(part(trial.tensors, [None] * len(trial.tensors), 0, 0), seed))
            )
            for seed in (1, 2)
        )
        return {
            f"output{path}"
            for path, value in first.items()
            if isinstance(value, Tensor)
            and not (path in second and torch.equal(value, second[path]))
        }

    def output_of(self, tensors: Sequence[Tensor], seed: int | None = None) -> Any:
        """The model's output for these tensors, from a run without side effects."""
        output, _ = self.ran(tensors, seed)
        return output

    def ran(self, tensors: Sequence[Tensor], seed: int | None = None) -> tuple[Any, Hashable]:
        """The model's output for these tensors, from a run without side effects, and the autograd
        graph behind it; None in its place if the model runs without gradients only.

        One run with gradients tells both, and takes no more time or memory than a run without, as
        no tensors are saved for a backward.
        """
        mode, *others = self.modes
        try:
            return self._ran_in(mode, tensors, seed)
        except Exception as error:
            if not others or not is_the_models(error):
                raise
        found = self._ran_in(None, tensors, seed)  # an error now is not about gradients
        self.modes = others
        return found if others == [None] else self.ran(tensors, seed)

    def _ran_in(
        self, mode: Mapping[int, str] | None, tensors: Sequence[Tensor], seed: int | None
    ) -> tuple[Any, Hashable]:
        if mode is None:
            args, kwargs = self.fill([tensor.clone() for tensor in tensors])
            with torch.no_grad():
                return self._output(args, kwargs, seed), None

        def run() -> tuple[Any, Hashable]:
            given, own = differentiable([tensor.clone() for tensor in tensors], mode)
            then = partial(with_history, list(own.values()))
            found: tuple[Any, Hashable] = self._recorded(given, then, seed)
            return found

        return without_saved_tensors(run)

    def _recorded(
        self, tensors: list[Tensor], then: Callable[[Any, bool], Any], seed: int | None = None
    ) -> Any:
        """Run the model with gradients, and return ``then(output, hooked)``; ``hooked`` says
        whether the run has registered hooks on tensors."""
        args, kwargs = self.fill(tensors)
        with tensor_hooks() as hooks, torch.inference_mode(False), torch.enable_grad():
            return self._output(args, kwargs, seed, lambda output: then(output, bool(hooks)))

    def _output(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seed: int | None,
        then: Callable[[Any], Any] = lambda output: output,
    ) -> Any:
        def call() -> tuple[Any, Any]:
            output = called(self.model, args, kwargs)
            return output, then(output)

        output, made = self._quietly(call, seed)
        if self.returns_loss:
            loss = own_loss(output)
            is_one = isinstance(loss, Tensor) and not loss.ndim and loss.is_floating_point()
            paths = (path for path, leaf in leaves(output, "output") if leaf is loss)
            self.loss = next(paths, "") if is_one else ""
        if self.asked.out_dims is not None:
            for path, _, dim in broadcast(self.asked.out_dims, output, "output"):
                if dim is not INFER:
                    self.said.add(path)
        return made

    def _quietly(self, run: Callable[[], Any], seed: int | None = None) -> Any:
        """What a function gives that calls the model, without effect on the model."""
        quiet = still(self.model) if self.stilled else nullcontext()
        if self._values is None:
            self._values = in_place_of_zeros(self.model)
        with (
            stirred(self._values),
            untouched(self.model) as since,
            parameters_put_back(self.model) as written,
        ):
            if seed is not None:
                torch.manual_seed(seed)
                seed_host(seed)
            before = dict(self.model.named_buffers())
            with quiet as stilled:
                made = run()
            if stilled is not None:
                self.met_batch_norm |= stilled.met_batch_norm
                self.met_random_numbers |= stilled.met_random_numbers
            self.drew = self.drew or (seed is None and since.drew_random_numbers())
            if self.changed is None:
                self.changed = self._changes(since, before, written)
        return made

    def _changes(
        self, since: Since, before: Mapping[str, Tensor], parameters: Mapping[str, Any]
    ) -> list[str]:
        """The names of what the forward has changed on the model."""
        after = dict(self.model.named_buffers())
        changed = set(map(id, since.written()))
        buffers = [n for n, b in after.items() if b is not before.get(n) or id(b) in changed]
        paths = {module: name for name, module in self.model.named_modules()}
        attributes = [f"{paths[m]}.{n}".removeprefix(".") for m, n in since.changed() if m in paths]
        return [*parameters, *buffers, *attributes]

    def _in_sequence(self, calls: Sequence[list[Tensor]]) -> tuple[list[Any], dict[str, Tensor]]:
        """What the model gives in several calls, one after the other, and the values of its buffers
        and parameters after the last one. No call undoes what the call before it has changed."""

        def run() -> tuple[list[Any], dict[str, Tensor]]:
            outputs = []
            for tensors in calls:
                args, kwargs = self.fill(tensors)
                output = called(self.model, args, kwargs)
                outputs.append(map_tensors(lambda t: t.detach().clone(), output))
            own = (*self.model.named_parameters(), *self.model.named_buffers())
            return outputs, {n: t.detach().clone() for n, t in own if n in (self.changed or ())}

        found: tuple[list[Any], dict[str, Tensor]]
        with torch.set_grad_enabled(self.modes[0] is not None):
            found = without_saved_tensors(lambda: self._quietly(run))
        return found


def _is_real(tensor: Any) -> bool:
    """Whether an input may get a gradient."""
    is_plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided
    return is_plain and tensor.is_floating_point() and not tensor.is_meta
