"""What micro-batching means for one kind of call, and whether it gives what the model gives.

The batch dimensions that inputs may have (the candidates) are checked one after the other. The
first is taken with which micro-batches, put together, give the model's outputs; if there is none,
the call is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fxpipe.ir.errors import Unsupported
from fxpipe.meaning import messages
from fxpipe.meaning.asked import Asked, Meaning, refuse
from fxpipe.meaning.asking import Asking, Trace
from fxpipe.meaning.candidates import agree, candidates, rows_in
from fxpipe.meaning.compare import computed_with, dtypes_of
from fxpipe.meaning.errors import BatchError
from fxpipe.meaning.listed import Listed, any_row
from fxpipe.meaning.said import Input, named_inputs
from fxpipe.runtime.microbatch import LISTED, InDim
from fxpipe.trace.itself import OnTheInputs
from fxpipe.trace.twin import model_of

P = ParamSpec("P")
R = TypeVar("R")

_LAYOUTS = torch.strided, torch.sparse_coo
"""The layouts of tensors that can be cut into micro-batches. A call with a tensor of another layout
is not checked: tracing refuses it, with its own message."""


@dataclass(frozen=True)
class _KnownDims:
    """The batch dimensions that a check has found for a call.

    ``single`` are the shared inputs' dimensions of size 1, by the inputs' numbers. Where such a
    dimension is larger in another call, it may be that of the rows: ``t`` of shape (1,) is one
    value for all rows, and of shape (B,) a value for each.
    """

    dims: Sequence[InDim]
    single: frozenset[tuple[int, int]]

    @staticmethod
    def of(inputs: Sequence[Input], dims: Sequence[InDim]) -> _KnownDims:
        single = (
            (i, dim)
            for i, (each, own) in enumerate(zip(inputs, dims, strict=True))
            for dim, size in enumerate(each.tensor.shape)
            if own is None and size == 1
        )
        return _KnownDims(dims, frozenset(single))

    def is_like(self, inputs: Sequence[Input]) -> bool:
        """Whether the dimensions that have been of size 1 still are."""
        return all(inputs[i].tensor.shape[dim] == 1 for i, dim in self.single)


_FOUND: WeakKeyDictionary[nn.Module, dict[Any, list[_KnownDims]]] = WeakKeyDictionary()
"""What earlier checks of a model have found, by the names of the tensors; the last one first."""


def known_dims(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], in_dims: Any = None
) -> Sequence[InDim] | None:
    """The batch dimension of each tensor among the inputs, if that has been found for a call like
    this one, or if there is no choice."""
    inputs = named_inputs(model, args, kwargs, in_dims)
    for found in _found(model, inputs):
        if LISTED in found:
            listed = Listed.of(model, args, kwargs, inputs)
            if listed is not None and found == listed.in_dims(listed.rows):
                return found
        elif agree(inputs, found):
            return found
    return None


def remember_dims(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_dims: Any,
    found: Sequence[InDim],
) -> None:
    """Remember batch dimensions that a check in another process has found, see
    :func:`known_dims`."""
    _note(model, named_inputs(model, args, kwargs, in_dims), found)


def _in_the_precision_of_the_model(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function of a model, and of the arguments of a call, compare outputs as what has been
    computed with the precision of the model and of its inputs."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        model, *inputs = args[:3]
        with computed_with(dtypes_of(model, inputs)):
            return function(*args, **kwargs)

    return wrapped


@_in_the_precision_of_the_model
def meaning_of(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    asked: Asked,
    trace: Trace | None = None,
    compiled: Sequence[InDim] = (),
) -> Meaning:
    """How a call is cut into micro-batches whose outputs, put together, are the model's outputs.

    Args:
        trace: traces the model. With it, a graph of the model may take the model's place on parts
            of samples; it then has been compared with the model, too.
        compiled: the batch dimensions by which the call has been compiled already. No others are
            tried then.

    Raises:
        BatchError: if there is no such way, or what the user has said does not fit.
        BatchWarning: (a warning) for numbers, such as losses, that depend on all rows.
    """
    inputs = named_inputs(model, args, kwargs, asked.in_dims)
    ways = candidates(inputs)
    is_said = not ways
    listed = Listed.of(model, args, kwargs, inputs)
    itself = OnTheInputs(model, args, kwargs)
    if len(asked.sizes(8)) == 1:  # always one micro-batch, so that there is nothing to check
        return Meaning(ways[0] if ways else [None] * len(inputs))
    before = next(iter(_found(model, inputs)), None)
    if compiled and LISTED not in compiled:
        ways, listed, before = [[d if isinstance(d, int) else None for d in compiled]], None, None
    is_known = before is not None and LISTED in before
    if listed is not None and (is_said or is_known or listed.is_likely):
        found = _in_lists(itself, listed, asked, is_said)
        if found is not None:
            _note(model, inputs, found.in_dims)
            return found
        listed = None
    elif before is not None and agree(inputs, before):
        first = [None if dim is None else int(dim) for dim in before]
        ways = [first, *(way for way in ways if way != first)]
    _refuse_cut_sparse(inputs, ways[0])
    ways = [way for way in ways if _sparse_cut(inputs, way) is None]
    batch = rows_in(inputs, ways[0])
    is_one = not batch and listed is None
    if is_one or any(each.tensor.layout not in _LAYOUTS for each in inputs):
        return Meaning(ways[0])
    asking = Asking(model, args, kwargs, inputs, asked, on_the_inputs=itself)
    if listed is not None:
        asking.otherwise = partial(_in_lists, itself, listed, asked, False)
    found = None if trace is None or not asked.check else asking.by_graph(ways, trace)
    found = found or asking.best(ways)
    _note(model, inputs, found.in_dims)
    return found


@_in_the_precision_of_the_model
def check_at_size(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    meaning: Meaning,
    asked: Asked,
    chunks: int,
) -> None:
    """Check a meaning with as many rows as the example has, cut into ``chunks`` micro-batches of
    one size, as a call will be: for a model whose branches depend on the number of rows. Outputs
    that differ for fewer rows, too, do not go by that number.

    Raises:
        BatchError: if the parts do not make the whole, or a warning, as :func:`meaning_of`.
    """
    dims = [dim if isinstance(dim, int) else None for dim in meaning.in_dims]
    inputs = named_inputs(model, args, kwargs, asked.in_dims)
    sizes = ((rows_in(inputs, dims) or 0) // chunks,) * chunks
    if len(sizes) < 2 or not asked.check or any(each.tensor.is_meta for each in inputs):
        return
    asking = Asking(model, args, kwargs, inputs, asked)
    verdict = asking.verdict_of(dims, True, (sizes,))
    if verdict.trial is None:
        return
    problems = [each for each in verdict.problems if each.path not in meaning.differing]
    verdict = replace(verdict, problems=problems)
    if not problems:
        if problem := asking.in_the_backward(dims, verdict):
            refuse(asked, messages.in_the_backward(problem))
        return
    text = asking.by_values(dims, verdict) or messages.by_size(problems[0], sizes, inputs, dims)
    if verdict.is_wrong:
        refuse(asked, text)
    else:
        asked.warn(text)


@_in_the_precision_of_the_model
def takes_size(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_dims: Sequence[InDim],
    asked: Asked,
    size: int,
) -> bool:
    """Whether the model gives for two micro-batches of a size what it gives for their rows at once:
    for a model that does not for all sizes.

    Raises:
        BatchWarning: (a warning) for a number, such as a loss, that is another one.
    """
    dims = [dim if isinstance(dim, int) else None for dim in in_dims]
    inputs = named_inputs(model, args, kwargs, asked.in_dims)
    asking = Asking(model, args, kwargs, inputs, asked)
    verdict = asking.verdict_of(dims, False, ((size, size),))
    if verdict.trial is None:
        return False
    if verdict.problems and not verdict.is_wrong:
        asked.warn(messages.at_a_size(verdict.problems[0], size))
    return not verdict.is_wrong


def _in_lists(call: OnTheInputs, listed: Listed, asked: Asked, is_said: bool) -> Meaning | None:
    """The meaning of a call whose lists have one element for each row.

    If cutting these lists does not give the model's output, this is an error if the user has asked
    for it (``is_said``); else the result is None.
    """
    asking = Asking(call.model, call.args, call.kwargs, listed.inputs, asked, listed, call)
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


def _found(model: nn.Module, inputs: Sequence[Input]) -> Iterator[Sequence[InDim]]:
    """The batch dimensions that checks have found for calls like this one, the last one first."""
    known = _FOUND.get(model_of(model), {}).get(_key(inputs), [])
    return (each.dims for each in known if each.is_like(inputs))


def _sparse_cut(inputs: Sequence[Input], dims: Sequence[InDim]) -> Input | None:
    """The first sparse input that has a batch dimension; None if there is none."""
    pairs = zip(inputs, dims, strict=True)
    return next(
        (i for i, dim in pairs if isinstance(dim, int) and i.tensor.layout == torch.sparse_coo),
        None,
    )


def _refuse_cut_sparse(inputs: Sequence[Input], dims: Sequence[InDim]) -> None:
    if (found := _sparse_cut(inputs, dims)) is not None:
        raise Unsupported(
            f"the input {found} is a sparse tensor, which cannot be cut into micro-batches: give "
            f"it dense, by {found.name}.to_dense(), or give its indices and values as tensors, of "
            "which the model makes it; if all micro-batches share it, give None for it in in_dims"
        )


def _note(model: nn.Module, inputs: Sequence[Input], dims: Sequence[InDim]) -> None:
    """Note the batch dimensions that a check has found."""
    known = _FOUND.setdefault(model_of(model), {}).setdefault(_key(inputs), [])
    own = _KnownDims.of(inputs, dims)
    known[:] = [own, *(each for each in known if each != own)]


def _key(inputs: Sequence[Input]) -> Any:
    return tuple((each.name, each.tensor.ndim, each.said) for each in inputs)
