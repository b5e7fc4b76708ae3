"""Clusters become nodes, and cost what their nodes cost."""

from __future__ import annotations

import random

import numpy as np
import pytest

from passes.partition.cut.contract import contracted, grouped
from passes.partition.cut.dag import Machine, Value, Way, prices
from tests.passes.partition.cut.random_dags import random_dag, row


def test_groups_become_one_node_and_what_lies_between_them_too():
    dag = row(1, 2, 4, 8, values=(Value(0, (1,)), Value(1, (2,)), Value(2, (3,))))
    small, home = contracted(dag, grouped(4, [(0, 2)]))
    assert home == [0, 0, 0, 1], "1 needs 0 and is needed by 2"
    assert small.seconds.tolist() == [[7, 8]]


def test_parallel_values_become_one():
    dag = row(1, 1, 1, values=(Value(0, (2,), 1, 2), Value(1, (2,), 10, 20)))
    small, _ = contracted(dag, [0, 0, 2])
    assert small.values == (Value(0, (1,), 11, 22, 2),)


@pytest.mark.parametrize("seed", range(30))
def test_a_cut_of_the_clusters_costs_what_the_same_cut_of_the_nodes_costs(seed):
    rng = random.Random(seed)
    dag = random_dag(rng, 12)
    small, home = contracted(dag, grouped(12, [rng.sample(range(12), 2) for _ in range(3)]))
    machine = Machine(3, bandwidth=np.full((3, 3), 2.0), ways=(Way(received=1.0),))
    for _ in range(5):
        stage = sorted(rng.randrange(3) for _ in range(small.size))  # by topological order
        coarse = prices(small, machine, stage)
        fine = prices(dag, machine, [stage[h] for h in home])
        assert np.allclose(coarse.times, fine.times)
        assert np.allclose(coarse.memory, fine.memory)
        assert coarse.sent == pytest.approx(fine.sent)
