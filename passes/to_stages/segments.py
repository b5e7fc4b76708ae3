"""Cuts a stage into segments, which the passes "checkpoint" and "step" checkpoint one by one.

::

    stage_1                   stage_1, in three segments
    ── a ─ b ─ c ─ d ──       ── segment_0 ── segment_1 ── segment_2 ──
                                  (a, b)         (c)          (d)

While one segment is run again, the others keep only their inputs: the memory for activations is
that of the largest segment (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from fxpipe import ops
from fxpipe.ir._torch import OuterModule
from fxpipe.ir.cost import Cost
from fxpipe.ir.graph import COST, HOME, STAGE, attribute, is_work
from passes.partition.automatic import Auto
from passes.partition.partition import Partition, PartitionError
from passes.to_stages.split import Split

EVEN = Auto(objective="activations", in_order=True)
"""How a stage is cut: its segments keep as much memory each. Other cuts than those in the program's
order would take several times as long to search for, and are not more even in practice."""


def segmented(stage: fx.GraphModule, count: int) -> fx.GraphModule:
    """The stage as a chain of at most ``count`` segments, which keep about as many bytes each.

    There are fewer segments where the stage has fewer places to cut. The stage itself stays as it
    is. Raises ValueError for a ``count`` below 1.
    """
    for parts in range(count, 0, -1):
        try:
            return Split(part="segment")(Partition(parts, EVEN)(_copied(stage)))
        except PartitionError:
            if parts == 1:
                raise
    raise ValueError(f"{count} segments asked for: give 1 or more")


def _copied(stage: fx.GraphModule) -> fx.GraphModule:
    """A copy of a stage without labels, for pass "partition".

    A node without a cost, which a pass has added to the model's, gets a cost of zero.
    """
    graph = fx.Graph()
    own: dict[fx.Node, Any] = {}
    for node in stage.graph.nodes:
        own[node] = graph.node_copy(node, own.__getitem__)
        if is_work(node):
            own[node].meta.setdefault(COST, Cost())
            own[node].meta.pop(STAGE, None)
    return fx.GraphModule(stage, graph)


def opened(gm: fx.GraphModule, counts: Sequence[int]) -> tuple[fx.GraphModule, list[int]]:
    """The stage graph with segments for stages, and for each segment the stage it is part of.
    ``counts`` has the number of segments of each stage, in the order of the stages."""
    calls = gm.graph.find_nodes(op="call_module")
    parts = {
        call: segmented(attribute(gm, str(call.target)), counts[call.meta[STAGE]]) for call in calls
    }
    stage_of: list[int] = []
    first: dict[int, int] = {}  # the first segment of each stage
    for call, inner in parts.items():
        first[call.meta[STAGE]] = len(stage_of)
        stage_of += [call.meta[STAGE]] * len(inner.graph.find_nodes(op="call_module"))
    attributes: dict[str, Any] = {}
    graph = fx.Graph()
    own: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node in parts:
            _open(graph, node, parts[node], first[node.meta[STAGE]], own, attributes)
        elif node not in own:
            own[node] = graph.node_copy(node, own.__getitem__)
            if node.op == "get_attr":
                attributes[str(node.target)] = attribute(gm, str(node.target))
            if STAGE in node.meta:
                own[node].meta[STAGE] = first[node.meta[STAGE]]
    result = OuterModule(attributes, graph)
    for node in graph.nodes:
        if HOME in node.meta:
            node.meta[HOME] = _home(result, node.all_input_nodes[0])
    return result, stage_of


def _home(gm: fx.GraphModule, parameter: fx.Node) -> int:
    """The number of the segment in which a parameter lives that other stages use, too: the one that
    gives its value away (pass "shared")."""
    tensor = attribute(gm, str(parameter.target))
    for call in gm.graph.find_nodes(op="call_module"):
        segment = attribute(gm, str(call.target))
        for share in segment.graph.find_nodes(op="call_function", target=ops.share):
            (source,) = share.args
            if source.op == "get_attr" and attribute(segment, str(source.target)) is tensor:
                number: int = call.meta[STAGE]
                return number
    raise AssertionError(f"{parameter.target} lives in no segment")


def _open(
    graph: fx.Graph,
    call: fx.Node,
    parts: fx.GraphModule,
    number: int,
    own: dict[fx.Node, fx.Node],
    attributes: dict[str, Any],
) -> None:
    """Write the segments of a stage, numbered from ``number`` on, in place of the stage's call."""
    taken = zip(parts.graph.find_nodes(op="placeholder"), call.args, strict=True)
    values: dict[fx.Node, Any] = {inner: own[arg] for inner, arg in taken}  # type: ignore[index]
    for node in parts.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        values[node] = graph.node_copy(node, values.__getitem__)
        if node.op == "call_module":
            path = f"{call.target}_{node.target}"
            attributes[path] = attribute(parts, str(node.target))
            values[node].target = path
            number += 1
        values[node].meta[STAGE] = number - 1
    results: Any = parts.graph.output_node().args[0]
    if isinstance(results, fx.Node):
        own[call] = values[results]
    else:
        own |= {item: values[results[item.args[1]]] for item in call.users}
