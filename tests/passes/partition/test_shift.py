"""A shift takes nodes from one stage to another, along all stages between them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from passes.partition.cut.dag import Dag, Machine
from passes.partition.problem import CutProblem
from passes.partition.shift import Shift

BEFORE = [0, 0, 0, 0, 1, 1, 2, 2, 2]


def shifted(source, target, size, pins=None, home=None, before=BEFORE):
    """The stages of a chain of nodes, each of which takes one byte, after a shift."""
    home = home or list(range(len(before)))
    n = 1 + max(home)
    dag = Dag(np.ones((1, n)), order=tuple((i, i + 1) for i in range(n - 1)), fixed=np.ones(n))
    work = [SimpleNamespace(name=f"node_{i}") for i in range(len(before))]
    shift = Shift({f"node_{i}": s for i, s in enumerate(before)}, source, target, size)
    machine = Machine(1 + max(before), memory=np.full(1 + max(before), 9.0))
    return list(shift.apply(CutProblem(work, dag, dag, home), machine, pins or {}))


def test_stages_on_the_way_pass_on_as_much_as_they_get():
    assert shifted(0, 2, 2) == [0, 0, 1, 1, 2, 2, 2, 2, 2]
    assert shifted(2, 0, 1) == [0, 0, 0, 0, 0, 1, 1, 2, 2]


def test_a_node_goes_whole():
    assert shifted(0, 1, 0.5) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(("source", "target"), [(0, 2), (2, 0), (1, 2), (1, 0)])
def test_a_stage_keeps_a_node(source, target):
    assert set(shifted(source, target, 100)) == {0, 1, 2}


def test_a_pinned_node_stays_and_so_does_what_lies_behind_it():
    assert shifted(0, 1, 3, pins={2: 0}) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_nodes_that_stay_together_go_together():
    home = [0, 1, 2, 2, 3, 4]
    assert shifted(0, 1, 1, home=home, before=[0, 0, 0, 0, 1, 1]) == [0, 0, 1, 1, 1]
