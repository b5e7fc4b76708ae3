"""Lend: the pass lets the gradients of a parameter that stages on several devices use meet in one
place, where they are added up in a fixed order.

::

    before     weight ─────────────────────────── stage_0        (the parameter lives there)
               weight ─ bring ─────────────────── stage_3

    after      weight ─ lend ─┬─ [0] ─ bring ──── stage_0
                              └─ [1] ─ bring ──── stage_3

    backward   weight ◁─ (first + second) ◁─┬──── stage_0, the sum of its micro-batches
                                            └──── stage_3

Autograd has a thread for each device, and adds gradients to a parameter's as they come. What stage
0 computes would be mixed with what stage 3 has brought, in an order that depends on which of them
is faster, and the last bits of the sum with it. Here each stage sums the gradients of its own
micro-batches, whose order is fixed, and "lend" adds up these sums when all of them are there.

On one device nothing is brought, and nothing lent. In a training step the gradient that comes back
is added by a node of the step graph (see :mod:`passes.to_step.replicas`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import BROUGHT, HOME, STAGE, VALUE, attribute
from fxpipe.runtime.streams import COMPUTE, COPY, stream_name


@dataclass(frozen=True)
class Lend:
    """Pipeline graph → the same, in which the stage where a parameter lives that other devices use
    is given it, too. ``devices``: one for each stage."""

    name: ClassVar[str] = "lend"
    devices: tuple[str, ...]

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        borrowed: dict[fx.Node, list[fx.Node]] = {}
        for brought in gm.graph.find_nodes(op="call_function", target=ops.bring):
            borrowed.setdefault(brought.all_input_nodes[0], []).append(brought)
        given: dict[int, dict[str, fx.Node]] = {}  # by stages and paths: what gives a parameter
        for parameter, brought in borrowed.items():
            home: int = brought[0].meta[HOME]  # the first of the stages that use it
            given.setdefault(home, {})[str(parameter.target)] = self._lend(parameter, brought)
        for home, parameters in given.items():
            _give(gm, home, parameters)
        gm.recompile()
        return gm

    def _lend(self, parameter: fx.Node, brought: Sequence[fx.Node]) -> fx.Node:
        """Add the node that lends a parameter, with views in the order of the stages. Returns the
        node that gives the first of them to the parameter's own stage."""
        graph, home = parameter.graph, brought[0].meta[HOME]
        streams = (stream_name(self.devices[home], each) for each in (COPY, COMPUTE))
        with graph.inserting_before(brought[0]):
            args = parameter, len(brought) + 1
            lent = graph.create_node("call_function", ops.lend, args, name=f"{parameter}_lent")
            own, *others = (
                graph.create_node("call_function", operator.getitem, (lent, i), name=f"{lent}_{i}")
                for i in range(len(brought) + 1)
            )
            made = graph.create_node(
                "call_function", ops.bring, (own, *streams), name=f"{parameter}_s{home}"
            )
        made.meta = {**brought[0].meta, STAGE: home}
        # The caller lends it, ahead of all stages, so that these nodes belong to none.
        if VALUE in parameter.meta:
            for view in (own, *others):
                view.meta[VALUE] = parameter.meta[VALUE]
        in_order = sorted(brought, key=lambda node: node.meta[STAGE])
        for borrower, value in zip(in_order, others, strict=True):
            borrower.replace_input_with(parameter, value)
        return made


def _give(gm: fx.GraphModule, home: int, parameters: Mapping[str, fx.Node]) -> None:
    """Let the calls of a stage take these parameters as arguments."""
    calls = [n for n in gm.graph.find_nodes(op="call_module") if n.meta.get(STAGE) == home]
    path = f"{calls[0].target}_given"
    gm.add_submodule(path, taking(attribute(gm, str(calls[0].target)), list(parameters)))
    for call in calls:
        call.target = path
        call.args = (*call.args, *parameters.values())


def taking(stage: fx.GraphModule, paths: Sequence[str]) -> fx.GraphModule:
    """A copy of a stage that takes shared parameters as arguments, behind its own ones."""
    graph = fx.Graph()
    sources = {
        str(node.target): node
        for node in stage.graph.find_nodes(op="get_attr")
        if all(user.target is ops.share for user in node.users)
    }
    own = {node: graph.node_copy(node) for node in stage.graph.find_nodes(op="placeholder")}
    for path in paths:
        node = sources[path]
        own[node] = graph.placeholder(node.name)
        own[node].meta = {**node.meta, BROUGHT: path}
    for node in stage.graph.nodes:
        if node not in own:
            own[node] = graph.node_copy(node, own.__getitem__)
    return fx.GraphModule(stage, graph, class_name=type(stage).__name__)
