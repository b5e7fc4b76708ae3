"""Rows: the pass finds which tensors are divided among the micro-batches, and which each
micro-batch has in full, so that costs count the latter once for each micro-batch.

::

    x (32, 8) ──────────┬─ linear (32, 4)         in one of 8 micro-batches x and linear are
    w (4, 8) ─ exp (4, 8) ─┘                      smaller: they are divided. exp is not: each of
                                                  the 8 computes and keeps an exp

What costs count is what a micro-batch does. With few rows that may be something else than with
many: a tensor of one row may be in order where several rows would have to be copied, so that its
memory is that of another tensor.

A tensor that is as large for one row as for many is there once for each micro-batch: a weight that
the forward computes, a mask or a table of positions without a batch dimension, a mean over the
batch. So is an input that all micro-batches share, where it has to be copied to a device. There is
one of each parameter and buffer, however many micro-batches there are: these are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxpipe.ir._torch import FakeTensorMode
from fxpipe.ir.errors import AnotherStrategy, OneSizeOnly, is_the_models
from fxpipe.ir.graph import COPIES, GROWS, MEMORIES, PART, VALUE, WRITES
from fxpipe.ir.tensors import memory_bytes, memory_of, new_memory, tensors_of
from fxpipe.runtime.microbatch import rows_of_each
from passes.common.fakes import FakeInterpreter, fake_mode
from passes.common.signature import signature


@dataclass(frozen=True)
class Rows:
    """Model graph with fake values (pass "alias") → the same, with metadata on its tensors.

    ``meta["copies"]`` says how many there are of each tensor in a mini-batch, ``meta["grows"]``
    which of its dimensions are larger for more rows, ``meta["part"]`` has the fake values of the
    first micro-batch, and ``meta["memories"]`` the memory of each tensor, with its bytes for a
    mini-batch.

    The pass runs the graph on fake tensors with the rows of the first micro-batch, which has the
    most, and sees which tensors are smaller. It writes nothing where the graph takes no other batch
    size, where the results do not grow, or where there is only one micro-batch: later passes then
    take every tensor to be divided.

    Args:
        inputs: example inputs of the model, one for each placeholder.
        in_dims: the batch dimension of each; None for one that all micro-batches share.
        chunks: how many micro-batches there will be.
    """

    name: ClassVar[str] = "rows"
    inputs: tuple[Any, ...]
    in_dims: tuple[int | None, ...]
    chunks: int

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        for node in gm.graph.nodes:
            for key in (COPIES, GROWS, PART, MEMORIES):
                node.meta.pop(key, None)
        if self.chunks == 1 or all(dim is None for dim in self.in_dims):
            return gm
        sizes = [
            v.shape[d] for v, d in zip(self.inputs, self.in_dims, strict=True) if d is not None
        ]
        if not all(sizes):
            return gm
        run = OneOfEach(gm, fake_mode(gm.graph))
        try:
            parts = _values(run, self.inputs, self.in_dims, partial(_of_first, chunks=self.chunks))
        except OneSizeOnly:
            return gm
        if _is_for_one_size(gm.graph, parts):
            return gm
        times = sizes[0] / _of_first(sizes[0], self.chunks)
        for node, value in parts.items():
            if node.op in ("get_attr", "output") or VALUE not in node.meta:
                continue
            node.meta[PART] = value
            tensors, others = tensors_of(node.meta[VALUE]), tensors_of(value)
            if len(tensors) == len(others):
                node.meta[GROWS] = tuple(map(_grown, tensors, others))
                node.meta[COPIES] = tuple(
                    self.chunks if one.shape == other.shape else 1
                    for one, other in zip(tensors, others, strict=True)
                )
                node.meta[MEMORIES] = tuple(
                    (number, round(memory_bytes(part) * (times if is_divided else self.chunks)))
                    for number, part, is_divided in zip(
                        run.memories[node], others, map(_is_divided, tensors, others), strict=True
                    )
                )
        return gm


def _of_first(rows: int, chunks: int) -> int:
    """How many of so many rows the first micro-batch has."""
    return rows_of_each(rows, chunks)[0]


def _is_divided(tensor: Tensor, part: Tensor) -> bool:
    """Whether the memory of a tensor is larger for more rows."""
    return memory_bytes(tensor) != memory_bytes(part)


def _grown(tensor: Tensor, part: Tensor) -> tuple[int, ...]:
    """The dimensions in which a tensor is larger for more rows than a part of it has."""
    sizes = zip(tensor.shape, part.shape, strict=False)
    return tuple(dim for dim, (one, other) in enumerate(sizes) if one != other)


def _is_for_one_size(graph: fx.Graph, parts: Mapping[fx.Node, Any]) -> bool:
    """Whether none of the graph's results grows with the batch.

    Then the graph holds for one batch size only: tracing has unrolled a loop over rows, say.
    """
    nodes = graph.output_node().all_input_nodes
    shapes, others = (
        [t.shape for t in tensors_of([values(node) for node in nodes]) if t.ndim]
        for values in (lambda node: node.meta.get(VALUE), parts.__getitem__)
    )
    return bool(shapes) and shapes == others


class OneOfEach(FakeInterpreter):
    """Runs a graph. Of several nodes that do the same, only one is run, and all get its value: a
    value of which the shape and the size of the memory are asked, but no more.

    Each node that writes, or whose memory is written to, is run by itself, since a write may change
    the shape.

    Attributes:
        memories: for each node a number for the memory of each tensor of its value, which is that
            of an input whose memory the tensor shares. So the numbers differ where values that have
            been taken from one node have memories of their own.
    """

    def __init__(self, gm: fx.GraphModule, mode: FakeTensorMode | None) -> None:
        super().__init__(gm, mode)
        self.gm = gm
        self.known: dict[Any, tuple[Any, list[_Place]]] = {}
        self.memories: dict[fx.Node, list[int]] = {}
        written = (name for node in gm.graph.nodes for name in node.meta.get(WRITES, ()))
        self.written = set(written)

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node: by a run of it, or of a node that does the same."""
        given, numbers = self._given(n)
        key = self._key(n, given)
        found = None if key is None else self.known.get(key)
        if found is None:
            value = super().run_node(n)
            found = value, _places(n, given, tensors_of(value))
            if key is not None:
                self.known[key] = found
        value, places = found
        self.memories[n] = self._numbered(n, places, numbers)
        return value

    def _given(self, n: fx.Node) -> tuple[list[Tensor], list[int]]:
        """The tensors that a node is given, and the numbers of their memories."""
        tensors: list[Tensor] = []
        numbers: list[int] = []

        def take(source: fx.Node) -> None:
            tensors.extend(tensors_of(self.env[source]))
            numbers.extend(self.memories[source])

        fx.map_arg((n.args, n.kwargs), take)
        return tensors, numbers

    def _key(self, n: fx.Node, given: list[Tensor]) -> Any:
        """What a node does; None if it has to run by itself."""
        is_alone = WRITES in n.meta or n.name in self.written
        if is_alone or not n.op.startswith("call_"):
            return None
        key = signature(self.gm, n, self.env.__getitem__)
        return None if key is None else (key, tuple(map(memory_bytes, given)))

    def _numbered(self, n: fx.Node, places: list[_Place], numbers: list[int]) -> list[int]:
        """The numbers of the memories of a node's value."""
        found: list[int] = []
        for i, place in enumerate(places):
            if place is None:
                found.append(memory_of(tensors_of(n.meta[VALUE])[i]))
            elif place >= 0:
                found.append(numbers[place])
            else:
                found.append(new_memory() if ~place == i else found[~place])
        return found


