"""What nodes and stages cost, and how many bytes their values have, for one mini-batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter

from torch import fx

from fxpipe.ir.graph import (
    BROUGHT,
    COPIES,
    COST,
    MEMORIES,
    SAVED,
    SHARED,
    VALUE,
    nodes_of_stages,
)
from fxpipe.ir.tensors import memory_bytes, memory_of, tensor_bytes, tensors_of

FIXED = "param_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes"
"""The parts of a cost that do not depend on the batch."""


WATCHED_S = 1e-5
"""Seconds that an operator takes longer if a dispatch mode in Python sees it."""


@dataclass(frozen=True)
class Cost:
    """What a node, or a stage, costs for one mini-batch. Times in seconds, sizes in bytes.

    ``accumulation_s`` is the time that each micro-batch but the first takes to add its gradients of
    parameters to those that are there. It is part of ``backward_s`` as often as that happens.
    ``again_s`` is the time of a second forward that is given the results of products, which have
    ``product_bytes``, and ``operators`` is the number of operators of a forward. ``trained`` is
    the number of parameters that get a gradient.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    param_bytes: int = 0
    activation_bytes: int = 0
    output_bytes: int = 0
    flops: int = 0
    backward_flops: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    buffer_bytes: int = 0
    accumulation_s: float = 0.0
    again_s: float = 0.0
    product_bytes: int = 0
    operators: int = 0
    trained: int = 0

    @property
    def selective_s(self) -> float:
        """What keeping the results of products costs: the second forward, and in both of them a
        call of Python for each operator, which sees whether it is a product."""
        return self.again_s + 2 * self.operators * WATCHED_S

    @property
    def seconds(self) -> float:
        """The seconds of the forward and the backward together."""
        return self.forward_s + self.backward_s

    @property
    def fixed_bytes(self) -> int:
        """The bytes that do not depend on the batch: parameters and the memory kept for them."""
        return sum(getattr(self, name) for name in FIXED)

    @property
    def part_again(self) -> float:
        """The part of the forward's time that a second forward takes with the results of
        products."""
        return min(1.0, self.again_s / self.forward_s) if self.forward_s else 1.0

    def times(self, count: int) -> Cost:
        """The cost of ``count`` micro-batches, if this is the cost of one. Parameters and the
        memory that is kept for them count once."""
        names = {f.name for f in fields(self)}.difference(FIXED, ["accumulation_s", "trained"])
        found = replace(self, **{name: getattr(self, name) * count for name in names})
        return replace(found, backward_s=found.backward_s + (count - 1) * self.accumulation_s)

    def __add__(self, other: Cost) -> Cost:
        return total([self, other])


_all_of = attrgetter(*(f.name for f in fields(Cost)))


def total(costs: Iterable[Cost]) -> Cost:
    """The sum of costs, field by field. Of many costs that is much faster than adding one after the
    other, as each addition makes a cost."""
    return Cost(*map(sum, zip(*map(_all_of, costs), strict=True)))


def cost_of(nodes: Iterable[fx.Node]) -> Cost:
    """What the nodes of one stage cost together: memory that several of them keep counts once."""
    own = list(nodes)
    every = total(node.meta.get(COST, Cost()) for node in own)
    return replace(every, activation_bytes=sum(saved_sizes(own)))


def saved_sizes(nodes: Sequence[fx.Node]) -> list[int]:
    """The bytes of each memory that the nodes of one stage save for their backward, in the order in
    which their forward saves them. One that several nodes save is there once."""
    sizes = dict[int | fx.Node, int]()
    for node in nodes:
        sizes |= dict(node.meta.get(SAVED, ()))
        if SAVED not in node.meta:
            sizes[node] = node.meta.get(COST, Cost()).activation_bytes
    return list(sizes.values())


def state_of(nodes: Iterable[fx.Node]) -> set[int]:
    """The memories of the parameters and buffers that are in a stage of these nodes, as far as its
    operators take them from there, and not the modules that it calls."""
    sources = {source for node in nodes for source in (node, *node.all_input_nodes)}
    return {
        memory
        for source in sources
        if source.op == "get_attr" or not source.meta.keys().isdisjoint((SHARED, BROUGHT))
        for memory, _ in memories_of(source)
    }


def stage_costs(stage_graph: fx.GraphModule) -> list[Cost]:
    """The cost of each stage of a stage graph."""
    return list(map(cost_of, nodes_of_stages(stage_graph)))


def copies_of(node: fx.Node) -> tuple[int, ...]:
    """For each tensor of a node's value, how many tensors of that size a mini-batch has.

    It is one if the tensor is divided among the micro-batches, or as many as there are
    micro-batches if each of these has it in full (pass "rows").
    """
    found: tuple[int, ...] = node.meta.get(COPIES, ())
    return found or (1,) * len(tensors_of(node.meta.get(VALUE)))


def memories_of(node: fx.Node) -> tuple[tuple[int, int], ...]:
    """For each tensor of a node's value the number of its memory, which other tensors may have as
    well, and the bytes that a mini-batch has of it.

    Where the rows of a micro-batch are known, the memories are those of a micro-batch (pass
    "rows"): of fewer rows a view may do what takes a copy for more.
    """
    if MEMORIES in node.meta:
        found: tuple[tuple[int, int], ...] = node.meta[MEMORIES]
        return found
    tensors = tensors_of(node.meta.get(VALUE))
    return tuple(
        (memory_of(tensor), memory_bytes(tensor) * count)
        for tensor, count in zip(tensors, copies_of(node), strict=True)
    )


def batch_bytes(node: fx.Node, trained: bool = False) -> int:
    """Bytes of all tensors in a node's value, in a whole mini-batch; with ``trained`` of those that
    get a gradient only."""
    return sum(
        count * tensor_bytes(tensor)
        for count, tensor in zip(copies_of(node), tensors_of(node.meta.get(VALUE)), strict=True)
        if tensor.requires_grad or not trained
    )
