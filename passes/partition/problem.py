"""The problem of cutting a model graph into stages, which pass "partition" solves as one of cutting
a weighted DAG.

::

    model graph                                   DAG
    conv ─ bn ─ relu_ ─ getitem ...               0 ─ 1 ─ 2 ...   seconds, bytes, order

In a valid cut no edge of the DAG leads from a later stage to an earlier one. Beside the data edges
the DAG has edges that only keep an order, so that every valid cut gives the bits that the model
gives:

- A node that reads memory has an edge to a node that writes to that memory later in the program:
  they may be in different stages, but the reader may not be in the later one.
- The users of a value have edges in the order of the program if there are three or more. Autograd
  sums the gradients of a value from that of the last user to that of the first, and a sum of floats
  depends on its order. The last two users need no edge between them (if each gives one gradient),
  since the first sum that is formed is theirs, and ``a + b`` equals ``b + a``.

A shared parameter (pass "shared") forms one node of the DAG with its first user, in whose stage it
lives. It is sent to other stages once for all micro-batches (pass "tied").
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
from fxpipe.schedule import Schedule
from passes.common.modes import AUTO, SELECTIVE, Modes, alive, moved, of_stages, recomputed
from passes.common.segments import Segments, counts, ways
from passes.cost.analytic import edges_to, relative_time
from passes.partition.cut.contract import contracted, grouped
from passes.partition.cut.dag import OUTSIDE, Dag, Kept, Machine, Value, Way

OBJECTIVES: Mapping[str, Callable[[Cost], float]] = {
    "time": lambda cost: cost.seconds,
    "memory": lambda cost: cost.fixed_bytes + cost.activation_bytes,
    "activations": lambda cost: cost.activation_bytes,
    "params": lambda cost: cost.param_bytes,
    "flops": lambda cost: cost.flops + cost.backward_flops,
}
"""The quantities that a cut can balance, by name. A stage has the sum of its nodes' quantities; the
cut makes the largest sum of all stages as small as possible."""


Beside = Sequence[Sequence[float]]
"""For each way in which stages may keep what their backward needs, the bytes that each of them
needs beside."""


class PartitionError(ValueError):
    """A model cannot be cut into stages as the user has asked; the message says why."""


@dataclass(frozen=True)
class CutProblem:
    """A model graph as a DAG to be cut.

    ``work`` has the nodes of the graph that stages consist of, and ``whole`` is the DAG of these.
    In ``dag`` nodes that have to stay in one stage are contracted to one node: ``home`` says, for
    each node of ``whole``, to which node of ``dag`` it belongs.
    """

    work: list[fx.Node]
    whole: Dag
    dag: Dag
    home: list[int]

    def labels(self, stage: Sequence[int]) -> dict[fx.Node, int]:
        """The stage of each node of the graph, from the stages of the nodes of ``dag``."""
        return {node: stage[home] for node, home in zip(self.work, self.home, strict=True)}


def problem(
    graph: fx.Graph,
    objective: str = "time",
    *,
    devices: Sequence[DeviceSpec] | None = None,
    groups: Iterable[Sequence[fx.Node]] = (),
    in_order: bool = False,
) -> CutProblem:
    """The problem of cutting a model graph whose nodes have costs.

    Args:
        objective: which of :data:`OBJECTIVES` the cut balances.
        devices: the devices of the stages. Costs are times on the first of them; for the others
            they are scaled, node by node, as the descriptions of the devices say.
        groups: further groups of nodes that have to stay in one stage.
        in_order: whether only cuts are allowed that are contiguous in the graph's order.
    """
    work = list(stage_nodes(graph))
    position = {node: i for i, node in enumerate(work)}
    costs: list[Cost] = [node.meta[COST] for node in work]
    weights = np.array([[OBJECTIVES[objective](cost) for cost in costs]], dtype=np.float64)
    is_time = objective == "time"
    forward = np.array([[cost.forward_s for cost in costs]]) * is_time
    again = np.array([[cost.selective_s for cost in costs]]) * is_time
    if objective == "time" and devices is not None and len(set(devices)) > 1:
        relative = np.array(
            [[relative_time(node, device, devices[0]) for node in work] for device in devices]
        )
        weights, forward, again = weights * relative, forward * relative, again * relative
    saved, kept = _saved(work, costs)
    reads = ((position[a], position[b]) for a, b in reads_before_writes(work))
    sums = ((position[a], position[b]) for a, b in order_of_sums(graph))
    whole = Dag(
        seconds=weights,
        forward=forward,
        again=again,
        values=tuple(_values(graph, position)),
        order=tuple(pairwise(range(len(work))))
        if in_order
        else tuple(dict.fromkeys((*reads, *sums))),
        fixed=np.array([cost.fixed_bytes for cost in costs], dtype=np.float64),
        saved=saved,
        products=np.array([cost.product_bytes for cost in costs], dtype=np.float64),
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
    checkpoint: Modes = "never",
    order: Schedule | None = None,
    placement: Sequence[int] | None = None,
    segments: Segments = 1,
    beside: Beside = (),
    loss: float = 0.0,
    exposed: float = 1.0,
) -> Machine:
    """The machine on which the stages run, with its links and limits of memory.

    Args:
        devices: the device of each stage; a mere number of stages stands for a machine whose
            devices are alike, without limits and with links that cost nothing.
        chunks: the number of micro-batches. Every value that crosses a link does so once for each
            of them, except shared parameters.
        checkpoint: as for :func:`fxpipe.compile`. A stage keeps the activations of micro-batches
            that are not checkpointed, and of the one whose forward is being computed again; of the
            others that are under way it keeps the inputs that it receives. For "auto" the ways of
            the machine are all modes, with all ``segments``, as
            :func:`passes.common.segments.ways` lists them; "offload" is one of them if the devices
            have a link to the memory of a host, and "selective" if stages run there operator by
            operator.
        order: the order of a training step, which decides how many micro-batches are under way at
            once at each stage; None: it may be all of them.
        placement: for each stage the number of its device. Between stages on one device nothing has
            to travel. None: each stage has a device of its own.
        segments: as ``checkpoint_segments`` of :func:`fxpipe.compile`.
        beside: for each way of the machine, the bytes that each stage needs beside those that it is
            known to keep. Empty: none.
        loss: the seconds that the loss of a mini-batch and its backward take in the last stage.
        exposed: the part of the time of recomputing that counts. The rest passes while a device
            would wait for others.
    """
    k = devices if isinstance(devices, int) else len(devices)
    specs = () if isinstance(devices, int) else devices
    hosts = [spec.host_bytes_per_s for spec in specs] or [None] * k
    is_eager = all(spec.is_eager for spec in specs)
    found = []
    for i, (modes, numbers) in enumerate(ways(checkpoint, segments, any(hosts), is_eager)):
        parts = counts(numbers, modes, k)
        own = of_stages(modes, k)
        if checkpoint == AUTO:  # where there is no memory of the host, nothing moves
            pairs = zip(own, hosts, strict=True)
            own = ["never" if moved(mode) and not host else mode for mode, host in pairs]
        held, received = (np.asarray(n) / chunks for n in alive(own, chunks, k, order, parts))
        moving = np.array([moved(mode) for mode in own])
        is_selective = np.array([float(mode == SELECTIVE) for mode in own])
        again = np.array([recomputed(mode, chunks) for mode in own]) - is_selective
        _, under_way = alive(own, chunks, k, order)  # how many micro-batches wait to be recomputed
        products = is_selective * np.asarray(under_way) / chunks
        needed = np.asarray(beside[i]) if beside else 0.0
        again, partly = exposed * again, exposed * is_selective
        found.append(Way(held, received, again, moving, partly, products, needed))
    more = np.array([0.0] * (k - 1) + [loss])
    if isinstance(devices, int):
        return Machine(k, ways=tuple(found), more=more)
    where = np.arange(k) if placement is None else np.asarray(placement)
    is_here = where[:, None] == where
    bandwidth = np.array(
        [[min(a.link_bytes_per_s, b.link_bytes_per_s) for b in devices] for a in devices]
    )
    latency = np.array(
        [[max(a.link_latency_s, b.link_latency_s) for b in devices] for a in devices]
    )
    limits = [np.inf if device.memory is None else device.memory for device in devices]
    return Machine(
        k,
        bandwidth=np.where(is_here, np.inf, bandwidth),
        latency=np.where(is_here, 0.0, chunks * latency),
        memory=np.array(limits),
        ways=tuple(found),
        apart=np.where(is_here, 0.0, 1.0),
        host=np.array([1 / rate if rate else 0.0 for rate in hosts]),
        more=more,
    )


def _values(graph: fx.Graph, position: Mapping[fx.Node, int]) -> Iterable[Value]:
    for node in graph.nodes:
        if node.op not in ("get_attr", "output"):
            users = tuple(sorted(position[user] for user in node.users if user in position))
            tensors = tensors_of(node.meta.get(VALUE))
            size = batch_bytes(node)
            is_once = node.target is ops.share
            count = 0 if is_once else len(tensors)  # how many latencies of the link it costs
            if users:
                source = position.get(node, OUTSIDE)
                yield Value(
                    source, users, size, size + batch_bytes(node, trained=True), count, is_once
                )


def reads_before_writes(work: Iterable[fx.Node]) -> Iterable[tuple[fx.Node, fx.Node]]:
    """Pairs of a node that reads memory and a node that writes to that memory later in the
    program: the reader must not be in a later stage than the writer."""
    position = {node: i for i, node in enumerate(work)}
    by_name = {node.name: node for node in position}
    for writer in position:
        for name in writer.meta.get(WRITES, ()):
            for reader in by_name[name].users if name in by_name else ():
                if reader in position and position[reader] < position[writer]:
                    yield reader, writer


def order_of_sums(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Pairs of users of one value, the first of which must not be in a later stage than the second.
    If a cut respects all pairs, gradients of values are summed in the model's order.

    The gradient that the caller gives for an output always comes first in the sum. An input may get
    gradients from outside of this graph: where a stage is cut into segments, other stages may use
    the input, too. A node that returns its input unchanged passes on all gradients of its users.
    """
    work = list(stage_nodes(graph))
    position = {node: i for i, node in enumerate(work)}
    edges = {node: edges_to(node) for node in work}
    received: dict[fx.Node, int] = {}  # how many gradients the value of a node gets

    def given(user: fx.Node, node: fx.Node) -> int:
        """The number of gradients that the value of a node gets from one user."""
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
    """The saved tensors: the bytes that each node alone saves for the backward, and the memories
    that several nodes save, which count once for a stage that has any of these nodes."""
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
    """Groups of a shared parameter and its first user, in whose stage the parameter lives."""
    position = {node: i for i, node in enumerate(work)}
    for node in position:
        if node.target is ops.share:
            users = [user for user in node.users if user in position]
            yield [node, *sorted(users, key=position.__getitem__)[:1]]


def together(work: Iterable[fx.Node]) -> Iterable[list[fx.Node]]:
    """Groups of nodes that have to stay in one stage.

    These are, first, the nodes that pass "alias" has put into one group because of a write to
    memory that they share. Second, a ``getitem`` or ``getattr`` node and the node whose tuple or
    object it takes apart: what goes from stage to stage are tensors, so that several results of one
    node are taken apart where they are computed.
    """
    aliases: dict[int, list[fx.Node]] = {}
    for node in work:
        if ALIAS in node.meta:
            aliases.setdefault(node.meta[ALIAS], []).append(node)
        if operator_name(node) in ("getitem", "getattr"):
            maker = node.all_input_nodes[0]
            if is_work(maker) and not isinstance(maker.meta.get(VALUE), Tensor):
                yield [maker, node]
    yield from aliases.values()
