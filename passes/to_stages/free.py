"""Free: values that cost nothing to compute, such as positions and sizes, are computed again in
each stage that uses them, and are not sent there.

::

    before     stage 0                          stage 1
               n = x.size(1)
               p = arange(n) ────────────────── embed(p)

    after      n = x.size(1) ────────────────── p_s1 = arange(n)
                                                embed(p_s1)

A number is sent along with tensors and takes no room. So a small tensor that is made of nothing but
numbers (positions, a causal mask) is made again from these numbers; an expanded tensor is expanded
again from the smaller tensor that it is a view of; and a size is read from a tensor that the stage
has anyway.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, fx

from fxpipe.ir._torch import OpOverload
from fxpipe.ir.cost import Cost
from fxpipe.ir.graph import (
    ALIAS,
    COST,
    NO_BACKWARD,
    ONCE,
    RANDOM,
    STAGE,
    VALUE,
    WRITES,
    stage_nodes,
)
from fxpipe.ir.printing import operator_name
from fxpipe.ir.tensors import tensor_bytes, tensors_of

SMALL = 1 << 16  # a tensor with more elements is sent, and not made again
FEW = 8  # a tensor that takes more nodes to make is sent, and not made again

SIZES = {".size", ".dim", ".numel", "getattr", "size", "numel", "len"}
ARITHMETIC = {"_operator", "builtins", "math"}
FACTORIES = {"arange", "eye", "full", "linspace", "ones", "scalar_tensor", "zeros"}
EXPANSIONS = {".expand", ".expand_as", "expand", "broadcast_to"}


@dataclass(frozen=True)
class Free:
    """Model graph with ``meta["stage"]`` → the same, with a copy of each node whose value costs
    nothing in every stage that uses the value."""

    name: ClassVar[str] = "free"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        copies = _Recomputed(gm.graph)
        for node in list(stage_nodes(gm.graph)):
            for source in node.all_input_nodes:
                if source.meta.get(STAGE, node.meta[STAGE]) != node.meta[STAGE]:
                    own = copies.here(source, node)
                    if own is not source:
                        node.replace_input_with(source, own)
        copies.erase_unused()
        if copies.made:
            gm.recompile()
        return gm


class _Recomputed:
    """Makes copies of nodes whose values are free, at most one copy for each stage."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.made: dict[tuple[fx.Node, int], fx.Node] = {}
        self.sources: set[fx.Node] = set()  # the nodes that have been copied
        self.written = {name for node in graph.nodes for name in node.meta.get(WRITES, ())}
        self.makers: dict[fx.Node, frozenset[fx.Node]] = {}  # of tensors that may be made again
        for node in graph.nodes:
            self._follow(node)

    def _follow(self, node: fx.Node) -> None:
        """If a tensor is made of nothing but numbers, note all nodes that make it in ``makers``."""
        if not self._may_be_repeated(node) or not isinstance(node.meta.get(VALUE), Tensor):
            return
        tensors = [n for n in node.all_input_nodes if not _is_number(n)]
        if all(n in self.makers for n in tensors) and (tensors or _operator(node) in FACTORIES):
            makers = frozenset([node]).union(*(self.makers[n] for n in tensors))
            if len(makers) <= FEW and node.meta[VALUE].numel() <= SMALL:
                self.makers[node] = makers

    def _may_be_repeated(self, node: fx.Node) -> bool:
        value = node.meta.get(VALUE)
        return (
            node.op in ("call_function", "call_method")
            and not any(key in node.meta for key in (ALIAS, RANDOM, WRITES, ONCE, NO_BACKWARD))
            and node.name not in self.written
            and all(not t.requires_grad for t in tensors_of(value))
        )

    def here(self, source: fx.Node, user: fx.Node) -> fx.Node:
        """The node that gives ``source`` to a user: a copy in the user's stage if that is free."""
        stage = user.meta[STAGE]
        if source.op in ("placeholder", "get_attr") or source.meta[STAGE] == stage:
            return source
        if (source, stage) not in self.made:
            if not self._is_free(source, stage):
                return source
            own = {each: self.here(each, user) for each in source.all_input_nodes}
            with self.graph.inserting_before(user):
                copy = self.graph.node_copy(source, own.__getitem__)
            copy.meta = {**source.meta, STAGE: stage, COST: Cost()}
            self.made[source, stage] = copy
            self.sources.add(source)
        return self.made[source, stage]

    def _is_free(self, node: fx.Node, stage: int) -> bool:
        if not self._may_be_repeated(node):
            return False
        if node in self.makers:
            return True
        tensors = [n for n in node.all_input_nodes if not _is_number(n)]
        if _is_number(node):
            if tensors:
                return _operator(node) in SIZES and all(self._is_at(n, stage) for n in tensors)
            return getattr(node.target, "__module__", "") in ARITHMETIC
        return _operator(node) in EXPANSIONS and tensor_bytes(
            [n.meta.get(VALUE) for n in tensors]
        ) < tensor_bytes(node.meta[VALUE])

    def erase_unused(self) -> None:
        """Erase copied nodes that have no user left, unless a stage would be left without nodes."""
        count = Counter(node.meta[STAGE] for node in stage_nodes(self.graph))
        for node in reversed(self.graph.nodes):
            if node in self.sources and not node.users and count[node.meta[STAGE]] > 1:
                count[node.meta[STAGE]] -= 1
                self.graph.erase_node(node)

    def _is_at(self, tensor: fx.Node, stage: int) -> bool:
        """Whether a stage has a tensor anyway: makes it, or receives it for another user."""
        if tensor.meta.get(STAGE) == stage:
            return True
        users = (user for user in tensor.users if user.meta.get(STAGE) == stage)
        return any(not _is_number(user) for user in users)


def _is_number(node: fx.Node) -> bool:
    """Whether its value has no tensors: a number, a shape, a dtype."""
    return VALUE in node.meta and not tensors_of(node.meta[VALUE])


def _operator(node: fx.Node) -> str:
    """An operator's name, whatever front end it comes from."""
    if isinstance(node.target, OpOverload):
        return str(node.target.overloadpacket.__name__).removeprefix("sym_")
    return operator_name(node)
