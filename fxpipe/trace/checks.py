"""The check of a front end's graph: it is run beside the model, at several batch sizes, and has to
give the same outputs, buffers and gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# The pytree that torch.export and Hugging Face register their types with.
from fxpipe.ir._torch import pytree
from fxpipe.ir.errors import TraceError, is_the_models
from fxpipe.ir.structure import is_opened, leaves
from fxpipe.ir.tensors import largest_of, pieces
from fxpipe.runtime.checkpointing.regions import Region
from fxpipe.trace.errors import Refused, first_line, may_be_the_models, suppressed
from fxpipe.trace.example import Effects, Example, Traced
from fxpipe.trace.gradients import gradient_difference, largest_eps, listed, without_repetitions
from fxpipe.trace.isolation import parameters_put_back, untouched

ON_THE_EXAMPLE = "on the example"
GRADIENT_TOLERANCE = 1e-3  # relative to the largest element
EXPORT_TOLERANCE = 1e-5  # relative: export decomposes some modules into other kernels


@dataclass(frozen=True)
class Reference:
    """One run of the model itself, at one batch size, with which its graph is compared."""

    tensors: list[Tensor]  # the inputs
    result: Effects
    where: str  # "on the example", or "at batch size 2": for messages
    rows: int | None  # the batch size; None if it is the example's


def references(example: Example) -> list[Reference]:
    """Runs of the model, with which a graph of it is compared: one on two rows (on one row more
    than the example has, if it has one or two), and one, with gradients recorded, on the fewest
    rows of :func:`_few_rows` that the model takes.

    A batch size that a front end has frozen shows at any other size; few rows show it as well as
    many, and take less time. Where the model does not take a batch of these sizes, the example
    itself is run; what the model raises on that is passed on.
    """
    batch = example.batch
    found = []
    if batch is not None:
        found = _at_size(example, batch + 1 if batch <= 2 else 2, watched=True)
    found = found or [on_the_example(example)]
    first = found[0].result
    if first.written:
        refuse_what_is_done_once(example.model, lambda: example.call(_copies(example.tensors)))
    for size in _few_rows(batch):
        if smaller := _at_size(example, size, recorded=True, watched=bool(first.written)):
            return [*found, *smaller]
    with suppressed():  # the model may run without gradients only
        return [*found, on_the_example(example, recorded=True)]
    return found


def at_more_rows(example: Example) -> list[Reference]:
    """A run of the model on one row more than the example has, as a list of one; an empty list if
    the model does not take it.

    It shows a batch size of the example that is a constant of the graph where the graph takes at
    most so many rows: ``x[:4]`` of fewer rows is ``x``. A front end of this package notes such a
    constant (:mod:`fxpipe.trace.sizes`), or leaves all sizes symbolic; a tracer of the user's may
    do neither.
    """
    batch = example.batch or 0
    return _at_size(example, batch + 1, watched=True) if batch > 2 else []  # else it has been run


def smallest_reference(example: Example, *, recorded: bool = False) -> Reference:
    """One run of the model on as few rows as it takes; what the model raises on the example itself
    is passed on.

    ``recorded``: whether gradients are recorded.
    """
    for size in _few_rows(example.batch):
        if smaller := _at_size(example, size, recorded=recorded, watched=True):
            return smaller[0]
    return on_the_example(example, recorded=recorded)


def _few_rows(batch: int | None) -> list[int]:
    """Batch sizes below the example's, in the order in which they are tried on a model.

    Many models take one row; batch norm in training takes two or more; models that form groups of
    rows take three, four, or half of the batch.
    """
    return sorted(size for size in {1, 2, 3, 4, (batch or 0) // 2} if 0 < size < (batch or 0))


def refused_sizes(example: Example, references: list[Reference]) -> frozenset[int]:
    """The batch sizes at which the model has raised an error, so that micro-batches of these sizes
    are too small for it.

    The set is empty for a model that takes no batch size other than the example's.
    """
    accepted = {reference.rows for reference in references if reference.rows is not None}
    tried = _few_rows(example.batch)
    return frozenset(size for size in tried if accepted and size < min(accepted))


def on_the_example(example: Example, *, recorded: bool = False) -> Reference:
    """A run of the model on the example as it is, with gradients recorded if the model needs them
    to run; what it raises then is passed on."""
    try:
        result = example.run(example.tensors, recorded=recorded, watched=True)
        return Reference(example.tensors, result, ON_THE_EXAMPLE, None)
    except Exception as error:
        if recorded or not is_the_models(error):
            raise
    # Not within the handler: the error of this run would be shown with the other one as its cause.
    return on_the_example(example, recorded=True)


def _at_size(
    example: Example, size: int, *, recorded: bool = False, watched: bool
) -> list[Reference]:
    """A run of the model at another batch size, as a list of one; an empty list if the model raises
    an error at that size."""
    tensors = example.resized(size)
    for history in (True, False) if recorded else (False,):
        # Recorded runs are watched: with gradients on, a model may write where it did not before.
        with suppressed():
            result = example.run(tensors, recorded=history, watched=watched or history)
            return [Reference(tensors, result, f"at batch size {size}", size)]
    return []


def refuse_what_is_done_once(model: nn.Module, call: Callable[[], object]) -> None:
    """Raise TraceError for a model that writes to parameters in its first call only (to initialise
    them from the data, say): a graph of that call would write to them in every call. ``call`` calls
    the model."""
    written = []
    with untouched(model), torch.no_grad():
        for _ in range(2):
            with parameters_put_back(model) as saved:
                call()
            written.append({name: write.where for name, write in saved.items()})
    if written[0].keys() != written[1].keys():
        name, where = next(iter(written[0].items()))
        raise TraceError(
            f"{type(model).__name__} writes to its parameters ({name}, by {where}) when it is "
            f"first called in {'train' if model.training else 'eval'} mode, and not later: call it "
            "once in this mode ahead of compiling it"
        )


def made_buffers(example: Example) -> str:
    """What to say of a model that makes buffers in its first call, or replaces them by others of
    another shape or type, and leaves them so in a call on another number of rows; "" for any other
    model.

    No operator does this. Buffers that follow the number of rows are made in every call: to call
    such a model ahead of compiling it would not help.
    """
    model = example.model
    sizes = (example.batch, *_few_rows(example.batch))
    with suppressed(), untouched(model), parameters_put_back(model), torch.no_grad():
        seen = [_looks_of_buffers(model)]
        for size in sizes[:2]:
            example.call(example.tensors if size is None else example.resized(size))
            seen.append(_looks_of_buffers(model))
        before, after, last = seen[0], seen[1], seen[-1]
        names = [name for name, looks in after.items() if before.get(name) != looks]
        if not names or after != last:
            return ""
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        does = "replaces" if names[0] in before else "makes"
        how = " by one of another shape or type" if names[0] in before else ""
        return (
            f"{type(model).__name__} {does} the buffer {names[0]}{others} in its forward{how}, "
            "which no graph has: call the model once ahead of fxpipe.compile, with the longest "
            "inputs that it is to get, so that the buffer is there; or keep it in an attribute "
            "that is no buffer"
        )
    return ""


def _looks_of_buffers(model: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (buffer.shape, buffer.dtype) for name, buffer in model.named_buffers()}


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def compare(
    example: Example, references: list[Reference], traced: Traced, tolerance: float
) -> None:
    """Raise ``Refused`` unless the graph gives the model's outputs, buffers and gradients.

    Args:
        references: runs of the model at several batch sizes.
        tolerance: by how much outputs and buffers may differ, relative to the largest number; 0.0
            asks for equal bits.

    If the graph differs at another batch size than the example's, it is compared on the example as
    well: the message then tells whether the graph is wrong in any case, or at other sizes only.
    """
    watched = any(reference.result.written for reference in references)
    for reference in references:
        try:
            _compare(example, reference, traced, tolerance, watched)
        except Refused:
            if reference.where != ON_THE_EXAMPLE:
                _compare(example, on_the_example(example), traced, tolerance, watched)
            raise


def compare_gradients_of_inputs(example: Example, reference: Reference, traced: Traced) -> None:
    """Raise ``Refused`` unless the graph gives inputs the gradients that the model gives them.

    The histories that :func:`compare` compares begin at parameters: they do not show what lies
    ahead of the first one.
    """
    try:
        expected = example.gradients_of_inputs(reference.tensors)
    except Exception as error:
        if not is_the_models(error):
            raise
        return  # the model takes no inputs with gradients, or has no backward
    try:
        actual = example.gradients_of_inputs(reference.tensors, traced)
    except Exception as error:
        if not may_be_the_models(error):
            raise
        raise Refused(f"the backward of its graph fails: {first_line(error)}") from error
    for name, tensor, one, other in zip(
        example.names, reference.tensors, expected, actual, strict=True
    ):
        first, second = (torch.zeros_like(tensor) if g is None else g for g in (one, other))
        if found := difference(first, second, GRADIENT_TOLERANCE):
            raise Refused(f"its graph has another gradient for the input {name}: {found}")


def _compare(
    example: Example, reference: Reference, traced: Traced, tolerance: float, watched: bool
) -> None:
    expected, where = reference.result, reference.where
    recorded = expected.history is not None
    try:
        actual = example.run(reference.tensors, traced, recorded=recorded, watched=watched)
    except Exception as error:
        if not may_be_the_models(error):
            raise
        raise Refused(f"its graph fails {where}: {first_line(error)}") from error
    if watched and expected.written.keys() != actual.written.keys():
        ours, theirs = (", ".join(each.written) or "none" for each in (actual, expected))
        raise Refused(
            f"its graph differs {where}: it writes to the parameters {ours}, the model to {theirs}"
        )
    for name, one, other in (
        ("output", expected.output, actual.output),
        ("buffers", expected.buffers, actual.buffers),
    ):
        found = difference(one, other, tolerance)
        if found:
            raise Refused(f"its graph differs {where}: {name}: {found}")
    # Equal values and equal histories lead to equal gradients, so that no backward is needed. This
    # is not so for a region (a checkpoint): its backward runs its forward again, which records
    # another history.
    regions = any(isinstance(module, Region) for module in traced.graph_module.modules())
    names: Collection[str] = ()
    if recorded and regions:
        names = example.trained
    elif recorded and expected.history != actual.history:
        names = without_repetitions(example.trained, [expected.history, actual.history])
    if names:
        _compare_gradients(example, reference, traced, names, watched)


def _compare_gradients(
    example: Example, reference: Reference, traced: Traced, names: Collection[str], watched: bool
) -> None:
    """Raise ``Refused`` unless the gradients of these parameters are the model's in a run of the
    graph."""
    run = example.run(reference.tensors, backward=names, watched=watched)
    if run.no_backward is not None:
        if not is_the_models(run.no_backward):
            raise run.no_backward
        return  # the model has no backward: there is nothing to compare
    graph = example.run(reference.tensors, traced, backward=names, watched=watched)
    failure = graph.no_backward
    if failure is not None:
        if not may_be_the_models(failure):
            raise failure
        raise Refused(f"the backward of its graph fails: {first_line(failure)}") from failure
    expected, actual = run.gradients, graph.gradients
    dtypes = {parameter.dtype for parameter in example.model.parameters()}
    found = gradient_difference(expected, actual, largest_eps(dtypes))
    if found.lost:
        raise Refused(f"its graph has no gradient for {listed(found.lost)}, and the model has one")
    if found.gained:
        raise Refused(f"its graph has a gradient for {listed(found.gained)}, and the model none")
    if found.others:
        raise Refused(f"its graph has another gradient for {listed(found.others)}")


def difference(expected: Any, actual: Any, tolerance: float) -> str | None:
    """How two values of any structure differ; None if they do not."""
    parts, spec = pytree.tree_flatten(expected)
    others, other_spec = pytree.tree_flatten(actual)
    if spec != other_spec:
        return f"{_structure(actual)} in place of {_structure(expected)}"
    for leaf, other in zip(parts, others, strict=True):
        found = _leaf_difference(leaf, other, tolerance)
        if found:
            return found
    return None


def _leaf_difference(expected: Any, actual: Any, tolerance: float) -> str | None:
    if type(expected) is not type(actual):
        return f"a {type(actual).__name__} in place of a {type(expected).__name__}"
    if isinstance(expected, Tensor):
        return _tensor_difference(expected, actual, tolerance)
    if is_opened(expected):
        return difference(list(leaves(expected)), list(leaves(actual)), tolerance)
    return None if expected == actual else f"{actual!r} in place of {expected!r}"


def _tensor_difference(expected: Tensor, actual: Tensor, tolerance: float) -> str | None:
    if expected.device.type != "cpu":
        tolerance = max(tolerance, EXPORT_TOLERANCE)  # kernels there may be nondeterministic
    scale = 0.0
    if tolerance and expected.is_floating_point() and expected.numel():
        tolerance = with_rounding(tolerance, expected.dtype)
        scale = largest_of(expected)
    if _is_close(expected, actual, tolerance, tolerance * scale):
        return None
    try:  # it says how far they are apart
        torch.testing.assert_close(
            actual, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True
        )
    except AssertionError as error:
        return " ".join(str(error).split())
    return None


def with_rounding(tolerance: float, dtype: torch.dtype) -> float:
    """A tolerance, relative to the largest value, or what a few rounding errors of a dtype make, if
    that is more."""
    return max(tolerance, 8 * torch.finfo(dtype).eps) if dtype.is_floating_point else tolerance


def _is_close(expected: Tensor, actual: Tensor, relative: float, absolute: float) -> bool:
    """Whether dense tensors of real numbers are equal, up to these errors."""
    kinds = [(t.shape, t.dtype, t.device, t.layout) for t in (expected, actual)]
    if kinds[0] != kinds[1] or expected.layout != torch.strided or not expected.numel():
        return False
    if not expected.is_floating_point():
        return torch.equal(expected, actual)
    return all(
        torch.allclose(two, one, rtol=relative, atol=absolute, equal_nan=True)
        for one, two in pieces(expected, actual)
    )


def _structure(value: Any) -> str:
    """A value's outermost type with its keys or its length, for messages: ``tuple of 2``."""
    name = type(value).__name__
    if isinstance(value, dict):
        return f"{name} of {', '.join(map(str, value)) or 'nothing'}"
    return f"{name} of {len(value)}" if isinstance(value, list | tuple) else name
