"""Random DAGs and machines, and the cost of a cut as its definition says, for tests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from passes.partition.cut.dag import OUTSIDE, Dag, Kept, Machine, Unit, Value, Way


@dataclass(frozen=True)
class Case:
    dag: Dag
    machine: Machine
    pins: dict[int, int] = field(default_factory=dict)


def random_dag(rng: random.Random, n: int, *, edges: float = 1.5, rows: int = 1) -> Dag:
    """Of ``n`` nodes; a node uses so many values on average, mostly of what was made shortly
    before. A value may have many users, and some come from outside."""
    users: dict[int, set[int]] = {OUTSIDE: {0}}
    for v in range(1, n):
        for _ in range(min(v, int(rng.expovariate(1 / edges)) + (rng.random() < 0.8))):
            source = rng.randrange(max(0, v - 6), v) if rng.random() < 0.8 else rng.randrange(v)
            users.setdefault(source, set()).add(v)
        if rng.random() < 0.1:
            users[OUTSIDE].add(v)
    base = np.array([rng.choice([0.0, 1.0, 2.0, 5.0, rng.random() * 10]) for _ in range(n)])
    speeds = [[rng.choice([1.0, 1.0, 0.5, 2.0])] for _ in range(rows)]
    values = []
    for source, found in users.items():
        size = float(rng.randrange(8))
        volume = size * rng.choice([1, 2])
        users_of = tuple(sorted(found))
        is_once = source != OUTSIDE and rng.random() < 0.15
        values.append(Value(source, users_of, size, volume, rng.choice([1, 1, 2]), is_once))
    order = [tuple(sorted(rng.sample(range(n), 2))) for _ in range(rng.choice([0, 0, 1]))]
    kept = [
        Kept(
            tuple(sorted(rng.sample(range(n), rng.randint(2, min(n, 4))))), float(rng.randrange(4))
        )
        for _ in range(rng.choice([0, 0, 1, 2]))
    ]
    units = [
        Unit(
            tuple(sorted(rng.sample(range(n), rng.randint(2, min(n, 4))))), rng.choice([1.0, 50.0])
        )
        for _ in range(rng.choice([0, 0, 1, 3]))
    ]
    part = np.array([rng.choice([0.0, 0.3, 0.5]) for _ in range(n)])
    forward = base * np.array(speeds) * part
    return Dag(
        kept=tuple(kept),
        units=tuple(units),
        seconds=base * np.array(speeds),
        forward=forward,
        again=forward * np.array([rng.choice([0.0, 0.2, 1.0]) for _ in range(n)]),
        values=tuple(values),
        order=tuple(order),
        fixed=np.array([float(rng.randrange(5)) for _ in range(n)]),
        saved=np.array([float(rng.randrange(5)) for _ in range(n)]),
        products=np.array([float(rng.randrange(3)) for _ in range(n)]),
    )


def random_case(rng: random.Random) -> Case:
    n, k = rng.randint(2, 9), rng.randint(2, 4)
    dag = random_dag(rng, n, rows=rng.choice([1, k]))
    options = {}
    if rng.random() < 0.6:
        alike = rng.random() < 0.5
        options["bandwidth"] = np.full((k, k), 2.0)
        options["latency"] = np.full((k, k), 0.25)
        if not alike:
            for i, j in itertools.product(range(k), repeat=2):
                options["bandwidth"][i, j] = rng.choice([0.5, 1, 4])
                options["latency"][i, j] = rng.choice([0, 1])
    if rng.random() < 0.3:
        share = (dag.fixed.sum() + dag.saved.sum()) / k
        options["memory"] = np.array([share * rng.choice([1, 1.5, 2]) for _ in range(k)])
        held = np.array([rng.choice([0.5, 1.0]) for _ in range(k)])
        ways = [Way(held, rng.choice([0.0, 0.5]), rng.choice([0.0, 1.0]))]
        ways += [
            Way(held * rng.choice([0.25, 0.5]), rng.choice([0.0, 0.5]), rng.choice([0.5, 1.0]))
            for _ in range(rng.choice([0, 1, 2]))
        ]
        if rng.random() < 0.4:
            part = rng.choice([0.25, 0.5])
            ways.append(Way(held * part, rng.choice([0.0, 0.5]), selective=1.0, products=part))
        if rng.random() < 0.5:
            bytes_of = [np.array([rng.choice([-1.0, 0.0, 2.0]) for _ in range(k)]) for _ in ways]
            ways = [replace(way, beside=b) for way, b in zip(ways, bytes_of, strict=True)]
        options["ways"] = tuple(ways)
    pins = {rng.randrange(n): rng.randrange(k)} if rng.random() < 0.15 else {}
    if rng.random() < 0.3:
        options["more"] = random_more(rng, k)
    if rng.random() < 0.3:
        options["idle_below"] = rng.choice([1.0, 2.0, 5.0])
        options["idle_penalty"] = rng.choice([3.0, 1000.0])
    return Case(dag, Machine(k, **options), pins)


def random_more(rng: random.Random, k: int) -> np.ndarray:
    """Seconds that stages take beside those of their nodes."""
    return np.array([rng.choice([0.0, 0.0, 3.0, 20.0]) for _ in range(k)])


def labellings(case: Case) -> Iterator[tuple[int, ...]]:
    """All of them: every node no earlier than what it needs, no stage empty, as memory allows."""
    dag, k = case.dag, case.machine.stages

    def following(labels: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        node = len(labels)
        if node == dag.size:
            if len(set(labels)) == k:
                yield labels
            return
        least = max((labels[u] for u, v in dag.edges if v == node), default=0)
        for stage in [case.pins[node]] if node in case.pins else range(least, k):
            if stage >= least:
                yield from following((*labels, stage))

    return following(())


def costs(case: Case, labels: Sequence[int]) -> tuple[float, float, bool]:
    """Slowest stage, bytes sent and penalties, and whether it fits, straight from the
    definition."""
    dag, m = case.dag, case.machine
    k = m.stages
    seconds, forward, again, link, sent = [0.0] * k, [0.0] * k, [0.0] * k, [0.0] * k, 0.0
    fixed, saved, products, taken_in = [0.0] * k, [0.0] * k, [0.0] * k, [0.0] * k
    for node, s in enumerate(labels):
        seconds[s] += dag.seconds[s if len(dag.seconds) > 1 else 0][node]
        forward[s] += dag.forward[s if len(dag.seconds) > 1 else 0][node]
        again[s] += dag.again[s if len(dag.seconds) > 1 else 0][node]
        products[s] += dag.products[node]
        fixed[s] += dag.fixed[node]
        saved[s] += dag.saved[node]
    for kept in dag.kept:
        for s in {labels[node] for node in kept.nodes}:
            saved[s] += kept.size
    for value in dag.values:
        at = None if value.source == OUTSIDE else labels[value.source]
        for target in sorted({labels[user] for user in value.users}):
            if target == at:
                continue
            if value.once:
                fixed[target] += value.volume
            else:
                taken_in[target] += value.size
            if at is not None:
                time = value.volume / m.bandwidth[at][target] + value.count * m.latency[at][target]
                link[at] += time
                link[target] += time
                sent += value.size
            at = target
    for unit in dag.units:
        sent += unit.penalty * len({labels[node] for node in unit.nodes})
    sent += m.idle_penalty * sum(m.more[s] + seconds[s] < m.idle_below for s in range(k))
    slowest, fits = 0.0, True
    for s in range(k):
        room = [
            m.more[s] + seconds[s] + of["again"][s] * forward[s] + of["selective"][s] * again[s]
            for of in ({f.name: way.of(f.name, k) for f in fields(way)} for way in m.ways)
            if fixed[s]
            + of["held"][s] * saved[s]
            + of["received"][s] * taken_in[s]
            + of["products"][s] * products[s]
            + of["beside"][s]
            <= m.memory[s] * (1 + 1e-9)
        ]
        fits &= bool(room)
        slowest = max(slowest, link[s], min(room, default=0.0))
    return slowest, sent, fits


def row(*seconds: float, **options) -> Dag:
    """Nodes that take these seconds."""
    return Dag(np.array([seconds], dtype=float), **options)
