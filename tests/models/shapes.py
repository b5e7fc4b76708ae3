"""Runs a model of the zoo in eval mode, on its own inputs and then on inputs of other sizes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.models.compare import (
    BATCH,
    TOLERANCE,
    Result,
    batch_for,
    build,
    compiled,
    difference_on,
    micro_batches,
    one_thread,
)
from tests.models.registry import Entry

OF_SHAPES = (False, "never")  # of tests.models.compare.CASES: that of the first shape here
OTHERS = 2  # the most other shapes that a model is run on


@dataclass(frozen=True)
class Shapes:
    """How one pipeline did on several shapes of inputs, in eval mode."""

    count: int  # of shapes, with the first
    compilations: int
    front_end: str
    difference: float  # the largest from the loop, see :func:`tests.models.compare.difference`
    first: Result  # on the first of the shapes

    @property
    def is_good(self) -> bool:
        """Whether the differences are no more than the front end promises."""
        return self.difference <= (0.0 if self.front_end == "symbolic" else TOLERANCE)


def compare_shapes(entry: Entry) -> Shapes:
    """Run one pipeline on the entry's inputs, and then on inputs of other sizes that the model
    takes, each beside the loop over micro-batches."""
    with one_thread():
        torch.manual_seed(0)
        batches = [batch_for(entry)]
        model, plain = build(entry, False), build(entry, False)
        with compiled(entry, model, "never") as pipe:
            start = time.process_time()
            pipe.prepare(**batches[0])
            compile_s = time.process_time() - start
            worst = difference_on(pipe, model, plain, batches[0])
            first = Result.of(pipe, worst, compile_s)
            for batch in _taken(build(entry, False), batches[0]):
                model.zero_grad()
                plain.zero_grad()
                worst = max(worst, difference_on(pipe, model, plain, batch))
                batches.append(batch)
            return Shapes(len(batches), len(pipe.compilations), pipe.front_end, worst, first)


def _taken(model: nn.Module, inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Inputs of other sizes, on which the model has been seen to run."""
    taken: list[dict[str, Any]] = []
    for other in _others(inputs):
        try:
            with torch.no_grad():
                model(**next(micro_batches(other)))
        except Exception:
            continue  # the model does not take this size
        taken.append(other)
        if len(taken) == OTHERS:
            break
    return taken


def _others(inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The inputs in other sizes: all dimensions of one size, other than the batch's, become twice
    as large, half as large, or by one smaller; the dimensions of the largest size first."""
    sizes = {n for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor) for n in t.shape}
    for size in sorted(sizes - {1, BATCH}, reverse=True):
        for other in 2 * size, size // 2, size - 1:
            if other not in (1, BATCH):
                yield pytree.tree_map_only(
                    Tensor, lambda t, a=size, b=other: _resized(t, a, b), inputs
                )


def _resized(tensor: Tensor, size: int, other: int) -> Tensor:
    """The tensor with its beginning, or with more of its elements repeated, in each dimension of
    that size."""
    for dim, n in enumerate(tensor.shape):
        if n == size and not (dim == 0 and n == BATCH):
            tensor = torch.cat([tensor, tensor], dim).narrow(dim, 0, other)
    return tensor
