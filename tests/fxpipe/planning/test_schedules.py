"""The schedule of a plan decides what is alive at once, and how the lanes' memory is shared."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.ir.cost import Cost
from fxpipe.planning.estimates import estimated_costs
from fxpipe.schedule import Kind, live, named
from tests.fxpipe.planning.plans import FREE_LINKS, even, on_meta


def test_a_schedule_decides_what_is_alive_at_once():
    gpipe, one_f_one_b = even(), even(schedule="1f1b")
    assert one_f_one_b.seconds == pytest.approx(gpipe.seconds) == pytest.approx((8 + 3) / 8 * 2)
    assert one_f_one_b.partition == gpipe.partition
    kept = [stage.activation_bytes for stage in gpipe.stages]
    alive = [4 / 8, 3 / 8, 2 / 8, 1 / 8]
    expected = [size * part for size, part in zip(kept, alive, strict=True)]
    assert [stage.activation_bytes for stage in one_f_one_b.stages] == expected
    assert one_f_one_b.memory == tuple(stage.memory for stage in one_f_one_b.stages)


def test_a_model_that_only_fits_in_another_order_is_planned_in_that():
    short = FREE_LINKS.with_memory(0.75 * even().memory[0])
    with pytest.raises(fxpipe.DoesNotFit):
        even(devices=[short] * 4)
    assert even(devices=[short] * 4, schedule="1f1b").fits
    assert even(devices=[short] * 4, schedule="auto").fits
    tiny = FREE_LINKS.with_memory(0.1 * even().memory[0])
    assert not even(devices=[tiny] * 4, schedule="auto", partition=["2", "4", "6"]).fits


def test_a_device_with_several_stages_holds_all_of_them():
    plan = even(devices=[FREE_LINKS] * 2, schedule="interleaved_1f1b")
    assert [stage.lane for stage in plan.stages] == [0, 1, 0, 1]
    of_one = [
        stage.activation_bytes / count
        for stage, count in zip(plan.stages, live(plan.schedule).stages, strict=True)
    ]
    alive = live(plan.schedule, of_one).lanes
    state = [sum(s.state_bytes for s in plan.stages if s.lane == lane) for lane in (0, 1)]
    value, weight = 512 * 32 * 4 / 8, 32 * 32 * 4  # of a micro-batch
    running = [m - a - b for m, a, b in zip(plan.memory, alive, state, strict=True)]
    # The gradient that the stage is given, and that of a layer's input; the first lane also has a
    # result that waits.
    assert running == pytest.approx([3 * value + weight, 2 * value + weight])
    assert plan.bubble < even(devices=[FREE_LINKS] * 2).bubble
    assert "1 cpu core" in str(plan)


def test_stages_that_share_a_device_are_given_parts_of_its_memory():
    layers = (nn.Linear(3, 3) for _ in range(9))
    model, x = on_meta(nn.Sequential(*layers), torch.zeros(8, 3))
    # By time stages 0 and 2, which are on the first device, have 7 of the 9 layers.
    times = [1 / 3] * 3 + [1] + [1 / 4] * 4 + [1]
    costs = dict(zip((name for name, _ in model.named_children()), times, strict=True))

    def planned(memory):
        return fxpipe.plan(
            model,
            [FREE_LINKS.with_memory(memory)] * 2,
            example_inputs=x,
            chunks=4,
            costs=costs,
            schedule="interleaved_1f1b",
        )

    roomy = planned(None)
    assert [len(stage.nodes) for stage in roomy.stages] == [3, 1, 4, 1]
    limit = 0.8 * max(roomy.memory)
    assert planned(limit).fits
    with pytest.raises(fxpipe.DoesNotFit, match="device 0 needs"):
        planned(limit / 4)


def test_the_schedule_that_is_searched_for_is_no_slower():
    known = [even(schedule=name).seconds for name in ("gpipe", "1f1b", "zb_h1")]
    assert even(schedule="auto").seconds <= min(known) * (1 + 1e-9)


def test_a_schedule_for_something_else_is_refused():
    other = named("1f1b", lanes=4, microbatches=6)
    with pytest.raises(ValueError, match="has 6 micro-batches, and chunks is 8: give the same"):
        even(schedule=other)
    with pytest.raises(ValueError, match="has 4 lanes and 4 stages, and there are 3 devices"):
        even(schedule=other, devices=[FREE_LINKS] * 3)


def test_a_plan_divides_the_backward_of_a_checkpointed_stage_as_the_pipeline_does():
    plan = even(schedule="zb_h1", checkpoint="always")
    seconds = {
        kind: span.seconds
        for span in plan.timeline.of_lane(1)  # nobody waits for the halves of lane 0: they are one
        for kind in Kind
        if span.action is not None and span.action.kind is kind
    }
    # Costs are 1 s a layer: a third is the forward, two thirds the backward, of two layers here.
    forward, half = 2 / 3 / 8, 2 / 3 / 8
    assert seconds[Kind.FORWARD] == pytest.approx(forward)
    assert seconds[Kind.RECOMPUTE] == pytest.approx(forward)
    assert seconds[Kind.BACKWARD_INPUT] == pytest.approx(half)
    assert seconds[Kind.WEIGHT_GRAD] == pytest.approx(half)
    (of_the_pipeline,) = estimated_costs([Cost(2 / 3, 4 / 3)], 8, "always")
    for kind, taken in seconds.items():
        assert of_the_pipeline.seconds(kind) == pytest.approx(taken)
