"""Borders: what a stage receives from another device arrives in memory of its own, so that nodes
there may keep something else for their backward than in the model as a whole.

::

    the model    qkv ─ split ─┬─ q ─┐           q, k and v are views of qkv: attention keeps qkv,
                              ├─ k ─┤           and whatever it computes of inputs that are not in
                              └─ v ─┴─ attend   order

    cut at q     stage 1:  q, k, v ─ attend     each arrives in order, with memory of its own:
                                                attention keeps q, k and v

A copy to another device keeps the order of a tensor's elements where they fill its memory; of any
other tensor, such as a part of a larger one, it puts them in order. Operators may take other ways
with tensors in order, and keep other tensors. So nodes that are given such a tensor are run on fake
tensors once more, as pass "cost" has run them; and so are those that are given their results, as
far as these are in another order than before.

A view of a parameter takes no memory where that parameter is. Another device, which gets a copy of
the view with each micro-batch, keeps these copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, fx

from fxpipe.ir.cost import copies_of, memories_of
from fxpipe.ir.graph import (
    GROWS,
    MEMORIES,
    PART,
    SAVED,
    SAVED_STATE,
    STAGE,
    VALUE,
    WORKSPACE,
    attribute,
    is_work,
    stages_of,
)
from fxpipe.ir.tensors import memory_bytes, new_memory, tensors_of, with_tensors
from passes.common.fakes import fake_mode
from passes.common.signature import look_of
from passes.common.skips import routes
from passes.cost.work import Runs, microbatches
from passes.to_stages.rows import OneOfEach

Memories = Sequence[tuple[int, int]]
"""Of each tensor of a value its memory: the number, and the bytes for a mini-batch."""


@dataclass(frozen=True)
class Borders:
    """Stage graph after pass "split", with the costs of pass "cost" → the same, in which values
    that come from another device have memories of their own (``meta["memories"]``), and nodes keep
    what they keep of these (``meta["saved"]``, ``meta["workspace"]``).

    Args:
        devices: one for each stage.
        places: as for pass "tied".
        chunks: the number of micro-batches, as for pass "cost".
        traced_chunks: for a graph that was traced with a single micro-batch, how many of these
            there are; else 1.
        training: whether there are backwards.
    """

    name: ClassVar[str] = "borders"
    devices: tuple[str, ...]
    places: tuple[int, ...] = ()
    chunks: int = 1
    traced_chunks: int = 1
    training: bool = True

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        arrived, times = self._arrived(gm.graph), microbatches(gm.graph)
        calls = gm.graph.find_nodes(op="call_module")
        for call, stage in zip(calls, stages_of(gm), strict=True):
            inputs = zip(stage.graph.find_nodes(op="placeholder"), call.args, strict=True)
            own = {
                inner: arrived[given, call.meta[STAGE]]
                for inner, given in inputs
                if (given, call.meta[STAGE]) in arrived
            }
            if own:
                _Recount(stage, self, times).run(own)
        return gm

    def _arrived(self, graph: fx.Graph) -> dict[tuple[Any, int], list[int]]:
        """The numbers of the new memories: for each value, and each stage that has it by a copy
        from another device."""
        places: tuple[int | str, ...] = self.places or self.devices
        found: dict[tuple[Any, int], list[int]] = {}
        for node, stages in routes(graph):
            own: list[int] = []
            for source, target in pairwise(stages):
                if source is None or target is None:  # what the caller gives is in order
                    continue
                if places[source] != places[target]:
                    own = [new_memory() for _ in tensors_of(node.meta.get(VALUE))]
                if own:
                    found[node, target] = own
        return found


class _Recount:
    """A stage that receives values in memories of their own.

    Attributes:
        before: what was known of nodes whose values are in other memories now, or in another order.
    """

    def __init__(self, gm: fx.GraphModule, asked: Borders, times: float | None) -> None:
        self.gm, self.asked, self.times = gm, asked, times
        self.before: dict[fx.Node, list[_Seen]] = {}

    def run(self, arrived: Mapping[fx.Node, list[int]]) -> None:
        """Go through the nodes in order. ``arrived`` has the memories of inputs."""
        with self._modules_as_values():
            for node in self.gm.graph.nodes:
                if node in arrived:
                    with torch.no_grad():
                        value = with_tensors(_sent, _value(node))
                    self._note(node, value, self._memories(node, value, arrived[node]))
                elif is_work(node) and not self.before.keys().isdisjoint(node.all_input_nodes):
                    self._follow(node)

    @contextmanager
    def _modules_as_values(self) -> Iterator[None]:
        """A context in which the modules that are called with shared parameters (pass "shared") are
        values of their nodes, as for whoever runs these."""
        nodes = [n for n in self.gm.graph.find_nodes(op="get_attr") if VALUE not in n.meta]
        for node in nodes:
            node.meta[VALUE] = attribute(self.gm, str(node.target))
        try:
            yield
        finally:
            for node in nodes:
                del node.meta[VALUE]

    def _follow(self, node: fx.Node) -> None:
        """Find out what a node makes and keeps of what has arrived."""
        before, now = self._given(node, self.before), self._given(node, {})
        if _order(before) != _order(now):
            self._run_again(node)
            return
        pairs = zip(before, now, strict=True)
        moved = {one.memory[0]: other.memory for one, other in pairs if one != other}
        own = tuple(moved.get(memory, (memory, size)) for memory, size in memories_of(node))
        if own != memories_of(node):
            self._note(node, _value(node), own)
        if SAVED in node.meta:
            saved, state = dict(node.meta[SAVED]), dict(node.meta.get(SAVED_STATE, ()))
            saved |= {memory: size for memory, size in state.items() if memory in moved}
            found = dict(moved.get(memory, (memory, size)) for memory, size in saved.items())
            node.meta[SAVED] = tuple(found.items())

    def _run_again(self, node: fx.Node) -> None:
        """Run a node on fake tensors, forward and backward."""
        self._note(node, *self._result(node))
        if WORKSPACE not in node.meta:
            return
        work = self._runs.of(node).times(self.asked.traced_chunks)
        if self.asked.training:  # else only outputs of the model are kept, whatever their order
            saved = self._runs.saved(node, work)
            state = self._runs.state
            node.meta[SAVED] = tuple(each for each in saved.items() if each[0] not in state)
        is_deferrable = node.meta[WORKSPACE].is_deferrable
        node.meta[WORKSPACE] = replace(work.workspace, is_deferrable=is_deferrable)

    def _result(self, node: fx.Node) -> tuple[Any, Memories]:
        """The value of a node, by its forward, and the memories of that."""
        known = dict(memories_of(node))  # among which those of parameters
        for source in node.all_input_nodes:
            self._forwards.env[source] = _value(source)
            self._forwards.memories[source] = [memory for memory, _ in memories_of(source)]
            known |= dict(memories_of(source))
        with self._forwards.mode, torch.no_grad():
            value = self._forwards.run_node(node)
        made = self._memories(node, value, self._forwards.memories[node])
        return value, tuple((memory, known.get(memory, size)) for memory, size in made)

    def _memories(self, node: fx.Node, value: Any, numbers: Sequence[int]) -> Memories:
        """The memories of a value of a micro-batch, with their bytes for a mini-batch."""
        tensors, copies = tensors_of(value), copies_of(node)
        grown = node.meta.get(GROWS, ((),) * len(copies))
        times = [self.times or 1 if dims else n for dims, n in zip(grown, copies, strict=True)]
        sizes = (round(memory_bytes(t) * n) for t, n in zip(tensors, times, strict=True))
        return tuple(zip(numbers, sizes, strict=True))

    def _note(self, node: fx.Node, value: Any, memories: Memories) -> None:
        """Note the value of a node, and what has been known of it so far."""
        self.before[node] = _seen(node)
        node.meta |= {PART: value, MEMORIES: tuple(memories)}

    def _given(self, node: fx.Node, before: Mapping[fx.Node, list[_Seen]]) -> list[_Seen]:
        """The tensors that a node is given, in order: those ``before``, where there are any."""
        found: list[_Seen] = []

        def take(source: fx.Node) -> None:
            found.extend(before[source] if source in before else _seen(source))

        fx.map_arg((node.args, node.kwargs), take)
        return found

    @cached_property
    def _forwards(self) -> OneOfEach:
        return OneOfEach(self.gm, fake_mode(self.gm.graph))

    @cached_property
    def _runs(self) -> Runs:
        return Runs(self.gm, self.asked.chunks, self.times, self.asked.training)


class _Seen(NamedTuple):
    """What an operator sees of a tensor, and the tensor's memory: its number, and its bytes."""

    look: Any
    memory: tuple[int, int]


def _seen(node: fx.Node) -> list[_Seen]:
    tensors = tensors_of(_value(node))
    return list(map(_Seen, map(look_of, tensors), memories_of(node)))


def _value(node: fx.Node) -> Any:
    """The fake value of a node for a micro-batch, as far as its rows are known."""
    return node.meta.get(PART, node.meta.get(VALUE))


def _order(tensors: Sequence[_Seen]) -> Any:
    """How the elements of tensors are in order, and which of the tensors share memory."""
    numbers = [each.memory[0] for each in tensors]
    return [(each.look, numbers.index(each.memory[0])) for each in tensors]


def _sent(tensor: Tensor) -> Tensor:
    """A copy, as a tensor is copied to another device."""
    return tensor.to(tensor.dtype, copy=True)
