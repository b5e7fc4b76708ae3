from __future__ import annotations

import random

import pytest

from passes.cut.solve import solve
from tests.passes.cut.random_dags import costs, labellings, random_case

NEAR = 1e-9


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
    assert cut.prices.sent == sent
    assert cut.bound == pytest.approx(best)
    assert cut.gap <= slack + NEAR
