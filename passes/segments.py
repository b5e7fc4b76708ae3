"""Not a pass: a stage cut in segments, each to be checkpointed on its own.

::

    stage_1                   stage_1, in three segments
    ── a ─ b ─ c ─ d ──       ── segment_0 ── segment_1 ── segment_2 ──
                                  (a, b)         (c)          (d)

While one segment is run again, the others keep nothing but what they have received: the memory for
activations is that of the largest segment (Chen et al., "Training Deep Nets with Sublinear Memory
Cost", 2016).
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from fxpipe import ops
from fxpipe.graph import COST, STAGE, Cost, is_work
from passes.partition import Auto, Partition, PartitionError
from passes.split import Split

EVEN = Auto(objective="activations")


def segmented(stage: fx.GraphModule, count: int) -> fx.GraphModule:
    """The stage as a chain of at most ``count`` segments, which keep about as many bytes each.

    Fewer where it has no more places to cut. The stage itself stays as it is.
    """
    for parts in range(count, 0, -1):
        try:
            return Split(part="segment")(Partition(parts, EVEN)(_copied(stage)))
        except PartitionError:
            if parts == 1:
                raise
    raise ValueError(f"{count} segments asked for: give 1 or more")


def _copied(stage: fx.GraphModule) -> fx.GraphModule:
    """A copy to be labelled; what the stage has added to the model's nodes costs nothing."""
    graph = fx.Graph()
    own: dict[fx.Node, Any] = {}
    for node in stage.graph.nodes:
        own[node] = graph.node_copy(node, own.__getitem__)
        if is_work(node):
            own[node].meta.setdefault(COST, Cost())
            own[node].meta.pop(STAGE, None)
    return fx.GraphModule(stage, graph)


def checkpointed_by_segments(stage: fx.GraphModule, count: int) -> fx.GraphModule:
    """The stage, which checkpoints its segments itself: for a step, where it runs as one."""
    parts = segmented(stage, count)
    graph = fx.Graph()
    own: dict[fx.Node, Any] = {}
    for node in parts.graph.nodes:
        if node.op != "call_module":
            own[node] = graph.node_copy(node, own.__getitem__)
            continue
        module = graph.create_node("get_attr", str(node.target))
        args = fx.map_arg(node.args, own.__getitem__)
        pair = graph.create_node("call_function", ops.checkpoint, (module, *args))
        own[node] = graph.create_node("call_function", operator.getitem, (pair, 0), name=node.name)
    return fx.GraphModule(parts, graph)
