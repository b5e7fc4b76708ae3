"""Not a pass: what the cut of a model graph has to solve, as a weighted DAG.

::

    model graph                                   DAG
    conv ─ bn ─ relu_ ─ getitem ...               0 ─ 1 ─ 2 ...   seconds, bytes, order

Beside the data edges the DAG has edges of order, so that any cut of it is as good as one that is
contiguous in the program:

- what reads memory comes no later than what writes to it afterwards: the two may be apart, but not
  in the wrong order;
- three gradients or more of a value are summed from that of the last user to that of the first, and
  a sum of floats depends on the order. So users come in the order of the program, but for the last
  two (if each gives one gradient): the first sum that is formed is theirs, and ``a + b`` is
  ``b + a``. Every cut then gives the bits that the model gives.

A shared parameter (pass "shared") is in one node with its first user, where it lives; to others it
is brought once for all micro-batches (pass "tied").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch import Tensor, fx

from fxpipe import ops
from fxpipe.ir.cost import Cost, batch_bytes
from fxpipe.ir.devices import DeviceSpec
from fxpipe.ir.graph import ALIAS, COST, SAME_AS, SAVED, VALUE, WRITES, is_work, stage_nodes
from fxpipe.ir.printing import operator_name
from fxpipe.ir.tensors import tensors_of
from passes.cost.analytic import edges_to, relative_time
from passes.partition.cut.contract import contracted, grouped
from passes.partition.cut.dag import OUTSIDE, Dag, Kept, Machine, Value

OBJECTIVES: Mapping[str, Callable[[Cost], float]] = {
    "time": lambda cost: cost.seconds,
    "memory": lambda cost: cost.fixed_bytes + cost.activation_bytes,
    "activations": lambda cost: cost.activation_bytes,
    "params": lambda cost: cost.param_bytes,
    "flops": lambda cost: cost.flops + cost.backward_flops,
}
"""What the cut makes even: the largest sum of a stage is as small as can be."""


class PartitionError(ValueError):
    """A model cannot be cut as asked."""


@dataclass(frozen=True)
class CutProblem:
    """A model graph as a DAG of what may be in different stages.

    ``home`` says which node of ``dag`` each node of ``whole`` (and of ``work``) belongs to.
    """

    work: list[fx.Node]
    whole: Dag
    dag: Dag
    home: list[int]

    def labels(self, stage: Sequence[int]) -> dict[fx.Node, int]:
        """The stages of the graph's nodes."""
        return {node: stage[home] for node, home in zip(self.work, self.home, strict=True)}


def problem(
    graph: fx.Graph,
    objective: str = "time",
    *,
    devices: Sequence[DeviceSpec] | None = None,
    groups: Iterable[Sequence[fx.Node]] = (),
    recomputed: float = 0.0,
    in_order: bool = False,
) -> CutProblem:
    """The DAG of a model graph with costs.

    Args:
        objective: which of :data:`OBJECTIVES` the stages are to have equally.
        devices: of the stages. Times are those of the first, and the others are as much faster
            or slower, node by node, as their descriptions say.
        groups: further groups of nodes that stay in one stage.
        recomputed: which part of the forward is run a second time.
        in_order: only cuts that leave the graph's order as it is.
    """
    work = list(stage_nodes(graph))
    position = {node: i for i, node in enumerate(work)}
    costs: list[Cost] = [node.meta[COST] for node in work]
    weights = np.array([[OBJECTIVES[objective](cost) for cost in costs]], dtype=np.float64)
    if objective == "time" and recomputed:
        weights = weights + recomputed * np.array([[cost.forward_s for cost in costs]])
    if objective == "time" and devices is not None and len(set(devices)) > 1:
        weights = weights * np.array(
            [[relative_time(node, device, devices[0]) for node in work] for device in devices]
        )
    saved, kept = _saved(work, costs)
    reads = ((position[a], position[b]) for a, b in reads_before_writes(work))
    sums = ((position[a], position[b]) for a, b in order_of_sums(graph))
    whole = Dag(
        seconds=weights,
        values=tuple(_values(graph, position)),
        order=tuple(pairwise(range(len(work))))
        if in_order
        else tuple(dict.fromkeys((*reads, *sums))),
        fixed=np.array([cost.fixed_bytes for cost in costs], dtype=np.float64),
        saved=saved,
        kept=kept,
    )
    joined = [
        [position[node] for node in group]
        for group in (*together(work), *_at_first_users(work), *groups)
    ]
    dag, home = contracted(whole, grouped(len(work), joined))
    return CutProblem(work, whole, dag, home)


