"""Cuts that keep pins: see the picture in :mod:`passes.partition.cut.pins`."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from passes.partition.cut.dag import Dag, Value
from passes.partition.cut.pins import cut_by_pins, stages_allowed
from tests.passes.partition.cut.random_dags import labellings, random_case


def rows(*lengths: int) -> Dag:
    """Rows of nodes side by side, numbered row by row, of which each takes a second."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    row = [range(start, start + n) for start, n in zip(starts, lengths, strict=True)]
    values = tuple(Value(u, (v,)) for nodes in row for u, v in pairwise(nodes))
    return Dag(np.ones((1, sum(lengths))), values)


def test_a_node_comes_after_those_ahead_of_it_and_before_those_behind() -> None:
    earliest, latest = stages_allowed(rows(4, 4), {0: 0, 3: 2, 5: 1}, 3)
    assert earliest == [0, 0, 0, 2, 0, 1, 1, 1]
    assert latest == [0, 2, 2, 2, 1, 1, 2, 2]


def test_pins_that_no_cut_keeps() -> None:
    assert stages_allowed(rows(3), {0: 1, 2: 0}, 2) is None
    assert cut_by_pins(rows(3), {0: 1, 2: 0}, 2) is None


def test_what_pins_leave_open_is_about_even() -> None:
    assert cut_by_pins(rows(6), {}, 3) == (0, 0, 1, 1, 2, 2)
    assert cut_by_pins(rows(6), {1: 1, 5: 2}, 3) == (0, 1, 1, 1, 2, 2)


def test_no_stage_is_empty() -> None:
    assert cut_by_pins(rows(3), {0: 2, 2: 2}, 3) is None


@pytest.mark.parametrize("seed", range(100))
def test_what_is_found_is_a_cut_wherever_there_are_cuts_but_for_empty_stages(seed: int) -> None:
    case = random_case(random.Random(seed))
    cuts = set(labellings(case))
    found = cut_by_pins(case.dag, case.pins, case.machine.stages)
    if found is None:
        allowed = stages_allowed(case.dag, case.pins, case.machine.stages)
        assert allowed is None or not cuts or len(set(allowed[0])) < case.machine.stages
    else:
        assert found in cuts
