"""Alias: the pass runs the model graph on fake tensors and notes which values share memory and
which nodes write to it, so that no cut separates an in-place write from the reads that see it.

::

    a = linear(x)         makes memory A
    v = a[:, 0]           is a view of A
    w = v.mul_(2)         writes to A, which is the memory of a and of v
    y = relu(a)           reads, after the write, a value that was made before it:
                          a, v and w have to stay in one stage, so that y sees the write

    a = linear(x)
    b = relu_(a)          writes to A, but afterwards only b is read: a cut between a and b is fine
    y = linear(b)         if the second stage writes to a copy (pass "split" sees to that)

Where a node returns the very tensor that it was given (``relu_(a)``, an identity), later nodes are
made to take the tensor from that node, so that one tensor is one value of the graph.

To see whether a node writes, the pass runs it and compares the version counters of its arguments
before and after. So functions, methods, ``out=``, item assignment and ``inplace=True`` modules are
all noticed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import networkx as nx
import torch
from torch import Tensor, fx, nn

from fxpipe.ir._torch import TorchDispatchMode, schema_of, version_of
from fxpipe.ir.graph import (
    AGAIN,
    ALIAS,
    NO_BACKWARD,
    ON_THE_HOST,
    RANDOM,
    SAME_AS,
    VALUE,
    WRITES,
)
from fxpipe.ir.tensors import memory_of, tensors_of
from fxpipe.runtime.checkpointing.regions import regions_within
from fxpipe.runtime.random import HostRandomState, draws_on_the_host
from fxpipe.runtime.writes import statistics_written_by
from passes.common.fakes import FakeInterpreter, backward_edges, history_of


@dataclass(frozen=True)
class Alias:
    """Model graph → the same, with metadata on each node's value and on what it does to memory.

    ``meta["val"]`` is the node's fake value for ``inputs`` (one for each placeholder);
    ``meta["writes"]`` names the nodes whose memory it writes to; ``meta["alias"]`` is the number of
    a group of nodes that have to stay in one stage; ``meta["same_as"]`` names the nodes whose
    tensors the node returns just as it was given them; ``meta["random"]`` is set where random
    numbers are drawn, with ``meta["on_the_host"]`` if by Python or NumPy; and
    ``meta["no_backward"]`` where a value has autograd history that the
    backward from the outputs does not reach. ``meta["again"]`` names the buffers to which a
    checkpoint of the model's own writes a second time when its backward runs its forward again.

    ``training``: whether there is a backward; if not, no value of a node gets a gradient.
    """

    name: ClassVar[str] = "alias"
    inputs: tuple[Any, ...]
    training: bool = True

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        for node in gm.graph.nodes:
            for key in (WRITES, AGAIN, ALIAS, RANDOM, ON_THE_HOST, SAME_AS, NO_BACKWARD):
                node.meta.pop(key, None)
        seen = _Watcher(gm)
        inputs = seen.fake(self.inputs)
        with seen.mode, seen.randomness, seen.statistics, torch.set_grad_enabled(self.training):
            seen.run(*inputs)
        position = {node: i for i, node in enumerate(gm.graph.nodes)}
        if _follow_identities(seen, position):
            gm.recompile()
        _mark_same(seen)
        groups: list[set[fx.Node]] = []
        written: dict[fx.Node, list[fx.Node]] = {}
        for writer, memories in seen.written.items():
            sharing = seen.sharing(memories)
            before = [node for node in sharing if position[node] < position[writer]]
            written[writer] = before
            writer.meta[WRITES] = tuple(node.name for node in before)
            groups.append(_inseparable(writer, before, sharing, position))
        groups += [seen.buffer_users[buffer] for buffer in seen.written_buffers]
        for number, group in enumerate(_disjoint(groups)):
            for node in group:
                node.meta[ALIAS] = number
        outputs = [seen.env[node] for node in gm.graph.output_node().all_input_nodes]
        reached = set(backward_edges(outputs))
        live = _live(gm.graph, written, position)
        # A write replaces the autograd history of all tensors on its memory. The one that earlier
        # users saw is no longer known, so that these nodes are taken to be reached.
        rewritten = set(seen.sharing(set().union(*seen.written.values())))
        for node, value in seen.env.items():
            made_by = history_of(value) if isinstance(value, Tensor) else None
            if made_by is not None:
                known = made_by in reached or node in rewritten
                if not known or node not in live:
                    node.meta[NO_BACKWARD] = True
        return gm


class _Randomness(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices whether operators that draw random numbers run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.has_drawn |= _draws(func, args, kwargs)
        return func(*args, **kwargs)


class _Statistics(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the running statistics that batch norms write to: no version counter tells of it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()  # by id

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.written.update(map(id, statistics_written_by(func, args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator that can draw random numbers draws any in this call.

    Attention and recurrent layers draw none where the probability of dropout is zero, or outside of
    training.
    """
    expected = schema_of(func).arguments
    given = {a.name: a.default_value for a in expected if a.has_default_value()}
    given |= {a.name: value for a, value in zip(expected, args, strict=False)} | kwargs
    return all(given.get(n) != 0 for n in ("dropout_p", "dropout", "train", "training"))


