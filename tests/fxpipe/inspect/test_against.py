"""A measured step beside the predicted one, in sentences."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxpipe.inspect.against import against, factor, is_off, microbatches_of
from fxpipe.schedule import Span, StageCost, Timeline, named, simulate


def step(*seconds: float, chunks: int = 2, loss: float = 0.0) -> Timeline:
    """A step whose stages, and loss, take so long for the forward of a micro-batch."""
    costs = [StageCost(each, each, each) for each in seconds]
    costs[-1] = replace(costs[-1], loss=loss)
    return simulate(named("gpipe", lanes=len(seconds), microbatches=chunks), costs)


def test_it_says_by_which_factor_the_step_and_each_stage_are_longer():
    predicted, measured = step(1e-3, 1e-3), step(3e-3, 5e-3)
    first, second = against(predicted, measured, measured, ["cuda:0", "cuda:1"])
    times = measured.makespan / predicted.makespan
    assert f", {times:.3g} times as long as predicted." in first
    assert "Its stages work 48.0 ms in all, 4 times the 12.0 ms that are predicted" in second
    assert "(stage 0 3, stage 1 5)" in second
    assert factor(predicted, measured) == pytest.approx(4) and is_off(predicted, measured)
    assert not is_off(predicted, step(1.2e-3, 1.2e-3))


def test_a_stage_that_does_hardly_anything_is_left_out():
    predicted, measured = step(1e-3, 0.0, 1e-6), step(3e-3, 1e-3, 1e-3)
    _, second, *_ = against(predicted, measured, measured, ["cuda:0", "cuda:1", "cuda:2"])
    assert "are predicted (stage 0 3)." in second


def test_of_many_stages_it_names_those_that_differ_least_and_most():
    predicted, measured = step(*[1e-3] * 6), step(*(1e-3 * i for i in (3, 2, 3, 4, 9, 4)))
    _, second = against(predicted, measured, measured, [f"cuda:{i}" for i in range(6)])
    assert "(from 2 (stage 1) to 9 (stage 4))" in second


def test_lanes_that_share_a_device_are_named():
    one = step(1e-3, 1e-3)
    *_, last = against(one, one, one, ["cpu", "cpu"])
    assert "2 lanes share cpu: what one of them takes, the others lack" in last


def test_what_no_stage_takes_is_between_the_actions():
    one = step(1e-3, 1e-3)
    late = [replace(s, start=s.start + 9e-3, end=s.end + 9e-3) for s in one.spans if s.lane]
    measured = replace(one, spans=(*(s for s in one.spans if not s.lane), *late))
    *_, last = against(one, measured, one, ["cuda:0", "cuda:1"])
    assert "the other 7.0 ms" in last and "pass between the actions" in last


def test_steps_are_measured_without_the_optimizer_that_is_predicted():
    costs = [StageCost(1e-3, 1e-3, 1e-3, update=5e-3)] * 2
    predicted = simulate(named("gpipe", lanes=2, microbatches=2), costs)
    measured = step(1e-3, 1e-3)
    first, *others, last = against(predicted, measured, predicted, ["cuda:0", "cuda:1"])
    assert "it was 9.0 ms, without a step of the optimizer: 1 times the 9.0 ms that are" in first
    assert not any("between the actions" in sentence for sentence in others)
    assert "pipe.timeline() predicts 14.0 ms" in last and "and 9.0 ms without it" in last


def test_the_loss_is_said_by_itself():
    one = step(1e-3, 1e-3)
    measured = replace(one, spans=(*one.spans, Span(1, 0.0, 2e-3, None, "loss")))
    assert factor(one, measured) == pytest.approx(1), "the loss is no work of a stage"
    *_, last = against(one, measured, one, ["cuda:0", "cuda:1"])
    assert "The loss and its backward take 2.0 ms, of which the prediction knows nothing: " in last
    predicted = step(1e-3, 1e-3, loss=0.5e-3)
    *_, last = against(predicted, measured, predicted, ["cuda:0", "cuda:1"])
    assert last == ("The loss and its backward take 2.0 ms, 2 times the 1.0 ms that are predicted.")


def test_micro_batches_are_counted():
    assert microbatches_of(step(1.0, chunks=5)) == 5
