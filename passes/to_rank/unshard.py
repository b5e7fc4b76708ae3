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
from fxpipe.ir.graph import MICROBATCH, STAGE, add_input, where

SHARDS = "shards"  # the name of the input through which a graph is given the shards


@dataclass(frozen=True)
class Unshard:
    """Graph after pass "reduce" or "microbatch" → the same, in which parameters in shards are whole
    from the first forward of their stage until its last backward, or forward if there are none.

    The graph has one input more, behind the others: the shards of the rank, which know the replicas
    (:class:`fxpipe.runtime.ranks.shards.Shards`), or None where nothing is in shards.

    Args:
        stages: the stages with parameters in shards. If there are none, the graph stays as it is.
        briefly: those of them whose parameters are gathered anew for each action, and are let go
            behind it, which takes less memory and more time.
    """

    name: ClassVar[str] = "unshard"
    stages: frozenset[int]
    briefly: frozenset[int] = frozenset()

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        if not self.stages:
            return gm
        graph = gm.graph
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            shards = add_input(graph, SHARDS, None)
        steps = graph.find_nodes(op="call_function", target=ops.optimize)
        front, behind_all = shards, steps[0] if steps else graph.output_node()
        for stage in sorted(self.stages):
            own = [node for node in graph.nodes if node.meta.get(STAGE) == stage]
            runs = _runs(own, stage in self.briefly)
            reduced = [node for node in own if node.target is ops.reduce]
            for first, last in runs:
                is_last = last is runs[-1][1]
                before = front if stage not in self.briefly else first.prev
                begun = _call(ops.unshard, shards, stage, behind=before, like=first)
                front = begun if stage not in self.briefly else front
                _call(ops.unsharded, shards, stage, behind=first.prev, like=first)
                if is_last and reduced:
                    last = _call(ops.reduce_scatter, shards, stage, behind=reduced[-1], like=last)
                last = _call(ops.reshard, shards, stage, behind=last, like=last)
                if is_last:
                    _call(ops.resharded, shards, stage, behind=behind_all.prev, like=last)
        gm.recompile()
        return gm


_USES = ops.forward, ops.replay, ops.backward, ops.backward_input, ops.weight_grad


def _runs(nodes: list[fx.Node], briefly: bool) -> list[tuple[fx.Node, fx.Node]]:
    """The first and the last node of each run of a stage's nodes through which its parameters stay
    whole: one run, or ``briefly`` one for each action."""
    uses = [node for node in nodes if node.op == "call_module" or node.target in _USES]
    if not briefly:
        return [(uses[0], uses[-1])]
    runs: list[list[fx.Node]] = []
    for node in uses:
        before = runs[-1][-1] if runs else None
        is_replayed = before is not None and before.target is ops.replay
        if is_replayed and before.meta[MICROBATCH] == node.meta[MICROBATCH]:  # type: ignore[union-attr]
            runs[-1].append(node)
        else:
            runs.append([node])
    return [(run[0], run[-1]) for run in runs]


def _call(
    function: Callable[..., Any], shards: fx.Node, stage: int, behind: fx.Node, like: fx.Node
) -> fx.Node:
    """Add a call behind a node, with the stage, micro-batch, device and stream of another one."""
    graph = shards.graph
    with graph.inserting_after(behind):
        name = f"{function.__name__}_s{stage}"
        made = graph.create_node("call_function", function, (shards, stage), name=name)
    made.meta = where(like)
    return made