_Place = int | None
"""Whose memory a tensor of a node's value has: that of an input, by its place among these; that of
a tensor of the value itself, by the complement of its place there; or None, that of a parameter,
which is there in any run."""


def _places(node: fx.Node, given: list[Tensor], made: list[Tensor]) -> list[_Place]:
    """Whose memory each tensor has that a node has made of those that it was given."""
    known: dict[int, _Place] = {}
    for i, tensor in enumerate(given):
        known.setdefault(memory_of(tensor), i)
    for one, other in zip(tensors_of(node.meta.get(VALUE)), made, strict=False):
        if memory_of(one) == memory_of(other):
            known.setdefault(memory_of(one), None)
    return [known.setdefault(memory_of(tensor), ~i) for i, tensor in enumerate(made)]


def values_of(gm: fx.GraphModule, inputs: Sequence[Any]) -> dict[fx.Node, Any]:
    """The fake value of each node in a run with these inputs."""
    run = OneOfEach(gm, fake_mode(gm.graph))
    return _values(run, inputs, [None] * len(inputs), lambda rows: rows)


def _values(
    interpreter: FakeInterpreter,
    inputs: Sequence[Any],
    in_dims: Sequence[int | None],
    sized: Callable[[int], int],
) -> dict[fx.Node, Any]:
    """The fake value of each node in a run with another number of rows along each batch dimension:
    ``sized`` gives it.

    Raises ``OneSizeOnly`` if the graph does not take so many rows.
    """
    interpreter.garbage_collect_values = False
    fakes, is_as_given = [], True
    for value, dim in zip(inputs, in_dims, strict=True):
        if dim is not None:
            shape = list(value.shape)
            shape[dim] = sized(rows := shape[dim])
            is_as_given = is_as_given and shape[dim] == rows
            value = torch.empty(shape, dtype=value.dtype, device=value.device)
        fakes.append(interpreter.fake(value))
    try:
        with interpreter.mode, torch.no_grad():
            interpreter.run(*fakes)
    except Exception as error:
        if is_as_given or isinstance(error, AnotherStrategy) or not is_the_models(error):
            raise
        raise OneSizeOnly(
            f"the model takes no batch with other rows than the example: {error}; give in_dims, "
            "with the batch dimension of each input, if it has been taken for another"
        ) from error
    return interpreter.env
