"""Relay: the pass lets values go from stage to stage, where they skipped stages.

::

    before     stage 0 ──a──> stage 1 ──b──> stage 2
                  └──────────────a──────────────┘

    after      stage 0 ──a──> stage 1 ──b, a──> stage 2

A pipeline of fxpipe sends a value straight to the stage that uses it, which is one transfer for
each. ``torch.distributed.pipelining`` knows transfers between neighbours only, in both directions:
a stage between takes the value, and returns it unchanged.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, fx, nn

from fxpipe.ir._torch import OuterModule
from fxpipe.ir.graph import STAGE, attribute


@dataclass(frozen=True)
class Relay:
    """Stage graph → the same, whose stages take what the one before returns, and nothing else.

    The first stage takes all inputs of the model. Every other stage takes a tensor, or several, and
    returns a tensor or a tuple of them.

    With the schedule as a file (:meth:`fxpipe.schedule.Schedule.to_csv`), its stages are what
    ``torch.distributed.pipelining`` needs to run the pipeline.

    Raises NotImplementedError for values between stages that are no tensors, and for a parameter
    that several stages have.
    """

    name: ClassVar[str] = "relay"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        calls = gm.graph.find_nodes(op="call_module")
        made = {node: self._made(node) for node in gm.graph.nodes}
        _refuse_shared(gm, calls)
        graph, output = fx.Graph(), gm.graph.output_node()
        inputs = gm.graph.find_nodes(op="placeholder")
        values = {node: graph.node_copy(node) for node in inputs}
        modules: dict[str, nn.Module] = {}
        arriving = inputs
        for number, call in enumerate(calls):
            is_last = call is calls[-1]
            leaving = [] if is_last else self._crossing(gm, made, number)
            given = output.args[0] if is_last else tuple(leaving)
            if len(leaving) == 1:
                (given,) = leaving
            modules[call.name] = self._stage(gm, arriving, number, made, given)
            result = graph.call_module(call.name, tuple(values[node] for node in arriving))
            result.meta = dict(call.meta)
            if len(leaving) == 1:
                values[leaving[0]] = result
            elif not is_last:
                for place, node in enumerate(leaving):
                    values[node] = graph.call_function(operator.getitem, (result, place))
                    values[node].meta = {**node.meta, STAGE: number}
            arriving = leaving
        graph.output(result).meta = dict(output.meta)
        return OuterModule(modules, graph)

    def _made(self, node: fx.Node) -> int:
        """The number of the stage that makes a value; -1 for inputs and the model's tensors."""
        if STAGE in node.meta and node.op == "call_module":
            return int(node.meta[STAGE])
        return max((self._made(each) for each in node.all_input_nodes), default=-1)

    def _crossing(self, gm: fx.GraphModule, made: dict[fx.Node, int], stage: int) -> list[fx.Node]:
        """The values that are there after a stage, and used by a later one or returned."""
        found = []
        for node in gm.graph.nodes:
            if node.op in ("get_attr", "output") or made[node] > stage:
                continue
            users = (user for user in node.users if user.target is not operator.getitem)
            if any(user.op == "output" or made[user] > stage for user in users):
                found.append(_tensor(node))
        return found

    def _stage(
        self,
        gm: fx.GraphModule,
        arriving: list[fx.Node],
        stage: int,
        made: dict[fx.Node, int],
        given: Any,
    ) -> fx.GraphModule:
        """The module of a stage, which takes the arriving values and returns the given ones."""
        graph = fx.Graph()
        own = {node: graph.placeholder(node.name) for node in arriving}
        targets = set()
        for node in gm.graph.nodes:
            if (node.op != "output" and made[node] == stage) or node.op == "get_attr":
                own[node] = graph.node_copy(node, own.__getitem__)
        graph.output(fx.map_arg(given, own.__getitem__))
        for node in reversed(graph.find_nodes(op="get_attr")):
            if not node.users:
                graph.erase_node(node)
        targets = {str(n.target) for n in graph.nodes if n.op in ("get_attr", "call_module")}
        return OuterModule({target: attribute(gm, target) for target in targets}, graph)


def _tensor(node: fx.Node) -> fx.Node:
    value = node.meta.get("val")
    if value is not None and not isinstance(value, Tensor):
        raise NotImplementedError(
            f"{node.name} goes from stage to stage and is a {type(value).__name__}: "
            "torch.distributed.pipelining sends tensors only, so cut elsewhere, with partition="
        )
    return node


def _refuse_shared(gm: fx.GraphModule, calls: list[fx.Node]) -> None:
    """Raise NotImplementedError if several stages have one parameter."""
    homes: dict[int, str] = {}
    for call in calls:
        for name, parameter in attribute(gm, str(call.target)).named_parameters():
            home = homes.setdefault(id(parameter), call.name)
            if home != call.name:
                raise NotImplementedError(
                    f"{name} is a parameter of {home} and of {call.name}: "
                    "torch.distributed.pipelining has no tied weights, so give a partition= that "
                    "keeps its users in one stage"
                )
