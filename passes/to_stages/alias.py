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

To see whether a node writes, the pass runs it, and notices to what memory each operator writes that
runs in it. So functions, methods, ``out=``, item assignment, lists of tensors, ``.data`` and
``inplace=True`` modules are all noticed, and so are batch norms, which write to their running
statistics. The version counters of its arguments, compared before and after, tell of writes that no
operator makes.

Buffers and parameters are memory that all micro-batches share. If anything writes to one, each node
that uses it has to stay in one stage, where one micro-batch comes after the other::

    y = batch_norm(x, mean, variance)       writes to mean
    z = y - mean                            reads it: in the same stage

The same holds for nodes that hand something to each other through a Python object, which a front
end has found out (``fxpipe.trace.handed``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import networkx as nx
import torch
from torch import Tensor, fx, nn

from fxpipe.ir._torch import TorchDispatchMode, schema_of
from fxpipe.ir.graph import (
    AGAIN,
    ALIAS,
    DRAWS,
    HANDED,
    NO_BACKWARD,
    ON_THE_HOST,
    ONCE,
    RANDOM,
    SAME_AS,
    VALUE,
    WRITES,
    WRITES_STATE,
)
from fxpipe.ir.tensors import memory_of, tensors_of
from fxpipe.runtime.checkpointing.regions import regions_within
from fxpipe.runtime.random import HostRandomState, draws_on_the_host
from fxpipe.runtime.writes import WrittenMemory, writes_counted
from passes.common.fakes import FakeInterpreter, backward_edges, history_of

_NOTES = WRITES, WRITES_STATE, AGAIN, ALIAS, RANDOM, ON_THE_HOST, SAME_AS, NO_BACKWARD


@dataclass(frozen=True)
class Alias:
    """Model graph → the same, with metadata on each node's value and on what it does to memory.

    ``meta["val"]`` is the node's fake value for ``inputs`` (one for each placeholder);
    ``meta["writes"]`` names the nodes whose memory it writes to, and ``meta["writes_state"]`` has
    the paths of the parameters and buffers to whose memory it does; ``meta["alias"]`` is the number
    of a group of nodes that have to stay in one stage; ``meta["same_as"]`` names the nodes whose
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
            for key in _NOTES:
                node.meta.pop(key, None)
        seen = _Watcher(gm)
        inputs = seen.fake(self.inputs)
        with seen.mode, seen.randomness, seen.operators, torch.set_grad_enabled(self.training):
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
            if before:
                writer.meta[WRITES] = tuple(node.name for node in before)
            if state := tuple(path for m in memories for path in seen.state.get(m, ())):
                writer.meta[WRITES_STATE] = state
            passing = seen.sharing(memories - seen.state.keys())
            groups.append(_inseparable(writer, passing, position))
        rewritten = set().union(*seen.written.values())
        groups += [seen.users_of(memory) for memory in seen.state if memory in rewritten]
        groups += _handing_over(gm.graph)
        for number, group in enumerate(_disjoint(groups)):
            for node in group:
                node.meta[ALIAS] = number
        outputs = [seen.env[node] for node in gm.graph.output_node().all_input_nodes]
        reached = set(backward_edges(outputs))
        live = _live(gm.graph, written, position)
        # A write replaces the autograd history of all tensors on its memory. The one that earlier
        # users saw is no longer known, so that these nodes are taken to be reached.
        without_history = set(seen.sharing(rewritten))
        for node, value in seen.env.items():
            made_by = history_of(value) if isinstance(value, Tensor) else None
            if made_by is not None:
                known = made_by in reached or node in without_history
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
        self.randomness, self.operators = _Randomness(), WrittenMemory()
        self.given: dict[int, list[fx.Node]] = {}  # by memory: nodes whose results are there
        self.written: dict[fx.Node, set[int]] = {}  # by node: the memories that it writes to
        self.owners: dict[int, set[fx.Node]] = {}  # by memory: nodes that call modules with it
        # By memory: the paths of the parameters and buffers that are there.
        self.state: dict[int, list[str]] = {}
        self.kept: list[Tensor] = []  # else other tensors could get their memory
        for own in (gm.named_parameters, gm.named_buffers):
            for path, tensor in own(remove_duplicate=False):
                self._keep(path, self.fake(tensor))

    def _keep(self, path: str, tensor: Tensor) -> None:
        """Note the fake of a tensor of the model, which all micro-batches share."""
        self.kept.append(tensor)
        self.state.setdefault(memory_of(tensor), []).append(path)

    def _own(self, node: fx.Node) -> dict[str, Tensor]:
        """The parameters and buffers, as fakes, of the module that a node calls."""
        if node.op != "call_module":
            return {}
        module = self.fetch_attr(str(node.target))
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return {path: self.fake(tensor) for path, tensor in tensors.items()}

    def _written_again(self, node: fx.Node, written: set[int], value: Any) -> tuple[str, ...]:
        """The buffers, by their paths in the model, that a node has written to within a checkpoint
        of the model's own, whose backward runs that part of the node again, with its writes.

        Args:
            written: the memory that the node writes to.
            value: what the node gives: without a gradient there is no backward.
        """
        if node.op != "call_module" or not written:
            return ()
        if not any(tensor.requires_grad for tensor in tensors_of(value)):
            return ()
        found: dict[int, str] = {}
        # The innermost regions come first: they have the buffer at its path in the model.
        for region in reversed(list(regions_within(self.fetch_attr(str(node.target))))):
            for path, buffer in region.body.named_buffers():
                memory = memory_of(self.fake(buffer))
                if region.settings.options.writes_again and memory in written:
                    found.setdefault(memory, path)
        return tuple(found.values())

    def users_of(self, memory: int) -> set[fx.Node]:
        """The nodes that use a buffer or parameter, or a view of it. For one that runs once for a
        mini-batch, in the stage of what it is given, these are the nodes that give it that."""
        given = self.given.get(memory, ())
        users = {user for node in given for user in node.users if user.op != "output"}
        for once in [user for user in users if ONCE in user.meta]:
            users.remove(once)
            users.update(once.all_input_nodes)
        users -= {node for node in users if node.op in ("get_attr", "placeholder")}
        made = {node for node in given if node.op not in ("get_attr", "placeholder")}
        return users | made | self.owners.get(memory, set())

    def sharing(self, memories: set[int]) -> list[fx.Node]:
        """The nodes whose results share memory with any of these tensors."""
        return list(dict.fromkeys(node for m in memories for node in self.given.get(m, ())))

    def _users_module(self, n: fx.Node) -> nn.Module | None:
        """The module that a node calls, if that is none of PyTorch's own, which never draw random
        numbers with Python or NumPy."""
        module = self.module.get_submodule(str(n.target)) if n.op == "call_module" else None
        is_torchs = module is not None and type(module).__module__.startswith("torch.nn.")
        return None if is_torchs else module

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        before = [(tensor, writes_counted(tensor)) for tensor in tensors_of((args, kwargs))]
        own = self._own(n)
        before += [(tensor, writes_counted(tensor)) for tensor in own.values()]
        self.randomness.has_drawn = False
        self.operators.numbers.clear()
        module = self._users_module(n)
        host = None if module is None else HostRandomState()
        value = super().run_node(n)
        drew_on_the_host = host is not None and (host.has_changed or draws_on_the_host(module))
        if drew_on_the_host or n.meta.get(DRAWS) == "host":
            n.meta[RANDOM] = n.meta[ON_THE_HOST] = True
        written = {
            memory_of(tensor)
            for tensor, version in before
            if self.operators.has(tensor) or writes_counted(tensor) != version
        }
        if written:
            self.written[n] = written
        for tensor in own.values():
            self.owners.setdefault(memory_of(tensor), set()).add(n)
        if self.randomness.has_drawn or DRAWS in n.meta:
            n.meta[RANDOM] = True
        if again := self._written_again(n, written, value):
            n.meta[AGAIN] = again
        if n.op == "get_attr":
            for tensor in tensors_of(value):
                if memory_of(tensor) not in self.state:  # it is no parameter and no buffer
                    self._keep(str(n.target), tensor)
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
    writer: fx.Node, sharing: list[fx.Node], position: dict[fx.Node, int]
) -> set[fx.Node]:
    """The nodes that have to be in the same stage as a node that writes to memory of values, which
    each micro-batch has its own of.

    ``sharing``: all nodes whose results are on that memory.
    """
    before = [node for node in sharing if position[node] < position[writer]]
    is_read_later = any(position[user] > position[writer] for node in before for user in node.users)
    if not is_read_later:
        return set()
    early = {u for node in before for u in node.users if position[u] <= position[writer]}
    return early | {node for node in before if node.op != "placeholder"} | {writer}


def _handing_over(graph: fx.Graph) -> Iterable[set[fx.Node]]:
    """Groups of nodes that hand something to each other through one Python object."""
    found: dict[int, set[fx.Node]] = {}
    for node in graph.nodes:
        for number in node.meta.get(HANDED, ()):
            found.setdefault(number, set()).add(node)
    return found.values()


def _disjoint(groups: Iterable[set[fx.Node]]) -> list[set[fx.Node]]:
    """Merge groups that have a node in common."""
    graph: nx.Graph[fx.Node] = nx.Graph()
    for group in groups:
        nx.add_path(graph, group)
    return [set(component) for component in nx.connected_components(graph)]
