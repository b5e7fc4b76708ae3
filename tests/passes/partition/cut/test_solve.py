from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from passes.partition.cut.bounds import lower_bound
from passes.partition.cut.dag import Dag, Machine, Value, prices
from passes.partition.cut.solve import QUICK, Effort, solve, solve_in_order, tightest
from tests.passes.partition.cut.random_dags import costs, labellings, random_case, random_dag

NEAR = 1e-9


@pytest.mark.one_in(20)
@pytest.mark.parametrize("seed", range(1000))
def test_the_exact_path_finds_what_trying_all_labellings_finds(seed):
    rng = random.Random(seed)
    case, slack = random_case(rng), rng.choice([0.0, 0.0, 0.1])
    every = [costs(case, labels) for labels in labellings(case)]
    every = [(slowest, sent) for slowest, sent, fits in every if fits]
    cut = solve(case.dag, case.machine, pins=case.pins, slack=slack)
    if not every:
        assert cut is None
        return
    best = min(slowest for slowest, _ in every)
    least = min(sent for slowest, sent in every if slowest <= best * (1 + slack) * (1 + NEAR))
    assert cut.is_exact
    slowest, sent, fits = costs(case, cut.stage)
    assert fits
    assert cut.stage in labellings(case)
    assert slowest <= best * (1 + slack) * (1 + NEAR)
    assert sent == least
    assert cut.prices.slowest == pytest.approx(slowest)
    assert cut.prices.dislike == sent
    assert cut.bound == pytest.approx(best)
    assert cut.gap <= slack + NEAR


def alike(stages: int, rng: random.Random) -> Machine:
    """With links that cost nothing, or that do."""
    if rng.random() < 0.5:
        return Machine(stages)
    return Machine(stages, bandwidth=np.full((stages, stages), 2.0))


@pytest.mark.parametrize("seed", range(25))
def test_without_the_exact_path_cuts_are_nearly_as_good(seed):
    rng = random.Random(seed)
    dag = random_dag(rng, rng.randint(16, 24), edges=1.5)
    machine = alike(rng.choice([2, 3, 4]), rng)
    exact = solve(dag, machine, effort=Effort(downsets=10**6, work=1e12))
    other = solve(dag, machine, effort=Effort(downsets=0))
    assert exact.is_exact
    assert not other.is_exact
    assert other.bound <= exact.bound * (1 + NEAR)
    assert exact.prices.slowest <= other.prices.slowest * (1 + NEAR)
    assert other.prices.slowest <= 1.1 * exact.prices.slowest


