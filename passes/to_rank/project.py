"""Project: the pass takes out of a graph of all stages the part that one rank runs, a process that
has some of the stages.

::

    all stages     forward 0 ─ wait ───────────────────────── send ─ forward 1

    rank 0         forward 0 ─ wait ─ transmit
                                      ┊ (0, 1), number 0
    rank 1                            receive ─ ... ─ arrived ─ send ─ forward 1

The nodes of the given graph are in a total order, and every rank keeps it. A transfer has one place
in this order, right behind the node that makes the value: there the sender's graph has the
``transmit`` and the receiver's the ``receive``. That is why ranks cannot wait for each other in a
circle, whatever the schedule and the skips: of all transfers that are not done take the first. Both
its ranks have done everything that comes before it, so that it can be done, even if every transmit
waits for its receive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import fx

from fxpipe import ops
from fxpipe.ir._torch import OuterModule
from fxpipe.ir.graph import CARRIED, HOME, ORIGIN, STAGE, attribute, where
from fxpipe.runtime.ranks.transport import Edge
from passes.to_rank.carried import carried

TRANSPORT = "transport"  # the name of the input through which a rank is given its transport


@dataclass(frozen=True)
class Project:
    """Step graph, or graph after pass "microbatch" → the graph of one rank.

    The rank's graph has one input more, ahead of the others: the transport that carries values to
    other ranks and back (see :func:`fxpipe.ops.transmit`). What the caller does, such as cutting
    inputs into micro-batches, is done by every rank that needs it. Outputs are put together by the
    rank of the last stage.

    Seeds are those of rank 0. The other ranks draw as many, and use none of theirs: so default
    generators that are alike ahead of a step are alike behind it, and what the script draws next (a
    permutation of the data, noise) is the same on all ranks.

    Args:
        ranks: the rank of each stage.
        rank: the rank whose graph is made.
        everywhere: whether all ranks get the output. If not, the rank of the last stage gets it,
            and the others return None.
    """

    name: ClassVar[str] = "project"
    ranks: tuple[int, ...]
    rank: int
    everywhere: bool = True

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        transfers = Crossings(gm.graph, self.ranks, self.everywhere)
        return _RankWriter(gm, transfers, self.rank).written()


@dataclass
class Crossing:
    """The transfer of a value along an edge, which is a pair of ranks: (sender, receiver).

    ``value`` is a node of the graph of all stages, or the whole output of that graph; ``node`` is
    the node behind which the transfer has its place. ``number`` counts the transfers of the edge,
    from 0.
    """

    node: fx.Node
    value: Any
    edge: Edge
    number: int = -1


class Crossings:
    """Finds which nodes of a graph each rank runs, and which values go from rank to rank."""

    def __init__(self, graph: fx.Graph, ranks: tuple[int, ...], everywhere: bool) -> None:
        self.graph, self.ranks = graph, ranks
        self.count = 1 + max(ranks)
        self.output = graph.output_node()
        self.owners = {node: self._owner(node) for node in graph.nodes}
        self.receivers = range(self.count) if everywhere else (ranks[-1],)  # of the output
        self.done_by = [self._done_by(rank) for rank in range(self.count)]
        self.behind: dict[fx.Node, list[Crossing]] = {}
        self._number()

    def _owner(self, node: fx.Node) -> int | None:
        """The rank that runs a node; None if every rank that needs its value runs it."""
        if node.op == "get_attr":
            for user in node.users:
                if HOME in user.meta:  # it is a parameter that is brought to another stage
                    return self.ranks[int(user.meta[HOME])]
        if STAGE in node.meta:
            return self.ranks[int(node.meta[STAGE])]
        if node.target is ops.seeds:
            return 0
        if node.target in (ops.average, ops.total, ops.gather):
            return self.ranks[-1]
        return None

    def _done_by(self, rank: int) -> set[fx.Node]:
        """The nodes that a rank runs: those it owns, and those without an owner that it needs."""
        found: set[fx.Node] = set()
        for node in reversed(self.graph.nodes):
            if node is self.output:
                if rank in self.receivers and self.sent_whole(rank) is None:
                    found.add(node)
            elif self.owners[node] == rank:
                found.add(node)
            elif self.owners[node] is None:
                users = (user for user in node.users if user in found)
                if any(node in self.needed_by(user, rank) for user in users):
                    found.add(node)
        return found

    def needed_by(self, node: fx.Node, rank: int) -> list[fx.Node]:
        """The inputs whose values a rank needs in order to run a node.

        Tapes never travel, though two kinds of nodes have tapes of other ranks among their inputs,
        which are left out here. The loss takes the tapes of all stages, to find parameters of
        theirs that the loss contains. A backward may take the loss's, only to come after the loss.
        """

        def is_here(source: fx.Node) -> bool:
            return self.owners[source] in (None, rank)

        if node.target is ops.loss:
            inputs = [n for n in node.all_input_nodes if n not in node.args[4]]  # type: ignore[operator]
            return [*inputs, *filter(is_here, node.args[4])]  # type: ignore[arg-type]
        if node.target in (ops.backward, ops.backward_input) and len(node.args) == 3:
            after = node.args[2]
            return [n for n in node.all_input_nodes if n is not after or is_here(n)]
        return node.all_input_nodes

    def sent_whole(self, rank: int) -> int | None:
        """The other rank that has the whole output, and sends it at once; None if there is none."""
        owners = {self.owners[node] for node in self.output.all_input_nodes}
        owner = owners.pop() if len(owners) == 1 else None
        return owner if owner != rank else None

    def _number(self) -> None:
        found: dict[tuple[fx.Node, int], Crossing] = {}
        for rank, done in enumerate(self.done_by):
            for node in done:
                for source in self.needed_by(node, rank):
                    owner = self.owners[source]
                    if owner is not None and owner != rank:
                        found[source, rank] = Crossing(source, source, (owner, rank))
            owner = self.sent_whole(rank) if rank in self.receivers else None
            if owner is not None:
                output = self.output.args[0]
                found[self.output, rank] = Crossing(self.output, output, (owner, rank))
        places = {node: i for i, node in enumerate(self.graph.nodes)}
        numbers: Counter[Edge] = Counter()
        for _, transfer in sorted(found.items(), key=lambda item: (places[item[0][0]], item[0][1])):
            transfer.number = numbers[transfer.edge]
            numbers[transfer.edge] += 1
            self.behind.setdefault(transfer.node, []).append(transfer)

    @cached_property
    def edges(self) -> dict[Edge, int]:
        """The edges, in order, and how many transfers each has."""
        every = (transfer for transfers in self.behind.values() for transfer in transfers)
        return dict(sorted(Counter(transfer.edge for transfer in every).items()))


class _RankWriter:
    """Writes the graph of one rank."""

    def __init__(self, gm: fx.GraphModule, transfers: Crossings, rank: int) -> None:
        self.gm, self.transfers, self.rank = gm, transfers, rank
        self.graph = fx.Graph()
        self.transport = self.graph.placeholder(TRANSPORT)
        self.own: dict[fx.Node, fx.Node] = {}  # the rank's nodes, by the given ones
        self.receives: dict[fx.Node, fx.Node] = {}  # by the node whose value is received
        self.modules: dict[str, fx.Node] = {}  # stages of other ranks, in place of their tapes

    def written(self) -> fx.GraphModule:
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                self.own[node] = self.graph.node_copy(node)
            elif node.op != "output" and node in self.transfers.done_by[self.rank]:
                self._copy(node)
            elif node.target is ops.seeds:
                self._call(ops.seeds, node.args, "unused_seeds", node)
            for transfer in self.transfers.behind.get(node, ()):
                self._write(transfer)
        self._return()
        targets = {str(n.target) for n in self.graph.nodes if n.op in ("get_attr", "call_module")}
        attributes = {target: attribute(self.gm, target) for target in targets}
        return OuterModule(attributes, self.graph)

    def _copy(self, node: fx.Node) -> None:
        needed = self.transfers.needed_by(node, self.rank)
        args, kwargs = node.args, node.kwargs
        if node.target is ops.loss:
            *first, tapes = args
            assert isinstance(tapes, tuple)
            here = (n if n in needed else self._elsewhere(n, node) for n in tapes)
            args = (*first, tuple(here))
        elif node.target in (ops.backward, ops.backward_input) and args[2:]:
            args = args if args[2] in needed else args[:2]
        args, kwargs = fx.map_arg((args, kwargs), lambda n: self._value(n, node))
        made = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        made.meta = dict(node.meta)
        self.own[node] = made

    def _value(self, source: fx.Node, user: fx.Node) -> fx.Node:
        """The node of this rank for a value; one that comes from elsewhere arrives ahead of its
        first user."""
        if source.graph is self.graph:
            return source
        if source not in self.own:
            received = self.receives[source]
            self.own[source] = self._call(ops.arrived, (received,), f"arrived_{source}", user)
            received.meta |= self.own[source].meta
        return self.own[source]

    def _elsewhere(self, tape: Any, user: fx.Node) -> fx.Node:
        """The node that the loss takes in place of the tape of a stage of another rank."""
        forward = tape.args[0]
        assert isinstance(forward, fx.Node) and isinstance(forward.args[0], fx.Node)
        path = str(forward.args[0].target)
        if path not in self.modules:
            module = self.graph.create_node("get_attr", path, name=f"{path}_module")
            self.modules[path] = self._call(ops.elsewhere, (module,), f"{path}_elsewhere", user)
        return self.modules[path]

    def _write(self, transfer: Crossing) -> None:
        source, target = transfer.edge
        name, args = transfer.node.name, (transfer.edge, transfer.number)
        if self.rank == source:
            value = fx.map_arg(transfer.value, lambda n: self._value(n, transfer.node))
            sent = (self.transport, value, *args)
            made = self._call(ops.transmit, sent, f"transmit_{name}", transfer.node)
        elif self.rank == target:
            made = self._call(ops.receive, (self.transport, *args), f"receive_{name}")
            self.receives[transfer.node] = made
        else:
            return
        made.meta |= {ORIGIN: name, CARRIED: carried(self.gm, transfer.value)}

    def _call(
        self, function: Any, args: tuple[Any, ...], name: str, beside: fx.Node | None = None
    ) -> fx.Node:
        """Add a call, which runs where the node ``beside`` does."""
        node = self.graph.create_node("call_function", function, args, name=name)
        if beside is not None:
            node.meta = where(beside)
        return node

    def _return(self) -> None:
        output = self.transfers.output
        result: Any = None
        if output in self.receives:
            result = self._value(output, output)
        elif self.rank in self.transfers.receivers:
            result = fx.map_arg(output.args[0], lambda n: self._value(n, output))
        self.graph.output(result)


def transfers_of(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes of a rank's graph that transmit or receive, in order."""
    return (node for node in gm.graph.nodes if node.target in (ops.transmit, ops.receive))


def edge_of(node: fx.Node) -> tuple[Edge, int]:
    """The edge of a node that transmits or receives, and the number of the transfer on it."""
    edge, number = node.args[-2:]
    return edge, number  # type: ignore[return-value]