class _Watcher(FakeInterpreter):
    """Runs the graph, and notes for each node the memory of its result and the memory it writes."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.garbage_collect_values = False  # new values would get the memory of freed ones
        self.randomness, self.statistics = _Randomness(), _Statistics()
        self.kept: list[Tensor] = []
        self.given: dict[int, list[fx.Node]] = {}  # by memory: nodes whose results are there
        self.written: dict[fx.Node, set[int]] = {}  # by node: the memories that it writes to
        self.buffer_users: dict[int, set[fx.Node]] = {}  # by id of a module's buffer
        self.written_buffers: set[int] = set()

    def _buffers(self, node: fx.Node) -> list[Tensor]:
        """The buffers, as fakes, of the module that a node calls."""
        if node.op != "call_module":
            return []
        buffers = [self.fake(b) for b in self.fetch_attr(str(node.target)).buffers()]
        self.kept += buffers  # else other tensors could get their ids
        return buffers

    def _written_again(
        self, node: fx.Node, own: list[Tensor], versions: list[int], value: Any
    ) -> tuple[str, ...]:
        """The buffers, by their paths in the model, that a node has written to within a checkpoint
        of the model's own, whose backward runs that part of the node again, with its writes.

        Args:
            own: the buffers of the module that the node calls, with the versions that they had.
            value: what the node gives: without a gradient there is no backward.
        """
        if not own or not any(tensor.requires_grad for tensor in tensors_of(value)):
            return ()
        changed = (b for b, version in zip(own, versions, strict=True) if version_of(b) != version)
        written = self.statistics.written.union(map(id, changed))
        found: dict[int, str] = {}
        # The innermost regions come first: they have the buffer at its path in the model.
        for region in reversed(list(regions_within(self.fetch_attr(str(node.target))))):
            for path, buffer in region.body.named_buffers():
                fake = id(self.fake(buffer))
                if region.settings.options.writes_again and fake in written:
                    found.setdefault(fake, path)
        return tuple(found.values())

    def sharing(self, memories: set[int]) -> list[fx.Node]:
        """The nodes whose results share memory with any of these tensors."""
        return list(dict.fromkeys(node for m in memories for node in self.given[m]))

    def _users_module(self, n: fx.Node) -> nn.Module | None:
        """The module that a node calls, if that is none of PyTorch's own, which never draw random
        numbers with Python or NumPy."""
        module = self.module.get_submodule(str(n.target)) if n.op == "call_module" else None
        is_torchs = module is not None and type(module).__module__.startswith("torch.nn.")
        return None if is_torchs else module

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        before = [(tensor, version_of(tensor)) for tensor in tensors_of((args, kwargs))]
        own = self._buffers(n)
        versions = [version_of(buffer) for buffer in own]
        self.randomness.has_drawn = False
        self.statistics.written.clear()
        module = self._users_module(n)
        host = None if module is None else HostRandomState()
        value = super().run_node(n)
        if host is not None and (host.has_changed or draws_on_the_host(module)):
            n.meta[RANDOM] = n.meta[ON_THE_HOST] = True
        written = {memory_of(tensor) for tensor, version in before if version_of(tensor) != version}
        if written:
            self.written[n] = written
        for buffer, version in zip(own, versions, strict=True):
            self.buffer_users.setdefault(id(buffer), set()).add(n)
            if version_of(buffer) != version:
                self.written_buffers.add(id(buffer))
        if self.randomness.has_drawn:
            n.meta[RANDOM] = True
        if again := self._written_again(n, own, versions, value):
            n.meta[AGAIN] = again
        if n.op != "output":
            n.meta[VALUE] = value
            for memory in {memory_of(tensor) for tensor in tensors_of(value)}:
                self.given.setdefault(memory, []).append(n)
        return value


def _follow_identities(seen: _Watcher, position: dict[fx.Node, int]) -> bool:
    """Where a node returns the very tensor that it was given, let later users take it from there.

    After ``b = relu_(a)`` a later user of ``a`` uses ``b``: both names mean one tensor, which is
    then one value with one name. Returns whether any user was changed.
    """
    has_changed = False
    for node in position:
        for source in node.all_input_nodes if node.op != "output" else ():
            if isinstance(seen.env[node], Tensor) and seen.env[node] is seen.env[source]:
                for user in list(source.users):
                    if position[user] > position[node]:
                        user.replace_input_with(source, node)
                        has_changed = True
    return has_changed


def _mark_same(seen: _Watcher) -> None:
    """Set ``meta["same_as"]`` of nodes that return a tensor just as they were given it.

    A node that writes is left out, since what it returns has another autograd history.
    """
    for node, value in seen.env.items():
        given = {id(tensor) for tensor in tensors_of(value)}
        if node.op != "output" and node not in seen.written:
            same = (
                n
                for n in node.all_input_nodes
                if not given.isdisjoint(map(id, tensors_of(seen.env[n])))
            )
            if names := tuple(n.name for n in same):
                node.meta[SAME_AS] = names


def _live(
    graph: fx.Graph, written: dict[fx.Node, list[fx.Node]], position: dict[fx.Node, int]
) -> set[fx.Node]:
    """The nodes that an output depends on, directly or through memory that they write to."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        later = (
            user
            for before in written.get(node, ())
            for user in before.users
            if position[user] > position[node]
        )
        if node.op == "output" or not live.isdisjoint(node.users) or not live.isdisjoint(later):
            live.add(node)
    return live


def _inseparable(
    writer: fx.Node,
    before: list[fx.Node],
    sharing: list[fx.Node],
    position: dict[fx.Node, int],
) -> set[fx.Node]:
    """The nodes that have to be in the same stage as a node that writes to memory.

    ``sharing``: all nodes whose results are on that memory; ``before``: those of them that come
    before the writer.
    """
    if any(node.op == "get_attr" for node in before):
        # All micro-batches write to the same buffer or parameter, one after the other: all nodes
        # that touch it have to stay together.
        touching = {user for node in sharing for user in node.users if user.op != "output"}
        return touching | {n for n in sharing if n.op not in ("get_attr", "placeholder")}
    is_read_later = any(position[user] > position[writer] for node in before for user in node.users)
    if not is_read_later:
        return set()
    early = {u for node in before for u in node.users if position[u] <= position[writer]}
    return early | {node for node in before if node.op != "placeholder"} | {writer}


def _disjoint(groups: Iterable[set[fx.Node]]) -> list[set[fx.Node]]:
    """Merge groups that have a node in common."""
    graph: nx.Graph[fx.Node] = nx.Graph()
    for group in groups:
        nx.add_path(graph, group)
    return [set(component) for component in nx.connected_components(graph)]