def ladder(n: int) -> Dag:
    """A row with a skip over eight nodes at every fourth, and some long ones."""
    rng = random.Random(0)
    users = {v: {v + 1} for v in range(n - 1)}
    for v in range(0, n - 8, 4):
        users[v].add(v + 8)
    for v in range(0, n - n // 4, 50):
        users[v].add(v + n // 4)
    values = tuple(Value(v, tuple(sorted(us)), 1.0, 2.0) for v, us in users.items())
    return Dag(np.array([[rng.random() for _ in range(n)]]), values)


@pytest.mark.parametrize("n", [1000, 20_000])
def test_large_graphs_are_cut_nearly_evenly(n):
    cut = solve(ladder(n), Machine(4), slack=0.02)
    assert cut.gap <= 0.02
    edges = ladder(n).edges
    assert all(cut.stage[u] <= cut.stage[v] for u, v in edges)
    assert set(cut.stage) == {0, 1, 2, 3}


def wide_with_pins(rng: random.Random, n: int, stages: int) -> tuple[Dag, dict[int, int]]:
    """Rows of nodes side by side, of which each comes to an end in a stage of its own, so that no
    order of all nodes has each stage in one piece; and the stages of some of the nodes."""
    users: dict[int, set[int]] = {}
    labels = list[int]()
    for v in range(n):
        sources = [v - 10] if v >= 10 else []
        if sources and rng.random() < 0.1:
            sources.append(rng.randrange(v))
        for source in sources:
            users.setdefault(source, set()).add(v)
        least = max((labels[u] for u in sources), default=0)
        labels.append(min(stages - 1, least + (rng.random() < 0.15)))
    values = tuple(Value(v, tuple(sorted(us)), 1.0, 2.0) for v, us in users.items())
    dag = Dag(np.array([[rng.random() for _ in range(n)]]), values)
    first = {stage: labels.index(stage) for stage in range(stages)}
    pins = {v: labels[v] for v in range(n) if rng.random() < 0.4 or first[labels[v]] == v}
    return dag, pins


@pytest.mark.parametrize("n", [150, 700])
@pytest.mark.parametrize("seed", range(4))
def test_a_cut_that_keeps_the_pins_is_found_if_there_is_one(n, seed):
    dag, pins = wide_with_pins(random.Random(seed), n, 4)
    cut = solve(dag, Machine(4), pins=pins, effort=Effort(downsets=0))
    assert {node: cut.stage[node] for node in pins} == pins
    assert all(cut.stage[u] <= cut.stage[v] for u, v in dag.edges)


def test_pins_that_no_cut_keeps_are_seen_at_once():
    dag = ladder(2000)
    assert solve(dag, Machine(4), pins={10: 2, 500: 1}) is None


def test_a_large_graph_keeps_its_pins():
    pins = {0: 0, 400: 2, 1999: 3}
    cut = solve(ladder(2000), Machine(4), pins=pins)
    assert {node: cut.stage[node] for node in pins} == pins


def test_the_cut_in_order_is_contiguous():
    dag = ladder(3000)
    stage = solve_in_order(dag, Machine(3))
    assert list(stage) == sorted(stage)
    assert prices(dag, Machine(3), stage).slowest <= 1.01 * lower_bound(dag, Machine(3))


def test_the_same_graph_is_always_cut_the_same():
    cuts = {solve(random_dag(random.Random(3), 60), Machine(4)).stage for _ in range(3)}
    assert len(cuts) == 1


def test_with_little_effort_more_stages_may_be_asked_for_than_downsets_are_looked_at():
    dag, machine = ladder(260), Machine(QUICK.near + 20)
    cut = solve(dag, machine, effort=QUICK)
    assert cut is not None and len(set(cut.stage)) == machine.stages


def test_fewer_nodes_than_stages_cannot_be_cut():
    assert solve(random_dag(random.Random(0), 3), Machine(4)) is None


@pytest.mark.parametrize("seed", range(10))
def test_a_large_graph_that_only_fits_with_an_uneven_cut_is_cut_so(seed):
    """One device has little memory: time alone would cut otherwise."""
    rng = random.Random(seed)
    dag = replace(ladder(600), saved=np.full(600, 1.0))
    small = rng.randrange(3)
    memory = np.where(np.arange(3) == small, 60.0, 300.0)
    machine = Machine(3, memory=memory)
    cut = solve(dag, machine)
    assert cut.prices.fits(machine)
    assert cut.prices.slowest > lower_bound(dag, machine)


def test_what_cannot_fit_by_a_bound_is_not_searched_for(monkeypatch):
    monkeypatch.setattr("passes.partition.cut.solve.Search", None)
    dag = replace(ladder(600), saved=np.full(600, 1.0))
    assert solve(dag, Machine(3, memory=np.full(3, 199.0))) is None


def test_the_tightest_cut_shows_what_is_short():
    dag = Dag(np.ones((1, 4)), fixed=np.array([4.0, 4, 4, 4]))
    machine = Machine(2, memory=np.array([4.0, 8.0]))
    assert solve(dag, machine) is None
    stage = tightest(dag, machine)
    assert prices(dag, machine, stage).memory.tolist() in ([4, 12], [8, 8])


def test_counters_beside_the_graph_do_not_keep_it_from_being_solved_exactly():
    """Each of them may be before or after any cut: 2 ** 40 downsets."""
    n = 60
    row = tuple(Value(i, (i + 1,), 1.0, 1.0) for i in range(n - 1))
    rng = random.Random(0)
    seconds = [rng.random() for _ in range(n)] + [1e-5] * 40
    dag = Dag(np.array([seconds]), row)
    cut = solve(dag, Machine(4))
    assert cut.is_exact
    plain = solve(Dag(np.array([seconds[:n]]), row), Machine(4))
    assert cut.bound == pytest.approx(plain.prices.slowest)
    assert cut.gap < 1e-3
