from __future__ import annotations

import random

import numpy as np
import pytest

from passes.partition.cut.dag import OUTSIDE, Dag, Kept, Machine, Value, Way, prices
from tests.passes.partition.cut.random_dags import Case, costs, labellings, random_case, row


def test_a_value_visits_the_stages_of_its_users_in_order():
    dag = row(1, 1, 1, 1, values=(Value(0, (1, 2, 3), 10, 20),))
    found = prices(dag, Machine(3, bandwidth=np.full((3, 3), 10.0)), [0, 0, 1, 2])
    assert found.sent == 20, "0 -> 1 and 1 -> 2, ten bytes each"
    assert found.link.tolist() == [2, 4, 2], "the stage between receives and sends on"


def test_what_the_caller_gives_is_free_as_far_as_its_first_user():
    dag = row(1, 1, 1, values=(Value(OUTSIDE, (0, 2), 10, 10),))
    assert prices(dag, Machine(2), [0, 0, 1]).sent == 10
    assert prices(dag, Machine(1), [0, 0, 0]).sent == 0


def test_links_that_are_hidden_behind_computation_cost_nothing():
    dag = row(4, 4, values=(Value(0, (1,), 3, 3),))
    slow = np.ones((2, 2))
    assert prices(dag, Machine(2, bandwidth=slow), [0, 1]).slowest == 4
    assert prices(dag, Machine(2, bandwidth=slow / 2), [0, 1]).slowest == 6, "links are the limit"


def test_latency_is_for_each_tensor():
    dag = row(0, 0, values=(Value(0, (1,), 3, 3, count=2),))
    assert prices(dag, Machine(2, latency=np.full((2, 2), 0.5)), [0, 1]).slowest == 1


def test_memory_that_several_nodes_keep_is_there_once_in_each_of_their_stages():
    dag = row(1, 1, 1, kept=(Kept((0, 1, 2), 10),), fixed=np.array([1.0, 2, 4]))
    assert prices(dag, Machine(2), [0, 0, 1]).memory.tolist() == [13, 14]
    half = Machine(2, ways=(Way(held=0.5),))
    assert prices(dag, half, [0, 0, 1]).memory.tolist() == [8, 9]


def test_times_may_differ_from_stage_to_stage():
    dag = Dag(np.array([[1.0, 1.0], [3.0, 3.0]]))
    assert prices(dag, Machine(2), [0, 1]).times.tolist() == [1, 3]


def test_an_edge_against_the_order_is_refused():
    with pytest.raises(ValueError, match="edge 1 -> 0: number the nodes in a topological order"):
        row(1, 1, values=(Value(1, (0,)),))


def test_a_matrix_of_the_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"bandwidth has shape \(3, 3\): 2 stages need \(2, 2\)"):
        Machine(2, bandwidth=np.ones((3, 3)))


@pytest.mark.parametrize("seed", range(50))
def test_prices_are_as_defined(seed):
    rng = random.Random(seed)
    case = random_case(rng)
    every = list(labellings(Case(case.dag, case.machine)))
    for labels in rng.sample(every, min(5, len(every))):
        found = prices(case.dag, case.machine, labels)
        slowest, sent, fits = costs(case, labels)
        if fits:
            assert found.slowest == pytest.approx(slowest)
        assert found.dislike == pytest.approx(sent)
        assert found.fits(case.machine) == fits


def test_what_comes_once_stays_with_its_gradient_on_every_device_it_is_brought_to():
    dag = Dag(np.ones((1, 4)), (Value(0, (1, 2, 3), size=8, volume=16, once=True),))
    stage = (0, 0, 1, 2)
    assert list(prices(dag, Machine(3, ways=(Way(held=0.0),)), stage).memory) == [0, 16, 16]
    checkpointed = Machine(3, ways=(Way(received=1.0),))
    assert list(prices(dag, checkpointed, stage).memory) == [0, 16, 16], "not with each micro-batch"
    apart = np.array([[0, 1, 0], [1, 0, 1], [0, 1, 0]])  # stages 0 and 2 are on one device
    assert list(prices(dag, Machine(3, apart=apart), stage).memory) == [0, 16, 0]
