"""The weighted DAG that is cut into stages, the machine that it is cut for, and the cost of a cut.

::

    values   a ──12 KB──┬── b          stages   0 ── 1 ── 2 ── 3
                        └── d                   a    b         d
                                       a's value goes 0 → 1 → 3: two hops, 24 KB

The DAG is made of plain arrays and tuples, and does not depend on torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ROOM = 1 + 1e-12  # bytes are sums of fractions, which differ by rounding
OUTSIDE = -1  # the source of an input of the model, which goes straight to its first user


@dataclass(frozen=True)
class Value:
    """A value that one node makes and others use: one hyperedge of the DAG.

    It visits the stages of its users in order, with one hop from each to the next. ``size`` is its
    bytes for a mini-batch, ``volume`` these and the bytes of its gradient, and ``count`` the number
    of its tensors. A value that comes ``once`` stays for all micro-batches: it takes its ``volume``
    on every device that it is brought to.
    """

    source: int
    users: tuple[int, ...]
    size: float = 0.0
    volume: float = 0.0
    count: int = 1
    once: bool = False


@dataclass(frozen=True)
class Kept:
    """Memory that several nodes keep for the backward. Each stage with any of them holds it
    once."""

    nodes: tuple[int, ...]
    size: float


@dataclass(frozen=True)
class Unit:
    """Nodes that belong together, such as those of a module. Where cuts are compared that are
    equally fast, each stage with any of them counts as ``penalty`` bytes more that are sent."""

    nodes: tuple[int, ...]
    penalty: float


@dataclass(frozen=True, eq=False)
class Dag:
    """Nodes ``0 .. n - 1`` in a topological order, that of the program.

    Args:
        seconds: ``[rows, n]``: the time of each node, one row for all stages, or one for each.
        values: the data edges.
        order: pairs ``(u, v)``: v must not be in an earlier stage than u, which gives it no value.
        forward: ``[rows, n]``: the part of ``seconds`` that the forward takes, which a stage that
            keeps less runs a second time; all zero if it is empty.
        again: ``[rows, n]``: the seconds by which a node takes longer in a stage that runs again
            with the results of products; all zero if it is empty.
        fixed: ``[n]``: bytes that a node occupies, whatever the schedule (parameters and such).
        saved: ``[n]``: bytes that a node keeps for the backward of one mini-batch.
        products: ``[n]``: bytes of the results of a node's products, for one mini-batch.
        kept: memory that several nodes keep together, which is not in ``saved``.
        units: nodes that are rather not divided among stages.
    """

    seconds: Floats
    values: tuple[Value, ...] = ()
    order: tuple[tuple[int, int], ...] = ()
    forward: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    again: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    fixed: Floats = field(default_factory=lambda: np.zeros(0))
    saved: Floats = field(default_factory=lambda: np.zeros(0))
    products: Floats = field(default_factory=lambda: np.zeros(0))
    kept: tuple[Kept, ...] = ()
    units: tuple[Unit, ...] = ()

    def __post_init__(self) -> None:
        for name in "fixed", "saved", "products":
            if not len(getattr(self, name)):
                object.__setattr__(self, name, np.zeros(self.size))
        for name in "forward", "again":
            if not getattr(self, name).size:
                object.__setattr__(self, name, np.zeros_like(self.seconds))
        for u, v in self.edges:
            if not u < v:
                raise ValueError(f"edge {u} -> {v}: number the nodes in a topological order")

    @property
    def size(self) -> int:
        """The number of nodes."""
        return int(self.seconds.shape[1])

    @cached_property
    def edges(self) -> list[tuple[int, int]]:
        """All pairs ``(u, v)`` in which v must not be in an earlier stage than u."""
        data = ((v.source, user) for v in self.values if v.source != OUTSIDE for user in v.users)
        return list(dict.fromkeys((*data, *self.order)))

    @cached_property
    def before(self) -> list[list[int]]:
        """The direct predecessors of each node."""
        found: list[list[int]] = [[] for _ in range(self.size)]
        for u, v in self.edges:
            found[v].append(u)
        return found

    @cached_property
    def after(self) -> list[list[int]]:
        """The direct successors of each node."""
        found: list[list[int]] = [[] for _ in range(self.size)]
        for u, v in self.edges:
            found[u].append(v)
        return found

    @cached_property
    def weight(self) -> Floats:
        """Each node's time on the stage that is fastest for it."""
        least: Floats = self.seconds.min(axis=0)
        return least


