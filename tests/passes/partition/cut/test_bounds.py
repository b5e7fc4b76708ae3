from __future__ import annotations

import random

import numpy as np
import pytest

from passes.partition.cut.bounds import gap, lower_bound
from passes.partition.cut.dag import Dag, Machine, Value
from tests.passes.partition.cut.random_dags import Case, costs, labellings, random_dag, random_more


def row(*seconds: float) -> Dag:
    values = tuple(Value(i, (i + 1,)) for i in range(len(seconds) - 1))
    return Dag(np.array([seconds], dtype=float), values)


def test_work_is_shared_out_at_best():
    assert lower_bound(Dag(np.ones((1, 6))), Machine(3)) == pytest.approx(2)


def test_the_largest_node_is_in_some_stage():
    assert lower_bound(row(1, 9, 1, 1), Machine(3)) == 9


def test_what_comes_before_or_after_all_others_is_not_divided():
    assert lower_bound(row(2, 2, 2), Machine(2)) == pytest.approx(4, rel=1e-5), "not 3"


def test_what_lies_beside_others_may_be():
    beside = Dag(np.array([[2.0, 2, 2, 2]]), (Value(0, (1, 2)), Value(1, (3,)), Value(2, (3,))))
    assert lower_bound(beside, Machine(2)) == pytest.approx(4)


def test_faster_stages_take_more():
    dag = Dag(np.array([[1.0] * 6, [2.0] * 6]))
    assert lower_bound(dag, Machine(2)) == pytest.approx(4), (
        "four on the fast one, two on the other"
    )


def test_what_a_stage_takes_beside_its_nodes_counts():
    assert lower_bound(row(*[1.0] * 8), Machine(2, more=[0, 2])) == pytest.approx(5)
    assert lower_bound(row(*[1.0] * 8), Machine(2, more=[0, 20])) == 21
    assert lower_bound(row(3, 3), Machine(2, more=[0, 2])) == pytest.approx(5), "not 4"
    assert lower_bound(row(1, 1, 9), Machine(3, more=[0, 0, 4])) == pytest.approx(13), "not 9"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(150))
def test_no_cut_is_better(seed):
    rng = random.Random(seed)
    k = rng.randint(2, 4)
    dag = random_dag(rng, rng.randint(k, 8), edges=rng.choice([0.5, 2.0]), rows=rng.choice([1, k]))
    case = Case(dag, Machine(k, more=rng.choice([None, random_more(rng, k)])))
    best = min(costs(case, labels)[0] for labels in labellings(case))
    assert lower_bound(dag, case.machine) <= best * (1 + 1e-9)


def test_the_gap_is_a_fraction_of_the_bound():
    assert gap(11, 10) == pytest.approx(0.1)
    assert gap(0, 0) == 0
