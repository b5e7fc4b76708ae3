"""Whether a graph is the model: both are run, at several batch sizes, and compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# The pytree that torch.export and Hugging Face register their types with.
from torch.utils import _pytree as pytree

from fxpipe.structure import is_opened, leaves
from fxpipe.trace.care import parameters_put_back, untouched
from fxpipe.trace.errors import Refused, TraceError, first_line
from fxpipe.trace.example import Example, Result, Traced

EXPORT_TOLERANCE = 1e-5  # relative: export decomposes some modules into other kernels


GRADIENT_TOLERANCE = 1e-3  # of the largest: the small ones may be mere rounding errors


@dataclass(frozen=True)
class Reference:
    """What the model does at one batch size."""

    tensors: list[Tensor]
    result: Result
    where: str
    written: str | None = None  # a parameter that it writes to, and where


def references(example: Example) -> list[Reference]:
    """The model's own runs, at the example's batch size and at those others that it takes.

    Raises what the model raises at the example's size.
    """
    batch = example.batch
    with parameters_put_back(example.model) as written:
        result = example.run(example.tensors)
    if written:
        _refuse_what_is_done_once(example)
    where = next((f"{name}, by {w.where}" for name, w in written.items()), None)
    references = [Reference(example.tensors, result, "on the example", where)]
    # Micro-batches are smaller, later batches may be larger; a size that got fixed shows at either.
    sizes = set() if batch is None else {1, batch // 2, batch + 1} - {0, batch}
    for size in sorted(sizes, reverse=True):
        tensors = example.resized(size)
        try:
            result = example.run(tensors)
        except Exception:  # it only takes some sizes, or this is no batch: nothing to compare
            continue
        references.append(Reference(tensors, result, f"at batch size {size}"))
    return references


def _refuse_what_is_done_once(example: Example) -> None:
    """A graph would write to the parameters at every call."""
    written = []
    with untouched(example.model), torch.no_grad():
        for _ in range(2):
            with parameters_put_back(example.model) as saved:
                example.call([tensor.clone() for tensor in example.tensors], None)
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
    """Raise ``Refused`` unless the graph does what the model does, to its buffers too."""
    for reference in references:
        try:
            result = example.run(reference.tensors, traced)
        except Exception as error:
            raise Refused(f"its graph fails {reference.where}: {first_line(error)}") from error
        for name, expected, actual in (
            ("output", reference.result.output, result.output),
            ("buffers", reference.result.buffers, result.buffers),
        ):
            difference = _difference(expected, actual, tolerance)
            if difference:
                raise Refused(f"its graph differs {reference.where}: {name}: {difference}")


def compare_gradients(example: Example, references: list[Reference], traced: Traced) -> None:
    """Raise ``Refused`` if the graph has other gradients than the model.

    A front end that looks into a ``torch.autograd.Function`` sees its forward only.
    """
    tensors = references[-1].tensors  # the smallest batch
    try:
        expected = example.gradients(tensors)
    except Exception:  # a model without a backward: nothing to compare
        return
    actual = example.gradients(tensors, traced)
    if len(expected) != len(actual):
        raise Refused("no gradient flows through its graph")
    scale = max((g.abs().max().item() for g in expected if g.numel()), default=0.0)
    names = [name for name, p in example.model.named_parameters() if p.requires_grad]
    for name, gradient, other in zip(names, expected, actual, strict=False):
        tolerance = max(GRADIENT_TOLERANCE, 32 * torch.finfo(gradient.dtype).eps) * scale
        if gradient.numel() and (gradient - other).abs().max().item() > tolerance:
            raise Refused(f"its graph has another gradient for {name}")


def _difference(expected: Any, actual: Any, tolerance: float) -> str | None:
    """How two values of any structure differ; None if they do not."""
    parts, spec = pytree.tree_flatten(expected)
    others, other_spec = pytree.tree_flatten(actual)
    if spec != other_spec:
        return f"{_structure(actual)} in place of {_structure(expected)}"
    for leaf, other in zip(parts, others, strict=True):
        difference = _leaf_difference(leaf, other, tolerance)
        if difference:
            return difference
    return None


def _leaf_difference(expected: Any, actual: Any, tolerance: float) -> str | None:
    if type(expected) is not type(actual):
        return f"a {type(actual).__name__} in place of a {type(expected).__name__}"
    if isinstance(expected, Tensor):
        return _tensor_difference(expected, actual, tolerance)
    if is_opened(expected):
        return _difference(list(leaves(expected)), list(leaves(actual)), tolerance)
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