@dataclass(frozen=True, eq=False)
class Way:
    """How much a stage keeps for its backward, and how much it computes a second time instead. Each
    is one number for all stages, or ``[k]``.

    Args:
        held: the fraction of a mini-batch's saved bytes that is alive at one time.
        received: the fraction of the bytes that a stage receives which it keeps, as the arguments
            of a checkpoint.
        again: the fraction of its forward that a stage runs a second time.
        moved: the fraction of its saved bytes that a stage moves to the host's memory, and back.
        selective: 1 for a stage that runs again with the results of products, else 0.
        products: the fraction of the results of products that it keeps for that.
        beside: the bytes that a stage takes beside all that the DAG knows of: more than none if the
            step needs more than this while it runs, less than none if it needs less.
    """

    held: Floats | float = 1.0
    received: Floats | float = 0.0
    again: Floats | float = 0.0
    moved: Floats | float = 0.0
    selective: Floats | float = 0.0
    products: Floats | float = 0.0
    beside: Floats | float = 0.0

    def of(self, name: str, stages: int) -> Floats:
        """One of the numbers for each of the stages."""
        return np.broadcast_to(np.asarray(getattr(self, name), dtype=np.float64), (stages,))


@dataclass(frozen=True, eq=False)
class Machine:
    """The stages and the links between them.

    Args:
        stages: their number, k.
        bandwidth, latency: ``[k, k]``, bytes per second and seconds per tensor, from stage to
            stage. None: links cost nothing.
        memory: ``[k]``, bytes. None: no limit.
        ways: the ways in which a stage may keep what its backward needs. Each stage goes the one
            that takes it least time of those that its memory has room for.
        apart: ``[k, k]``: 1 where two stages are on different devices, else 0. None: all are.
        host: ``[k]``: the seconds that a byte takes to the host's memory, or back, over links that
            are used for nothing else. None: no time.
        more: ``[k]``: the seconds that a stage takes beside those of its nodes. None: none.
        idle_below: a stage that takes fewer seconds than these, when it computes nothing twice, has
            next to nothing to do.
        idle_penalty: where cuts are compared that are equally fast, each such stage counts as so
            many bytes more that are sent.
    """

    stages: int
    bandwidth: Floats | None = None
    latency: Floats | None = None
    memory: Floats | None = None
    ways: tuple[Way, ...] = (Way(),)
    apart: Floats | None = None
    host: Floats | None = None
    more: Floats | None = None
    idle_below: float = 0.0
    idle_penalty: float = 0.0

    def __post_init__(self) -> None:
        k = self.stages
        defaults: dict[str, Floats] = {
            "bandwidth": np.full((k, k), np.inf),
            "latency": np.zeros((k, k)),
            "memory": np.full(k, np.inf),
            "apart": np.ones((k, k)),
            "host": np.zeros(k),
            "more": np.zeros(k),
        }
        for name, default in defaults.items():
            given = getattr(self, name)
            value = default if given is None else np.asarray(given, dtype=np.float64)
            if value.shape != default.shape:
                raise ValueError(f"{name} has shape {value.shape}: {k} stages need {default.shape}")
            object.__setattr__(self, name, value)

    def _of_ways(self, name: str) -> Floats:
        return np.stack([way.of(name, self.stages) for way in self.ways])

    @cached_property
    def held(self) -> Floats:
        """``[ways, k]``, see :class:`Way`."""
        return self._of_ways("held")

    @cached_property
    def received(self) -> Floats:
        """``[ways, k]``, see :class:`Way`."""
        return self._of_ways("received")

    @cached_property
    def again(self) -> Floats:
        """``[ways, k]``, see :class:`Way`."""
        return self._of_ways("again")

    @cached_property
    def selective(self) -> Floats:
        """``[ways, k]``, see :class:`Way`."""
        return self._of_ways("selective")

    @cached_property
    def products(self) -> Floats:
        """``[ways, k]``, see :class:`Way`."""
        return self._of_ways("products")

    @cached_property
    def beside(self) -> Floats:
        """``[ways, k]``, see :class:`Way`."""
        return self._of_ways("beside")

    @cached_property
    def by_host(self) -> Floats:
        """``[ways, k]``: the seconds for which a byte that is saved occupies the link to the host's
        memory."""
        by_host: Floats = self._of_ways("moved") * np.asarray(self.host, dtype=np.float64)
        return by_host

    def fastest(self, dag: Dag) -> Floats:
        """``[k, n]``: the seconds of each node at each stage, if the stage goes the way that takes
        least time, whatever memory it needs."""
        rows = [s % len(dag.seconds) for s in range(self.stages)]
        more = [
            again[:, None] * dag.forward[rows] + selective[:, None] * dag.again[rows]
            for again, selective in zip(self.again, self.selective, strict=True)
        ]
        least: Floats = dag.seconds[rows] + np.min(more, axis=0)
        return least

    def hop(self, source: int, target: int, volume: float, count: int) -> float:
        """Seconds for which a transfer between two stages occupies the links of both."""
        assert self.bandwidth is not None and self.latency is not None
        return float(volume / self.bandwidth[source, target] + count * self.latency[source, target])


