from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from passes.partition.cut.dag import Dag, Value
from passes.partition.cut.downsets import all_downsets, downsets_near, members, prefixes, united
from tests.passes.partition.cut.random_dags import random_dag


def is_downset(dag: Dag, row: np.ndarray) -> bool:
    return all(row[u] or not row[v] for u, v in dag.edges)


@pytest.mark.parametrize("seed", range(40))
def test_they_are_all_found_and_each_once(seed):
    dag = random_dag(random.Random(seed), 8)
    expected = {
        bits
        for bits in itertools.product([False, True], repeat=8)
        if is_downset(dag, np.array(bits))
    }
    family = all_downsets(dag, 1 << 8)
    found = [tuple(row) for row in family.tolist()]
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_a_long_row_has_one_more_than_nodes():
    n = 200  # more than fit a machine word
    dag = Dag(np.ones((1, n)), tuple(Value(i, (i + 1,)) for i in range(n - 1)))
    family = all_downsets(dag, 1000)
    assert sorted(family.sum(axis=1).tolist()) == list(range(n + 1))
    assert (family == prefixes(range(n))[family.sum(axis=1)]).all()


def test_where_there_are_too_many_there_are_none():
    apart = Dag(np.ones((1, 20)))
    assert all_downsets(apart, 1 << 19) is None
    assert len(all_downsets(apart, 1 << 20)) == 1 << 20


@pytest.mark.parametrize("seed", range(20))
def test_those_near_one_are_downsets_and_it_is_among_them(seed):
    rng = random.Random(seed)
    dag = random_dag(rng, 40)
    downset = prefixes(range(40))[20]
    family = downsets_near(dag, downset, 100, rng)
    assert 1 < len(family) <= 100
    assert all(is_downset(dag, row) for row in family)
    assert members(family, downset[None, :]).sum() == 1


def test_a_union_has_each_once_the_small_ones_first():
    family = united(prefixes([0, 1, 2]), prefixes([1, 0, 2]))
    assert family.tolist() == [
        [False, False, False],
        *sorted([[True, False, False], [False, True, False]], reverse=True),
        [True, True, False],
        [True, True, True],
    ]
