"""Random: nodes that draw random numbers are given a seed, so that the numbers do not depend on
which stage runs first, and are the same when a checkpointed stage is recomputed.

::

    before     x ─ dropout ─ linear ─ dropout_1

    after      seed ───┬──────────────────┐
                   x ─ dropout ─ linear ─ dropout_1

The seed is an input of the graph (None: use the global generator). Pass "microbatch" draws one for
every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from fxpipe.ir.graph import ON_THE_HOST, RANDOM, SEED, VALUE, add_input, stage_nodes
from fxpipe.runtime.random import Method, Seeded


@dataclass(frozen=True)
class Random:
    """Model graph with ``meta["random"]`` (pass "alias") → the same with an input ``seed``, if any
    node needs it."""

    name: ClassVar[str] = "random"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        drawing = [node for node in stage_nodes(gm.graph) if node.meta.get(RANDOM)]
        if not drawing:
            return gm
        placeholders = gm.graph.find_nodes(op="placeholder")
        with gm.graph.inserting_after(placeholders[-1] if placeholders else None):
            seed = add_input(gm.graph, "seed", None)
        seed.meta = {SEED: True, VALUE: 0}
        for index, node in enumerate(drawing):
            target = f"{node.name}_seeded"
            gm.add_submodule(
                target, Seeded(_function(gm, node), index, node.meta.get(ON_THE_HOST, False))
            )
            # It keeps its name, by which users and saved profiles know it.
            node.op, node.target, node.args = "call_module", target, (seed, *node.args)
        gm.recompile()
        return gm


def _function(gm: fx.GraphModule, node: fx.Node) -> Callable[..., Any]:
    if node.op == "call_module":
        return gm.get_submodule(str(node.target))
    if node.op == "call_method":
        return Method(str(node.target))
    assert callable(node.target)
    return node.target