@dataclass(frozen=True, eq=False)
class Prices:
    """The costs of a cut. Arrays are ``[k]``, with an entry for each stage."""

    compute: Floats  # seconds; those of the way to the host, where they are more
    link: Floats  # seconds that its hops take, both directions
    times: Floats  # the longer of the two: copies run beside computation
    memory: Floats  # bytes
    needed: Floats  # ``[ways, k]``: bytes, for each way that a stage may go
    way: tuple[int, ...]  # the number of the machine's way that each stage goes
    sent: float  # bytes of all hops in the forward
    penalty: float = 0.0  # of all units, for each stage that has a part of them; of idle stages
    idle: int = 0  # how many stages have next to nothing to do

    @property
    def dislike(self) -> float:
        """By what cuts are compared that are equally fast: the less, the better."""
        return self.sent + self.penalty

    @property
    def slowest(self) -> float:
        """Seconds of the slowest stage."""
        return float(self.times.max())

    def fits(self, machine: Machine) -> bool:
        """Whether every stage has the memory that it needs."""
        return bool((self.memory <= np.asarray(machine.memory) * ROOM).all())


def route(value: Value, stage: Sequence[int]) -> list[int]:
    """The stages that a value visits, in order, its own first. Negative stages are left out."""
    users = {stage[user] for user in value.users}
    own = OUTSIDE if value.source == OUTSIDE else stage[value.source]
    return ([] if own < 0 else [own]) + sorted(s for s in users if s >= 0 and s != own)


def prices(dag: Dag, machine: Machine, stage: Sequence[int]) -> Prices:
    """The time, memory and traffic of each stage, with node ``i`` in stage ``stage[i]``.

    Nodes in stage -1 are left out. A stage for which no way has room goes the one that needs least
    memory.
    """
    k = machine.stages
    label = np.asarray(stage)
    once, forward, again = np.zeros(k), np.zeros(k), np.zeros(k)
    fixed, saved, products = np.zeros(k), np.zeros(k), np.zeros(k)
    for s in range(k):
        inside = label == s
        once[s] = dag.seconds[s % len(dag.seconds)][inside].sum()
        forward[s] = dag.forward[s % len(dag.forward)][inside].sum()
        again[s] = dag.again[s % len(dag.again)][inside].sum()
        fixed[s], saved[s] = dag.fixed[inside].sum(), dag.saved[inside].sum()
        products[s] = dag.products[inside].sum()
    link, taken_in = np.zeros(k), np.zeros(k)
    sent = 0.0
    labels: list[int] = label.tolist()
    assert machine.apart is not None and machine.memory is not None and machine.more is not None
    once += machine.more
    for kept in dag.kept:
        for s in {labels[node] for node in kept.nodes} - {OUTSIDE}:
            saved[s] += kept.size
    for value in dag.values:
        visited = route(value, labels)
        if value.source == OUTSIDE and visited:
            taken_in[visited[0]] += value.size
        for source, target in pairwise(visited):
            seconds = machine.hop(source, target, value.volume, value.count)
            link[source] += seconds
            link[target] += seconds
            sent += value.size
            if value.once:
                fixed[target] += machine.apart[visited[0], target] * value.volume
            else:
                taken_in[target] += value.size
    waiting = machine.received * taken_in + machine.products * products
    needed = fixed + machine.held * saved + waiting + machine.beside  # [ways, k]
    # What moves to the host does so beside computation.
    computed = once + machine.again * forward + machine.selective * again
    takes = np.maximum(computed, machine.by_host * saved)
    has_room = needed <= machine.memory * ROOM
    fastest, smallest = np.where(has_room, takes, np.inf).argmin(axis=0), needed.argmin(axis=0)
    way = np.where(has_room.any(axis=0), fastest, smallest)
    compute, memory = takes[way, range(k)], needed[way, range(k)]
    idle = int((once < machine.idle_below).sum())
    penalty = idle * machine.idle_penalty
    for unit in dag.units:
        penalty += unit.penalty * len({labels[node] for node in unit.nodes} - {OUTSIDE})
    times = np.maximum(compute, link)
    return Prices(compute, link, times, memory, needed, tuple(way.tolist()), sent, penalty, idle)
