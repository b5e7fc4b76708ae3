"""Unshard: the pass gathers a stage's parameters, of which replicas have shards, once in a run.

::

    before     forward 0 ── ... ── last backward of stage 0 ── reduce ── ... ── optimize

    after      unshard ── unsharded ── forward 0 ── ... ── last backward of stage 0 ── reduce
                                   ── reduce_scatter ── reshard ── ... ── resharded ── optimize

Gathering begins ahead of everything else, so that it runs while the stages wait for their first
micro-batch. The shards get their gradients as soon as the stage's backwards are done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import DEVICE, MICROBATCH, STAGE, STREAM, add_input

SHARDS = "shards"  # the name of the input through which a graph is given the shards


@dataclass(frozen=True)
class Unshard:
    """Graph after pass "reduce" or "microbatch" → the same, in which parameters in shards are whole
    from the first forward of their stage until its last backward, or forward if there are none.

    The graph has one input more, behind the others: the shards of the rank, which know the replicas
    (:class:`fxpipe.runtime.ranks.shards.Shards`), or None where nothing is in shards.

    Args:
        stages: the stages with parameters in shards. If there are none, the graph stays as it is.
    """

    name: ClassVar[str] = "unshard"
    stages: frozenset[int]

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        if not self.stages:
            return gm
        graph = gm.graph
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            shards = add_input(graph, SHARDS, None)
        is_step = bool(graph.find_nodes(op="call_function", target=ops.average))
        steps = graph.find_nodes(op="call_function", target=ops.optimize)
        behind_all = steps[0] if steps else graph.output_node()
        front = shards
        for stage in sorted(self.stages):
            own = [node for node in graph.nodes if node.meta.get(STAGE) == stage]
            first, last = _uses(own)

            def call(function: Callable[..., Any], at: fx.Node, stage: int = stage) -> fx.Node:
                name = f"{function.__name__}_s{stage}"
                made = graph.create_node("call_function", function, (shards, stage), name=name)
                keys = STAGE, MICROBATCH, DEVICE, STREAM
                made.meta = {key: at.meta[key] for key in keys if key in at.meta}
                return made

            with graph.inserting_after(front):
                front = call(ops.unshard, first)
            with graph.inserting_before(first):
                call(ops.unsharded, first)
            if is_step:
                with graph.inserting_after(last):
                    last = call(ops.reduce_scatter, last)
            with graph.inserting_after(last):
                call(ops.reshard, last)
            with graph.inserting_before(behind_all):
                call(ops.resharded, last)
        gm.recompile()
        return gm


def _uses(nodes: list[fx.Node]) -> tuple[fx.Node, fx.Node]:
    """Of the nodes of a stage the first that needs its parameters, and the one behind which nothing
    needs them: the node that begins to sum its gradients, or its last forward."""
    forwards = [n for n in nodes if n.op == "call_module" or n.target is ops.forward]
    reduced = [node for node in nodes if node.target is ops.reduce]
    return forwards[0], (reduced or forwards)[-1]
