"""Whether a graph is the model: both are run, at several batch sizes, and compared."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

# The pytree that torch.export and Hugging Face register their types with.
from fxpipe.ir._torch import pytree
from fxpipe.ir.errors import TraceError
from fxpipe.ir.structure import is_opened, leaves
from fxpipe.runtime.regions import Region
from fxpipe.trace.errors import Refused, first_line, suppressed
from fxpipe.trace.example import Effects, Example, Traced
from fxpipe.trace.isolation import parameters_put_back, untouched

ON_THE_EXAMPLE = "on the example"
EXPORT_TOLERANCE = 1e-5  # relative: export decomposes some modules into other kernels
GRADIENT_TOLERANCE = 1e-3  # of the largest: the small ones may be mere rounding errors


@dataclass(frozen=True)
class Reference:
    """What the model does at one batch size."""

    tensors: list[Tensor]
    result: Effects
    where: str
    rows: int | None  # None: those of the example


def references(example: Example) -> list[Reference]:
    """The model's own runs: on two rows (one more than the example has, if it has one or two), and
    on the fewest rows that it takes of :func:`_few_rows`, this with a history for its gradients.

    A size that got fixed shows at any other; few rows show it as well as many, and a run of the
    model may take long. The example itself is run where the model does not take that many rows;
    what the model raises on it is raised.
    """
    batch = example.batch
    found = []
    if batch is not None:
        found = _at_size(example, batch + 1 if batch <= 2 else 2, watched=True)
    found = found or [_on_the_example(example)]
    first = found[0].result
    if first.written:
        _refuse_what_is_done_once(example)
    for size in _few_rows(batch):
        if smaller := _at_size(example, size, recorded=True, watched=bool(first.written)):
            return [*found, *smaller]
    with suppressed():  # it may run without gradients only
        return [*found, _on_the_example(example, recorded=True)]
    return found


def _few_rows(batch: int | None) -> list[int]:
    """Batch sizes below that of the example, to try which of them a model takes: one row; two where
    rows are normalised by each other; the size of a small group; or half."""
    return sorted(size for size in {1, 2, 3, 4, (batch or 0) // 2} if 0 < size < (batch or 0))


def refused_sizes(example: Example, references: list[Reference]) -> frozenset[int]:
    """The batch sizes at which the model has raised an error, and which are too small therefore.

    None for a model that takes the example's batch size and no other.
    """
    accepted = {reference.rows for reference in references if reference.rows is not None}
    tried = _few_rows(example.batch)
    return frozenset(size for size in tried if accepted and size < min(accepted))


def _on_the_example(example: Example, *, recorded: bool = False) -> Reference:
    try:
        result = example.run(example.tensors, recorded=recorded, watched=True)
    except Exception:
        if recorded:
            raise
        return _on_the_example(example, recorded=True)  # it may run with gradients only
    return Reference(example.tensors, result, ON_THE_EXAMPLE, None)


def _at_size(
    example: Example, size: int, *, recorded: bool = False, watched: bool
) -> list[Reference]:
    """The model at another batch size; nothing if it does not take that."""
    tensors = example.resized(size)
    for history in (True, False) if recorded else (False,):
        # With gradients a model may do what it did not do in the first run.
        with suppressed():
            result = example.run(tensors, recorded=history, watched=watched or history)
            return [Reference(tensors, result, f"at batch size {size}", size)]
    return []


def _refuse_what_is_done_once(example: Example) -> None:
    """A graph would write to the parameters at every call."""
    written = []
    with untouched(example.model), torch.no_grad():
        for _ in range(2):
            with parameters_put_back(example.model) as saved:
                example.call([tensor.clone() for tensor in example.tensors])
            written.append({name: write.where for name, write in saved.items()})
    if written[0].keys() != written[1].keys():
        name, where = next(iter(written[0].items()))
        raise TraceError(
            f"{type(example.model).__name__} writes to its parameters ({name}, by {where}) when it "
            f"is first called in {'train' if example.model.training else 'eval'} mode, and not "
            "later: call it once in this mode ahead of compiling it"
        )


def compare(
    example: Example, references: list[Reference], traced: Traced, tolerance: float
) -> None:
    """Raise ``Refused`` unless the graph does what the model does, to its buffers too, and has the
    same gradients.

    Where it does not, the example alone says whether the size makes the difference.
    """
    watched = any(reference.result.written for reference in references)
    for reference in references:
        try:
            _compare(example, reference, traced, tolerance, watched)
        except Refused:
            if reference.where != ON_THE_EXAMPLE:
                _compare(example, _on_the_example(example), traced, tolerance, watched)
            raise


def _compare(
    example: Example, reference: Reference, traced: Traced, tolerance: float, watched: bool
) -> None:
    expected, where = reference.result, reference.where
    recorded = expected.history is not None
    try:
        actual = example.run(reference.tensors, traced, recorded=recorded, watched=watched)
    except Exception as error:
        raise Refused(f"its graph fails {where}: {first_line(error)}") from error
    for name, one, other in (
        ("output", expected.output, actual.output),
        ("buffers", expected.buffers, actual.buffers),
    ):
        found = difference(one, other, tolerance)
        if found:
            raise Refused(f"its graph differs {where}: {name}: {found}")
    # Where values and histories are equal, so are the gradients; a region that is computed twice
    # has another history the second time.
    regions = any(isinstance(module, Region) for module in traced.graph_module.modules())
    if recorded and (regions or expected.history != actual.history):
        _compare_gradients(example, reference, traced, watched)


def _compare_gradients(
    example: Example, reference: Reference, traced: Traced, watched: bool
) -> None:
    run = partial(example.run, reference.tensors, backward=True, watched=watched)
    try:
        expected = run().gradients
    except Exception:  # the model has no backward
        return
    try:
        actual = run(traced).gradients
    except Exception as error:
        raise Refused(f"the backward of its graph fails: {first_line(error)}") from error
    if len(expected) != len(actual):
        raise Refused("no gradient flows through its graph")
    names = [name for name, p in example.model.named_parameters() if p.requires_grad]
    scale = max((g.abs().max().item() for g in expected if g.numel()), default=0.0)
    for name, gradient, other in zip(names, expected, actual, strict=False):
        tolerance = max(GRADIENT_TOLERANCE, 32 * torch.finfo(gradient.dtype).eps) * scale
        equal = torch.equal(gradient, other)
        if not equal and (gradient - other).abs().max().item() > tolerance:
            raise Refused(f"its graph has another gradient for {name}")


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
        tolerance = max(tolerance, EXPORT_TOLERANCE)  # kernels there may not repeat themselves
    scale = 0.0
    if tolerance and expected.is_floating_point() and expected.numel():
        tolerance = max(tolerance, 8 * torch.finfo(expected.dtype).eps)
        scale = torch.nan_to_num(expected, posinf=0.0, neginf=0.0).abs().max().item()
    try:
        torch.testing.assert_close(
            actual, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True
        )
    except AssertionError as error:
        return " ".join(str(error).split())
    return None


def _structure(value: Any) -> str:
    """A value's outermost type, with its keys or its length."""
    name = type(value).__name__
    if isinstance(value, dict):
        return f"{name} of {', '.join(map(str, value))}"
    return f"{name} of {len(value)}" if isinstance(value, list | tuple) else name