def machine(
    devices: Sequence[DeviceSpec] | int,
    *,
    chunks: int = 1,
    checkpoint: str = "never",
    live: Sequence[float] | None = None,
    placement: Sequence[int] | None = None,
) -> Machine:
    """The machine that stages on these devices are; for a mere number of them, one without limits.

    Every value but a shared parameter crosses a link once for each micro-batch. Each stage keeps
    the activations of as many micro-batches as are ``live`` there at once; None: of all. With
    ``checkpoint`` it keeps what it receives of them, and the activations of one micro-batch:
    "except_last" of the last, "always" of the one that is computed again. Between stages of one
    number in ``placement``, which are on one device, nothing has to travel.
    """
    if isinstance(devices, int):
        return Machine(devices)
    k = len(devices)
    where = np.arange(k) if placement is None else np.asarray(placement)
    is_here = where[:, None] == where
    bandwidth = np.array(
        [[min(a.link_bytes_per_s, b.link_bytes_per_s) for b in devices] for a in devices]
    )
    latency = np.array(
        [[max(a.link_latency_s, b.link_latency_s) for b in devices] for a in devices]
    )
    limits = [np.inf if device.memory is None else device.memory for device in devices]
    alive = np.ones(k) if live is None else np.asarray(live) / chunks
    kept, one, none = alive, np.full(k, 1 / chunks), np.zeros(k)
    held, received = (kept, none) if checkpoint == "never" else (one, kept)
    return Machine(
        k,
        bandwidth=np.where(is_here, np.inf, bandwidth),
        latency=np.where(is_here, 0.0, chunks * latency),
        memory=np.array(limits),
        held=held,
        received=received,
        apart=np.where(is_here, 0.0, 1.0),
    )


def _values(graph: fx.Graph, position: Mapping[fx.Node, int]) -> Iterable[Value]:
    for node in graph.nodes:
        if node.op not in ("get_attr", "output"):
            users = tuple(sorted(position[user] for user in node.users if user in position))
            tensors = tensors_of(node.meta.get(VALUE))
            size = batch_bytes(node)
            is_once = node.target is ops.share
            count = 0 if is_once else len(tensors)  # latency is that of all micro-batches
            if users:
                source = position.get(node, OUTSIDE)
                yield Value(
                    source, users, size, size + batch_bytes(node, trained=True), count, is_once
                )


def reads_before_writes(work: Iterable[fx.Node]) -> Iterable[tuple[fx.Node, fx.Node]]:
    """Pairs of a node that reads memory and one that writes to it later."""
    position = {node: i for i, node in enumerate(work)}
    by_name = {node.name: node for node in position}
    for writer in position:
        for name in writer.meta.get(WRITES, ()):
            for reader in by_name[name].users if name in by_name else ():
                if reader in position and position[reader] < position[writer]:
                    yield reader, writer


def order_of_sums(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Pairs of users of one value, of which the first may not be in a later stage than the second:
    then the gradients of the value are summed in the model's order.

    The gradient that the caller gives for an output always comes first. An input may have users
    that are not seen here: where a stage is cut in segments, other stages. A node that returns a
    tensor as it came passes on all gradients of what it returns.
    """
    work = list(stage_nodes(graph))
    position = {node: i for i, node in enumerate(work)}
    edges = {node: edges_to(node) for node in work}
    received: dict[fx.Node, int] = {}  # how many gradients what a node gives gets

    def given(user: fx.Node, node: fx.Node) -> int:
        """The number of gradients that a node gets from a user."""
        count = edges[user][node]
        if node.name not in user.meta.get(SAME_AS, ()):
            return count
        return received.get(user, 0) + (0 if isinstance(user.meta[VALUE], Tensor) else count)

    for node in reversed(graph.nodes):
        if node.op == "output" or not any(
            t.requires_grad for t in tensors_of(node.meta.get(VALUE))
        ):
            continue
        in_order = sorted((n for n in node.users if n in position), key=position.__getitem__)
        users = {user: count for user in in_order if (count := given(user, node))}
        others = node.op == "placeholder" or any(user.op == "output" for user in node.users)
        received[node] = sum(users.values()) + others
        if received[node] < 3:
            continue
        is_free = not others and all(count == 1 for count in list(users.values())[-2:])
        ordered = list(users)
        yield from pairwise(ordered[:-1] if is_free else ordered)
        if is_free:
            yield ordered[-3], ordered[-1]


def _saved(
    work: Sequence[fx.Node], costs: Sequence[Cost]
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], tuple[Kept, ...]]:
    """Bytes that each node alone keeps for the backward, and memory that several nodes keep."""
    saved = np.zeros(len(work))
    keepers: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    for i, (node, cost) in enumerate(zip(work, costs, strict=True)):
        if SAVED not in node.meta:
            saved[i] = cost.activation_bytes
        for memory, size in node.meta.get(SAVED, ()):
            keepers.setdefault(memory, []).append(i)
            sizes[memory] = size
    kept = []
    for memory, nodes in keepers.items():
        if len(nodes) == 1:
            saved[nodes[0]] += sizes[memory]
        else:
            kept.append(Kept(tuple(nodes), float(sizes[memory])))
    return saved, tuple(kept)


def _at_first_users(work: Iterable[fx.Node]) -> Iterable[list[fx.Node]]:
    """Shared parameters, each with the first of its users."""
    position = {node: i for i, node in enumerate(work)}
    for node in position:
        if node.target is ops.share:
            users = [user for user in node.users if user in position]
            yield [node, *sorted(users, key=position.__getitem__)[:1]]


def together(work: Iterable[fx.Node]) -> Iterable[list[fx.Node]]:
    """Groups of nodes that stay in one stage: alias sets; what takes a result apart, and its maker.

    Stages hand each other tensors: a tuple is taken apart where it is made.
    """
    aliases: dict[int, list[fx.Node]] = {}
    for node in work:
        if ALIAS in node.meta:
            aliases.setdefault(node.meta[ALIAS], []).append(node)
        if operator_name(node) == "getitem":
            maker = node.all_input_nodes[0]
            if is_work(maker) and not isinstance(maker.meta.get(VALUE), Tensor):
                yield [maker, node]
    yield from aliases.values()
