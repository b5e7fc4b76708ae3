"""Checkpoint: checkpointed stages keep no activations, and are run again just ahead of their
backward.

::

    before     ── stage ── wait ── copy

    after      ── checkpoint ── wait ── recompute ── copy
                       `..... handle ......'

In the backward ``recompute`` comes before ``wait``: the stage runs again while the gradient is
still being copied. A stage in segments is a chain of checkpoints. Only its last segment, whose
backward comes first, is run again ahead of time::

    ── checkpoint ── checkpoint ── wait ── recompute ── copy
                          `..... handle ......'

Of a stage of mode "always 1/2" the first half of the segments are checkpoints, and the others are
called as they are, so that their activations are kept.

A stage whose activations wait in the host's memory is not run again; what it has saved begins to
come back at the place of ``recompute``. The last micro-batch stays, as its backward comes first::

    ── offloaded ── wait ── recompute ── copy
           `..... handle ......'

A stage that keeps the results of its products is run again with these: ``selective`` stands in the
place of ``checkpoint``.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import DEVICE, attribute
from fxpipe.runtime.streams import COMPUTE, stream_name
from passes.common.modes import (
    SELECTIVE,
    Modes,
    is_checkpointed,
    modes_of,
    moved,
    of_segment,
    of_stages,
)
from passes.common.segments import Segments, counts, segments_of
from passes.to_pipeline.cells import Cell, Writer, cell_of, cells, items, outgoing, sweep
from passes.to_stages.segments import segmented


@dataclass(frozen=True)
class Checkpoint:
    """Pipeline graph → the same, in which cells are checkpointed.

    Args:
        mode: which cells are checkpointed: none ("never"), all ("always"), or all but those of the
            last micro-batch, whose backward follows its forward at once ("except_last"). "offload":
            all but these have their activations on the host, or a part of them ("offload 1/2").
            "selective": all, with the results of their products. Or one of these for each stage.
        segments: the number of segments that a checkpointed stage is cut into, each checkpointed by
            itself; or the number of each stage.

    Raises ValueError for another mode, for modes or numbers of another number of stages, or for
    several segments with the mode "never".
    """

    name: ClassVar[str] = "checkpoint"
    mode: Modes = "never"
    segments: Segments = 1

    def __post_init__(self) -> None:
        modes_of(self.mode)
        segments_of(self.segments, self.mode)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        found = cells(gm.graph)
        chunks = 1 + max((microbatch for microbatch, _ in found), default=0)
        stages = 1 + max((stage for _, stage in found), default=0)
        modes, segments = of_stages(self.mode, stages), counts(self.segments, self.mode, stages)
        for cell, nodes in found.items():
            mode = modes[cell[1]]
            is_offloaded = moved(mode) > 0 and cell[0] < chunks - 1
            if is_offloaded or is_checkpointed(mode, cell[0], chunks):
                self._checkpoint(gm, cell, nodes, segments[cell[1]], mode)
        return sweep(gm)

    def _checkpoint(
        self,
        gm: fx.GraphModule,
        cell: Cell,
        nodes: list[fx.Node],
        segments: int,
        mode: str,
    ) -> None:
        (call,) = (node for node in nodes if node.op == "call_module")
        writer = Writer(cell, after=call)
        if segments == 1:
            path = str(call.target)
            if moved(mode):
                output, handle = _offload(writer, path, moved(mode), call.args, like=call)
            else:
                output, handle = _run(writer, path, call.args, call, mode)
            call.replace_all_uses_with(output)
            gone = [call]
        else:
            results = items(call)
            handle = _run_segments(writer, gm, call, segments, mode)
            gone = [*results, call]
        nodes = sorted(node for node in (*writer.added, *nodes) if node not in gone)
        for node in gone:
            gm.graph.erase_node(node)
        writer = Writer(cell, after=nodes[-1])
        leaving = outgoing(nodes)
        writer.gate(ops.recompute, leaving, handle, uses=lambda user: cell_of(user) != cell)


def _run(
    writer: Writer, target: str, args: tuple[Any, ...], like: fx.Node, mode: str
) -> tuple[fx.Node, fx.Node]:
    """Add a checkpointed call of the module at the path ``target``.

    Returns the node of its output, and that of the handle by which the call is run again.
    """
    run = ops.selective if mode == SELECTIVE else ops.checkpoint
    pair = writer.call(run, (writer.attribute(target), *args), run.__name__)
    output = writer.item(pair, 0, like=like)
    return output, writer.call(operator.getitem, (pair, 1), "handle")


def _offload(
    writer: Writer, target: str, share: float, args: tuple[Any, ...], like: fx.Node
) -> tuple[fx.Node, fx.Node]:
    """Add a call of the module at the path ``target``, of whose activations a share moves to the
    host.

    Returns the node of its output, and that of the handle by which they come back.
    """
    stream = stream_name(like.meta[DEVICE], COMPUTE)
    given = writer.attribute(target), stream, share, *args
    pair = writer.call(ops.offloaded, given, "offloaded")
    output = writer.item(pair, 0, like=like)
    return output, writer.call(operator.getitem, (pair, 1), "handle")


def _run_segments(
    writer: Writer, gm: fx.GraphModule, call: fx.Node, count: int, mode: str
) -> fx.Node:
    """Add checkpointed calls of a stage's segments, whose results take the place of the stage's.

    Returns the handle of the last segment that is checkpointed.
    """
    path = f"{call.target}_segments"
    if not hasattr(gm, path):
        gm.add_submodule(path, segmented(attribute(gm, str(call.target)), count))
    graph = attribute(gm, path).graph
    values = dict(zip(graph.find_nodes(op="placeholder"), call.args, strict=True))
    calls = graph.find_nodes(op="call_module")
    kept = {c for i, c in enumerate(calls) if of_segment(mode, i, len(calls)) == "never"}
    handle = call
    for node in graph.nodes:
        if node.op == "call_module":
            own, args = f"{path}.{node.target}", fx.map_arg(node.args, values.__getitem__)
            if node in kept:
                values[node] = writer.module(own, args, like=node)
            else:
                values[node], handle = _run(writer, own, args, node, mode)
        elif node.op == "call_function":  # takes one of a segment's results
            values[node] = writer.item(values[node.args[0]], node.args[1], like=node)
    results = graph.output_node().args[0]
    if isinstance(results, fx.Node):
        call.replace_all_uses_with(values[results])
    else:
        for item in items(call):
            item.replace_all_uses_with(values[results[item.args[1]]])
    return handle
