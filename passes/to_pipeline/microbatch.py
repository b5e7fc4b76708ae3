"""Microbatch: the pass unrolls the stage graph, which then calls every stage once for each
micro-batch.

::

    x ─ stage_0 ─ stage_1 ─ y            x ─ scatter ─┬─ stage_0 ─ stage_1 ─┬─ gather ─ y
                                                      └─ stage_0 ─ stage_1 ─┘

The cells (micro-batch i, stage j) come in the order of clock cycles, i + j = 0, 1, 2, ... Forwards
run in this order, and backwards in the reverse one.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx, nn

from fxpipe import ops
from fxpipe.ir._torch import OuterModule
from fxpipe.ir.graph import FIRST, MICROBATCH, ONCE, ORIGIN, SEED, STAGE, WRITTEN, attribute
from fxpipe.runtime.microbatch import ANY, LISTED, WEIGHTED, Dims, InDim

LOSS_WEIGHT = "loss_weight"  # the path of the module that gives the weights of losses


@dataclass(frozen=True)
class Microbatch:
    """Stage graph → pipeline graph of ``chunks`` micro-batches.

    Args:
        in_dims: the batch dimension of each input; None for one that all micro-batches share;
            "list" for one that comes from a list with an element for each row, and has been cut
            into parts already.
        out_dims: for each node that the stage graph returns, in order, the batch dimension of its
            tensors (see :func:`fxpipe.ops.gather`).
        loss_weight: a module that gives the weight of a micro-batch's loss from its parts of all
            inputs; None unless an output is "weighted".
        apart: the places, among the nodes that the stage graph returns, of states: tensors that
            stay apart, each micro-batch's on the device of its stage, for the next call.
    """

    name: ClassVar[str] = "microbatch"
    chunks: int
    in_dims: tuple[InDim, ...]
    out_dims: tuple[Dims, ...]
    loss_weight: nn.Module | None = None
    apart: frozenset[int] = frozenset()

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        graph = fx.Graph()
        cells: dict[int, list[fx.Node]] = {}
        for node in gm.graph.nodes:
            if STAGE in node.meta and not {ONCE, FIRST} & node.meta.keys():
                cells.setdefault(node.meta[STAGE], []).append(node)
        copies: list[dict[fx.Node, fx.Node]] = [{} for _ in range(self.chunks)]
        inputs = {node: graph.node_copy(node) for node in gm.graph.nodes if _is_given(node)}
        sizes, loss_weights = self._scatter(inputs, copies)
        self._draw_seeds(gm.graph, graph, copies)
        _share(gm.graph, graph, inputs, copies)
        for clock in range(self.chunks + len(cells) - 1):
            for stage, nodes in sorted(cells.items()):
                if 0 <= (i := clock - stage) < self.chunks:
                    for node in nodes:
                        copies[i][node] = _copied(graph, node, copies[i], i)
        for node in gm.graph.nodes:
            if ONCE in node.meta:
                _once(graph, node, copies, inputs)
        self._gather(gm.graph, graph, copies, sizes, loss_weights)
        if loss_weights is None:
            return OuterModule(gm, graph)
        named = {n.target for n in graph.nodes if n.op in ("call_module", "get_attr")}
        own = {path: attribute(gm, path) for path in named - {LOSS_WEIGHT}}
        return OuterModule({**own, LOSS_WEIGHT: self.loss_weight}, graph)

    def _scatter(
        self, inputs: dict[fx.Node, fx.Node], copies: list[dict[fx.Node, fx.Node]]
    ) -> tuple[tuple[Any, ...], fx.Node | None]:
        """Cut the inputs into parts. Returns the arguments of ``gather`` from which it knows the
        sizes of the micro-batches, and the node of the weights of their losses, if any."""
        sizes: tuple[Any, ...] = ()
        is_weighted = self._is_weighted
        every: list[fx.Node] = []
        placeholders = [node for node in inputs if node.op == "placeholder"]
        for node, dim in _with_dims(placeholders, self.in_dims, "in_dims"):
            if node.users or is_weighted:
                args: tuple[Any, ...] = (inputs[node], dim, self.chunks)
                if WRITTEN in node.meta:
                    args = (*args, True)
                graph, name = inputs[node].graph, f"{node}_parts"
                parts = graph.create_node("call_function", ops.scatter, args, name=name)
                every.append(parts)
                if node.users and dim not in (None, LISTED) and not sizes:
                    sizes = (parts, dim)
                if node.users:
                    self._parts(node, parts, copies)
        if not is_weighted:
            return sizes, None
        graph = every[-1].graph
        function = graph.create_node("get_attr", LOSS_WEIGHT)
        args = function, tuple(every)
        return sizes, graph.create_node("call_function", ops.loss_weights, args)

    @property
    def _is_weighted(self) -> bool:
        """Whether an output is put together by the weights of the micro-batches' losses."""
        return any(
            WEIGHTED in (dims if isinstance(dims, tuple) else (dims,)) for dims in self.out_dims
        )

    def _draw_seeds(
        self, old: fx.Graph, new: fx.Graph, copies: list[dict[fx.Node, fx.Node]]
    ) -> None:
        """Draw a seed for each micro-batch, in place of the stage graph's one input for a seed."""
        for node in old.find_nodes(op="placeholder"):
            if SEED in node.meta and node.users:
                seeds = new.create_node("call_function", ops.seeds, (self.chunks,), name="seeds")
                self._parts(node, seeds, copies)

    @staticmethod
    def _parts(node: fx.Node, parts: fx.Node, copies: list[dict[fx.Node, fx.Node]]) -> None:
        """Add a node for each micro-batch that takes its part of an input."""
        for i, copied in enumerate(copies):
            copied[node] = parts.graph.create_node(
                "call_function", operator.getitem, (parts, i), name=f"{node}_mb{i}"
            )
            copied[node].meta = _meta(node, i)

    def _gather(
        self,
        old: fx.Graph,
        new: fx.Graph,
        copies: list[dict[fx.Node, fx.Node]],
        sizes: tuple[Any, ...],
        loss_weights: fx.Node | None,
    ) -> None:
        output = old.output_node()
        gathered: dict[fx.Node, fx.Node] = {}
        returned = _with_dims(output.all_input_nodes, self.out_dims, "out_dims")
        for place, (node, dims) in enumerate(returned):
            if self.chunks == 1:
                dims = _without_means(dims)
            args = (tuple(copied[node] for copied in copies), dims, *sizes)
            name = f"{node.meta.get(ORIGIN, node.name)}_out"
            own = dims if isinstance(dims, tuple) else (dims,)
            named: dict[str, Any] = {"weights": loss_weights} if WEIGHTED in own else {}
            if place in self.apart:
                named["apart"] = True
            gathered[node] = new.create_node("call_function", ops.gather, args, named, name)
            # An output is gathered in the last stage that has the value. The caller uses an output
            # after all uses in the model, so in the backward the caller's gradient comes first.
            stages = [n.meta[STAGE] for n in (node, *node.users) if STAGE in n.meta]
            if stages:
                gathered[node].meta = {STAGE: max(stages)}
        new.node_copy(output, gathered.__getitem__)


