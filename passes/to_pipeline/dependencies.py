"""Dependencies: the pass adds edges to the autograd graph, so that every stage runs the backwards
of the micro-batches in reverse order, the last one first.

::

    cell (0, j)    ── stage ── fork ──
                                 └ ─ ─ phony ─ ─ ┐
    cell (1, j)                       ── wait ── join ── stage ──

A phony is a tensor without elements. It is forked off at the exit of one cell and joined in at the
entry of the next micro-batch's cell, so that autograd cannot run the backward of the first cell
before that of the second. Where no value that enters a cell has a gradient (in a first stage, or in
one that gets integers only), the entry has no backward: the phony is joined in at the exit.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, fx

from fxpipe import ops
from fxpipe.ir.graph import VALUE
from fxpipe.runtime.streams import COMPUTE
from passes.to_pipeline.cells import Cell, Writer, cell_of, cells, is_gated, items, outgoing, sweep


@dataclass(frozen=True)
class Dependencies:
    """Pipeline graph with waits → the same, with a fork and a join between adjacent micro-batches
    at each stage."""

    name: ClassVar[str] = "dependencies"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        found = cells(gm.graph)
        phonies: dict[Cell, fx.Node] = {}
        for cell in sorted(found):
            microbatch, stage = cell
            nodes = found[cell]
            if cell in phonies:
                _join(cell, nodes, phonies[cell])
            if (following := (microbatch + 1, stage)) in found:
                phonies[following] = _fork(cell, nodes)
            elif len(leaving := outgoing(nodes)) > 1 and not is_gated(leaving):
                # No phony is needed behind the last micro-batch, but a gate is: the gradients of
                # several outputs have to enter the stage together.
                _fork(cell, nodes)
        return sweep(gm)


def _fork(cell: Cell, nodes: list[fx.Node]) -> fx.Node:
    """Add a fork at the exit of a cell. Returns the node of its phony."""
    writer = Writer(cell, after=nodes[-1])
    phony = nodes[-1]

    def call(together: Any) -> fx.Node:
        nonlocal phony
        fork = writer.call(ops.fork, (together,), "fork")
        phony = writer.call(operator.getitem, (fork, 1), "phony")
        return writer.call(operator.getitem, (fork, 0), "values")

    writer.through(call, outgoing(nodes), lambda user: cell_of(user) != cell)
    return phony


def _join(cell: Cell, nodes: list[fx.Node], phony: fx.Node) -> None:
    """Add a join at the entry of a cell, or at its exit if no value that enters has a gradient."""
    arrived = _entry(nodes)
    if any(may_have_gradient(value) for value in arrived):
        writer = Writer(cell, after=max(arrived))
        writer.gate(ops.join, arrived, phony, uses=lambda user: True)
        nodes[:0] = writer.added
        return
    writer = Writer(cell, after=nodes[-1])
    writer.gate(ops.join, outgoing(nodes), phony, uses=lambda user: cell_of(user) != cell)
    nodes += writer.added


def _entry(nodes: list[fx.Node]) -> list[fx.Node]:
    """The values that enter a cell: those for which its compute stream waits."""
    waits = (n for n in nodes if n.target is ops.wait and str(n.args[2]).endswith(COMPUTE))
    return [item for wait in waits for item in items(wait)]


def may_have_gradient(node: fx.Node) -> bool:
    """Whether a value may carry a gradient, as far as the example tells."""
    value = node.meta.get(VALUE)
    return value.requires_grad if isinstance(value, Tensor) else False
