"""Which nodes of a graph use the same memory, so that one of them writes what another one reads.

::

    k = linear(x)         makes memory K
    v = k[:, :3]          takes K, and gives a view of it
    fill_(v, 0)           writes to K
    m = k < 0             takes K: it has to stay behind fill_, whose result it does not use

The edges of a graph tell nothing of the last line. So the graph is run, on real tensors, and what
each node does to memory is noticed as in the pass "alias".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

from fxpipe.ir.graph import mutable
from fxpipe.ir.tensors import memory_of, tensors_of
from fxpipe.runtime.writes import WrittenMemory, writes_counted

Memory = tuple[int, int]
"""The number of a run, and that of memory in it."""


class MemoryAccesses:
    """What the nodes of a graph do to memory, as seen in some runs of it.

    Args:
        runs: functions that run the graph. A tensor may be a view in one of them, and a copy in
            another one, by its layout: what is seen in any of them holds.
    """

    def __init__(self, graph_module: fx.GraphModule, runs: Iterable[Callable[[], Any]]) -> None:
        self.graph = graph_module.graph
        self.given: dict[fx.Node, set[Memory]] = {}
        """By node: the memory in which its results are."""
        self.written: dict[fx.Node, set[Memory]] = {}
        """By node: the memory whose contents it changes."""
        self.taken: dict[fx.Node, set[Memory]] = {}
        """By node: the memory in which its arguments are."""
        for number, run in enumerate(runs):
            vars(graph_module)["forward"] = _MemoryInterpreter(graph_module, self, number).run
            try:
                run()
            finally:
                del vars(graph_module)["forward"]

    def predecessors(self) -> dict[fx.Node, set[fx.Node]]:
        """The nodes that have to come before each node: those that give what it takes, those that
        write to memory ahead of its use of it and, if it writes, those that use memory ahead of
        that. Which nodes come before these is not repeated."""
        before = {node: set(node.all_input_nodes) for node in self.graph.nodes}
        writer: dict[Memory, fx.Node] = {}
        since: dict[Memory, set[fx.Node]] = {}  # the nodes that use memory after the last write
        for node in self.graph.nodes:
            written = self.written.get(node, set())
            for memory in self.taken.get(node, set()) | written:
                if memory in writer:
                    before[node].add(writer[memory])
                users = since.setdefault(memory, set())
                if memory in written:
                    before[node] |= users
                    writer[memory] = node
                    users.clear()
                users.add(node)
            before[node].discard(node)
        return before

    def inseparable(self, nodes: set[fx.Node]) -> set[fx.Node]:
        """The nodes that have to become one node together with ``nodes``, whose results are new
        tensors to the rest of the graph: their memory is not that of any other tensor.

        These are all nodes that write to the memory of what ``nodes`` write to, with the nodes that
        make that memory or a view of it ahead of a write; and those that write later to the memory
        of a result that nodes outside use.
        """
        leaving = {node for node in nodes if not nodes.issuperset(node.users)}
        written = {memory for node in nodes for memory in self.written.get(node, ())}
        found: set[fx.Node] = set()
        given: set[Memory] = set()  # memory of results that nodes outside use
        for node in self.graph.nodes:
            own = self.written.get(node, set())
            if not own.isdisjoint(written | given):
                found.add(node)
            if node in leaving:
                given |= self.given.get(node, set())
        for node in found | nodes:
            written |= self.written.get(node, set())
        making: set[fx.Node] = set()
        is_behind = True  # all writes to that memory
        for node in reversed(self.graph.nodes):
            is_behind &= node not in found
            is_made = node.op not in ("placeholder", "get_attr", "output")
            if not is_behind and is_made and not written.isdisjoint(self.given.get(node, ())):
                making.add(node)
        return found | making


class _MemoryInterpreter(fx.Interpreter):
    """Runs a graph, and notes what its nodes do to memory."""

    def __init__(self, graph_module: fx.GraphModule, uses: MemoryAccesses, number: int) -> None:
        super().__init__(graph_module)
        self.garbage_collect_values = False  # new values would get the memory of freed ones
        self.extra_traceback = False
        self.uses, self.number = uses, number

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return mutable(args), mutable(kwargs)

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        before = [(tensor, writes_counted(tensor)) for tensor in tensors_of((args, kwargs))]
        with WrittenMemory() as operators:
            value = super().run_node(n)
        written = [
            tensor
            for tensor, version in before
            if operators.has(tensor) or writes_counted(tensor) != version
        ]
        if n.op != "output":
            self._note(self.uses.given, n, tensors_of(value))
            self._note(self.uses.taken, n, [tensor for tensor, _ in before])
            self._note(self.uses.written, n, written)
        return value

    def _note(self, noted: dict[fx.Node, set[Memory]], n: fx.Node, tensors: Iterable[Any]) -> None:
        memories = {(self.number, memory_of(tensor)) for tensor in tensors}
        if memories:
            noted.setdefault(n, set()).update(memories)
