"""Rows: the pass finds which tensors are divided among the micro-batches, and which each
micro-batch has in full, so that costs count the latter once for each micro-batch.

::

    x (32, 8) ──────────┬─ linear (32, 4)         with one row more, x and linear are larger: a
    w (4, 8) ─ exp (4, 8) ─┘                      micro-batch has a part of them. exp is not: each
                                                  of 8 micro-batches computes and keeps an exp

A tensor that is as large for one row as for many is there once for each micro-batch: a weight that
the forward computes, a mask or a table of positions without a batch dimension, a mean over the
batch. So is an input that all micro-batches share, where it has to be copied to a device. There is
one of each parameter and buffer, however many micro-batches there are: these are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxpipe.ir._torch import FakeTensorMode
from fxpipe.ir.errors import AnotherStrategy, OneSizeOnly, is_the_models
from fxpipe.ir.graph import COPIES, GROWS, LARGER, VALUE, WRITES
from fxpipe.ir.tensors import memory_bytes, tensors_of
from passes.common.fakes import FakeInterpreter, fake_mode
from passes.common.signature import signature


@dataclass(frozen=True)
class Rows:
    """Model graph with fake values (pass "alias") → the same, with metadata on its tensors.

    ``meta["copies"]`` says how many there are of each tensor in a mini-batch, ``meta["grows"]``
    which of its dimensions are larger for more rows, and ``meta["larger"]`` has the fake values of
    a run with more rows.

    The pass runs the graph on fake tensors with a larger batch, and sees which tensors grow. It
    writes nothing where the graph takes no other batch size, where the results do not grow, or
    where there is only one micro-batch: later passes then take every tensor to be divided.

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
            for key in (COPIES, GROWS, LARGER):
                node.meta.pop(key, None)
        if self.chunks == 1 or all(dim is None for dim in self.in_dims):
            return gm
        try:
            larger = larger_values(gm, self.inputs, self.in_dims)
        except OneSizeOnly:
            return gm
        if _is_for_one_size(gm.graph, larger):
            return gm
        for node, value in larger.items():
            if node.op in ("get_attr", "output") or VALUE not in node.meta:
                continue
            node.meta[LARGER] = value
            tensors, others = tensors_of(node.meta[VALUE]), tensors_of(value)
            if len(tensors) == len(others):
                node.meta[GROWS] = tuple(map(_grown, tensors, others))
                node.meta[COPIES] = tuple(
                    self.chunks if one.shape == other.shape else 1
                    for one, other in zip(tensors, others, strict=True)
                )
        return gm


def _grown(tensor: Tensor, larger: Tensor) -> tuple[int, ...]:
    """The dimensions in which a tensor is larger for more rows."""
    sizes = zip(tensor.shape, larger.shape, strict=False)
    return tuple(dim for dim, (one, other) in enumerate(sizes) if one != other)


def _is_for_one_size(graph: fx.Graph, larger: Mapping[fx.Node, Any]) -> bool:
    """Whether none of the graph's results grows with the batch.

    Then the graph holds for one batch size only: tracing has unrolled a loop over rows, say.
    """
    nodes = graph.output_node().all_input_nodes
    shapes, others = (
        [t.shape for t in tensors_of([values(node) for node in nodes]) if t.ndim]
        for values in (lambda node: node.meta.get(VALUE), larger.__getitem__)
    )
    return bool(shapes) and shapes == others


class _OneOfEach(FakeInterpreter):
    """Runs a graph. Of several nodes that do the same, only one is run, and all get its value: a
    value of which the shape and the size of the memory are asked, but no more.

    Each node that writes, or whose memory is written to, is run by itself, since a write may change
    the shape.
    """

    def __init__(self, gm: fx.GraphModule, mode: FakeTensorMode | None) -> None:
        super().__init__(gm, mode)
        self.gm = gm
        self.known: dict[Any, Any] = {}
        written = (name for node in gm.graph.nodes for name in node.meta.get(WRITES, ()))
        self.written = set(written)

    def run_node(self, n: fx.Node) -> Any:
        is_alone = WRITES in n.meta or n.name in self.written
        if is_alone or not n.op.startswith("call_"):
            return super().run_node(n)
        key = signature(self.gm, n, self.env.__getitem__)
        if key is None:
            return super().run_node(n)
        used = [t for node in n.all_input_nodes for t in tensors_of(self.env[node])]
        key = key, tuple(map(memory_bytes, used))
        if key not in self.known:
            self.known[key] = super().run_node(n)
        return self.known[key]


def larger_values(
    gm: fx.GraphModule, inputs: Sequence[Any], in_dims: Sequence[int | None]
) -> dict[fx.Node, Any]:
    """The fake value of each node in a run with one row more than the inputs have.

    If the graph refuses that, as one that takes rows in pairs does, the run has twice as many rows.
    Raises ``OneSizeOnly`` if it refuses both.
    """
    try:
        return values_with(gm, inputs, in_dims, 1)
    except OneSizeOnly:
        sizes = [v.shape[dim] for v, dim in zip(inputs, in_dims, strict=True) if dim is not None]
        return values_with(gm, inputs, in_dims, max(sizes, default=0))


def values_with(
    gm: fx.GraphModule, inputs: Sequence[Any], in_dims: Sequence[int | None], more: int
) -> dict[fx.Node, Any]:
    """The fake value of each node in a run with ``more`` further rows along each batch dimension.

    Raises ``OneSizeOnly`` if the graph does not take so many rows.
    """
    interpreter = _OneOfEach(gm, fake_mode(gm.graph))
    interpreter.garbage_collect_values = False
    fakes = []
    for value, dim in zip(inputs, in_dims, strict=True):
        if dim is not None:
            shape = list(value.shape)
            shape[dim] += more
            value = torch.empty(shape, dtype=value.dtype, device=value.device)
        fakes.append(interpreter.fake(value))
    try:
        with interpreter.mode, torch.no_grad():
            interpreter.run(*fakes)
    except Exception as error:
        if not more or isinstance(error, AnotherStrategy) or not is_the_models(error):
            raise
        raise OneSizeOnly(
            f"the model takes no batch with {more} rows more than the example: {error}; give "
            "in_dims, with the batch dimension of each input, if it has been taken for another"
        ) from error
    return interpreter.env