def _without_means(dims: Dims) -> Dims:
    """The batch dimensions of an output, for a mini-batch that is a single micro-batch: an output
    without a known batch dimension is then returned as it is, and no mean is taken of it."""
    if isinstance(dims, tuple):
        return tuple(ANY if dim is None else dim for dim in dims)
    return ANY if dims is None else dims


def _is_given(node: fx.Node) -> bool:
    """Whether a node is a parameter, a buffer, or an input of the pipeline graph too (no seed)."""
    return node.op in ("placeholder", "get_attr") and SEED not in node.meta


def _share(
    old: fx.Graph,
    new: fx.Graph,
    inputs: dict[fx.Node, fx.Node],
    copies: list[dict[fx.Node, fx.Node]],
) -> None:
    """Let all micro-batches use the same node for a parameter, a buffer, or a brought parameter.

    A brought parameter is one that pass "tied" copies to another device, once for all of them.
    """
    shared = {node: own for node, own in inputs.items() if node.op == "get_attr"}
    for node in old.nodes:
        if FIRST in node.meta:
            shared[node] = new.node_copy(node, inputs.__getitem__)
    for copied in copies:
        copied.update(shared)


def _with_dims(nodes: Sequence[fx.Node], dims: Sequence[Dims], what: str) -> Any:
    if len(nodes) != len(dims):
        raise ValueError(
            f"{what} has {len(dims)} entries for {len(nodes)} values: give one for each"
        )
    return zip(nodes, dims, strict=True)


def _copied(
    graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node], microbatch: int
) -> fx.Node:
    args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
    copy = graph.create_node(node.op, node.target, args, kwargs, name=f"{node.name}_mb{microbatch}")
    copy.meta = _meta(node, microbatch)
    return copy


def _once(
    graph: fx.Graph,
    node: fx.Node,
    copies: list[dict[fx.Node, fx.Node]],
    inputs: dict[fx.Node, fx.Node],
) -> None:
    """Copy a node that runs once for all micro-batches.

    Its last argument, a tuple with the values of one micro-batch, becomes a tuple with the values
    of all micro-batches.
    """
    parts: Any
    *own, parts = node.args
    args = fx.map_arg(own, inputs.__getitem__)
    every = tuple(fx.map_arg(part, copied.__getitem__) for copied in copies for part in parts)
    made = graph.create_node("call_function", node.target, (*args, every), name=node.name)
    made.meta = dict(node.meta)


def _meta(node: fx.Node, microbatch: int) -> dict[str, Any]:
    return {ORIGIN: node.name, **node.meta, MICROBATCH: microbatch}
