from __future__ import annotations

import random

import numpy as np
import pytest

from passes.partition.cut.coarsen import (
    around,
    coarsened,
    depth_first,
    orders,
    rows,
    without_pendants,
)
from passes.partition.cut.contract import contracted
from passes.partition.cut.dag import Dag, Value
from tests.passes.partition.cut.random_dags import random_dag


def branches(length: int) -> Dag:
    """One node, two rows of so many, one node."""
    left, right = range(1, length + 1), range(length + 1, 2 * length + 1)
    values = [Value(0, (left[0], right[0]))]
    for branch in left, right:
        values += [Value(i, (i + 1,)) for i in branch[:-1]]
        values.append(Value(branch[-1], (2 * length + 1,)))
    return Dag(np.ones((1, 2 * length + 2)), tuple(values))


@pytest.mark.parametrize("seed", range(20))
def test_orders_are_topological(seed):
    dag = random_dag(random.Random(seed), 30)
    found = orders(dag)
    assert len(found) > 3
    for order in found:
        assert sorted(order) == list(range(30))
        place = {v: i for i, v in enumerate(order)}
        assert all(place[u] < place[v] for u, v in dag.edges)


def test_depth_first_follows_a_branch_to_its_end():
    assert depth_first(branches(3)) == [0, 1, 2, 3, 4, 5, 6, 7]


def test_rows_become_one_node_and_branches_stay_apart():
    dag = branches(10)
    small, home = contracted(dag, rows(dag, 4, [None] * dag.size))
    assert small.size == 2 + 2 * 2, "each branch is ten of 22 nodes: two pieces"
    assert {home[v] for v in range(1, 11)}.isdisjoint(home[v] for v in range(11, 21))


@pytest.mark.parametrize("seed", range(10))
def test_pieces_are_of_about_equal_weight_and_make_no_circles(seed):
    dag = random_dag(random.Random(seed), 300)
    clusters = coarsened(dag, depth_first(dag), 20, [None] * 300)
    assert 20 <= len(set(clusters)) <= 45
    small, _ = contracted(dag, clusters)
    assert small.size == len(set(clusters)), "none had to be joined to another"


def test_nodes_with_different_pins_stay_apart():
    dag = branches(3)
    parts = [0, None, None, None, None, None, None, 1]
    clusters = coarsened(dag, range(8), 1, parts)
    assert len(set(clusters)) == 3


def test_near_the_boundaries_the_graph_stays_as_it_is():
    n = 1000
    dag = Dag(np.ones((1, n)), tuple(Value(i, (i + 1,)) for i in range(n - 1)))
    small, home = around(dag, [int(i >= 500) for i in range(n)], range(n), fine=4)
    assert small.size < 80
    assert len({home[i] for i in range(497, 503)}) == 6
    assert home[250] == home[251]


def test_light_nodes_at_the_fringe_go_with_their_neighbours():
    seconds = np.array([[5.0, 5, 5, 0.001, 0.001, 0.001, 4]])
    dag = Dag(seconds, (Value(0, (1,)), Value(1, (2, 3)), Value(3, (4,)), Value(2, (6,))))
    assert without_pendants(dag, 0.01, ()) == [0, 1, 2, 1, 1, 5, 6]
    assert without_pendants(dag, 0.01, (4,)) == list(range(7)), "then 3 is between two others"
    assert without_pendants(dag, 0.0, ()) == list(range(7))
