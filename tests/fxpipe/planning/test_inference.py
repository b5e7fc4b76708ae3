"""Plans of pipelines that only compute outputs (``training=False``)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpipe
from tests.fxpipe.planning.plans import FREE_LINKS, on_meta

WEIGHTS = 8 * (64 * 64 + 64) * 4
ROWS = 512


def layers():
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))


def planned(training=False, memory=None, **options):
    model, x = on_meta(layers(), torch.zeros(ROWS, 64))
    options = {"chunks": 4, **options}
    device = FREE_LINKS if memory is None else FREE_LINKS.with_memory(memory)
    return fxpipe.plan(model, [device] * 2, example_inputs=x, training=training, **options)


def test_a_plan_is_of_a_call_and_its_state_of_weights_alone():
    plan = planned()
    assert sum(stage.state_bytes for stage in plan.stages) == WEIGHTS
    assert [stage.activation_bytes for stage in plan.stages] == [0, ROWS * 64 * 4], "the output"
    assert plan.schedule.name == "forward" and plan.fits
    assert "a call of 4 micro-batches takes" in str(plan)
    assert "outputs" in str(plan) and "activations" not in str(plan)


def test_it_takes_the_time_of_the_forwards_only():
    there, step = planned(), planned(training=True)
    each = there.stages[0].compute_s / 4
    assert there.seconds == pytest.approx(5 * each, rel=0.01)
    assert 2.5 < step.seconds / there.seconds < 3.5, "a backward is two forwards"


def test_a_model_fits_where_its_training_does_not():
    limit = 0.5 * WEIGHTS + 5 * ROWS * 64 * 4
    plan = planned(memory=limit)
    assert plan.fits and max(plan.memory) <= limit
    with pytest.raises(fxpipe.DoesNotFit):
        planned(training=True, memory=limit)


def test_a_mode_that_is_chosen_is_that_nothing_is_recomputed():
    assert planned(checkpoint="auto").checkpoint == "never"


@pytest.mark.parametrize("costs", ["measured", "profile", {"0": 1.0}])
def test_given_and_measured_costs_are_those_of_the_forward(costs):
    model, x = layers(), torch.zeros(8, 64)
    options = {"example_inputs": (x,), "chunks": 2}
    if costs == "profile":
        with fxpipe.compile(model, ["cpu"] * 2, costs="measured", **options) as pipe:
            costs = fxpipe.Profile.of(pipe.model_graph)
            forward = sum(cost.forward_s for cost in costs.costs.values())
    plan = fxpipe.plan(model, [FREE_LINKS] * 2, costs=costs, training=False, **options)
    total = sum(stage.compute_s for stage in plan.stages)
    if isinstance(costs, dict):
        assert total == pytest.approx(1.0), "all of the seconds are the forward's"
    elif isinstance(costs, fxpipe.Profile):
        assert total == pytest.approx(forward), "the backward, which it has too, does not count"
    assert total > 0 and sum(stage.state_bytes for stage in plan.stages) == WEIGHTS
