"""Timelines of a step: predicted from costs, measured on the lanes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.ir.cost import Cost
from fxpipe.ir.devices import ACCELERATOR, DeviceSpec
from fxpipe.ir.graph import stage_nodes
from fxpipe.planning import estimates
from fxpipe.planning.estimates import (
    StageMemory,
    estimated_costs,
    measured_costs,
    predicted,
    stage_memory,
    step_links,
    traffic,
    with_moves,
)
from fxpipe.planning.segmented import SegmentedStage
from fxpipe.schedule import Action, Kind, Span, StageCost, Timeline, chain, joined, named
from passes.common.skips import Hop, SkipLayout
from tests.fxpipe.planning.plans import FREE_LINKS
from tests.zoo import MLP, gradients, same


def loss(output, target):
    return output.square().mean()


@pytest.fixture
def kept_only(monkeypatch):
    """Timelines show what a step keeps, as plans do, and not what it needs while it runs."""
    monkeypatch.setattr(estimates, "_running", lambda *_: None)


def test_estimates_are_those_of_a_micro_batch():
    (cost,) = estimated_costs([Cost(forward_s=4.0, backward_s=8.0)], chunks=4)
    assert cost == StageCost(1.0, 1.0, 1.0, recompute=1.0)


def test_a_checkpointed_micro_batch_recomputes_its_last_segment_ahead_of_its_backward():
    stage = Cost(forward_s=4.0, backward_s=8.0)
    (whole,) = estimated_costs([stage], 4, "except_last")
    assert whole == StageCost(1.0, 1.0, 1.0, recompute=1.0, checkpointed=3)
    (parted,) = estimated_costs([stage], 4, "always", segments=[[0.25] * 4])
    assert parted == StageCost(1.0, 1.75, 1.0, recompute=0.25, checkpointed=4)


def test_of_a_stage_that_is_run_again_in_part_its_first_segments_take_their_own_time():
    stage = Cost(forward_s=4.0, backward_s=8.0)
    (half,) = estimated_costs([stage], 4, "always 1/2", segments=[[0.75, 0.25]])
    assert half == StageCost(1.0, 1.75, 1.0, recompute=0.0, checkpointed=4)


def test_segments_take_the_time_of_their_nodes():
    """Segments save about as much as each other: here two layers and two activation functions, and
    four activation functions."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), *(nn.Tanh() for _ in range(6)))
    x = torch.randn(512, 64)
    with fxpipe.compile(model, ["cpu"], chunks=2, costs="analytic", example_inputs=(x,)) as pipe:
        (stage,) = pipe.stages
        own = [node.meta["cost"].forward_s for node in stage_nodes(stage.module.graph)]
        first, second = SegmentedStage.of(stage.module, 2).shares
    assert len(own) == 8
    assert first == pytest.approx(sum(own[:4]) / sum(own)) and first + second == pytest.approx(1)
    assert first > 0.5


def test_measured_costs_are_medians_and_the_loss_is_the_last_stages():
    def span(stage, kind, seconds, start=0.0):
        return Span(stage, start, start + seconds, Action(stage, kind, 0))

    spans = (
        *(span(0, Kind.FORWARD, s) for s in (1.0, 2.0, 9.0)),
        *(span(1, Kind.FORWARD, s) for s in (3.0, 3.0)),
        span(0, Kind.BACKWARD, 4.0),
        span(1, Kind.BACKWARD, 5.0),
        Span(1, 0.0, 0.5, None, "loss"),
        Span(1, 0.0, 0.25, None, "loss backward"),
    )
    costs = measured_costs(Timeline("t", ("a", "b"), spans), 2)
    assert [c.seconds(Kind.FORWARD) for c in costs] == [2.0, 3.5]
    assert [c.seconds(Kind.BACKWARD) for c in costs] == [4.0, 5.25]


def test_a_stage_whose_activations_move_runs_nothing_again_whatever_has_been_measured():
    """What is measured as a recomputation there is the time of waiting for the host."""
    measured = StageCost(1.0, 2.0, recompute=0.5, checkpointed=3)
    saved = 4 * [2**20] + [8]  # bytes of a mini-batch; the last tensor is too small to move
    stages = [StageMemory(0, 4 * 2**20, 0, saved=tuple(saved))] * 3
    costs = with_moves([measured] * 3, stages, 2, ("offload", "offload 1/2", "always"))
    moving = [(cost.offloaded, cost.offloaded_tensors) for cost in costs[:2]]
    assert moving == [(2 * 2**20, 4), (2**20, 2)]
    assert all(cost.recompute == cost.checkpointed == 0 for cost in costs[:2])
    assert costs[2] == measured


def predicted_on(names, layout, costs, spec=ACCELERATOR):
    schedule = named("gpipe", lanes=2, microbatches=2)
    return predicted(schedule, costs, step_links(layout, 2, [spec] * 2, names))


def test_a_prediction_counts_what_travels_between_devices_only():
    layout = SkipLayout((Hop("x", None, 0, 10), Hop("a", 0, 1, 1_000_000), Hop("b", 0, 1, 600_000)))
    costs = [StageCost(1e-3, 1e-3)] * 2
    same_device = predicted_on(["cuda:0", "cuda:0"], layout, costs)
    assert same_device.makespan == pytest.approx(6e-3), "two forwards, two backwards, one each idle"
    apart = predicted_on(["cuda:0", "cuda:1"], layout, costs)
    one_way = 2 * 1e-5 + 800_000 / 1.6e10  # two tensors, one after the other
    assert apart.makespan == pytest.approx(6e-3 + 2 * one_way)


def test_a_prediction_knows_the_links_of_devices_that_it_knows():
    layout, h100 = SkipLayout((Hop("a", 0, 1, 400_000_000),)), DeviceSpec.of("h100")
    found = predicted_on(["cuda:0", "cuda:1"], layout, [StageCost(1e-3, 1e-3)] * 2, h100)
    one_way = 1e-5 + 200_000_000 / 450e9
    assert found.makespan == pytest.approx(6e-3 + 2 * one_way)


def test_a_prediction_counts_what_is_brought_once():
    layout = SkipLayout((Hop("w", 0, 1, 16_000_000, once=True), Hop("a", 0, 1, 0)))
    apart = predicted_on(["cuda:0", "cuda:1"], layout, [StageCost(1e-4, 1e-4)] * 2)
    there, back = [t for t in apart.transfers if t.action is None]
    assert (there.start, there.end) == pytest.approx((0, 1e-3 + 1e-5))
    first = apart.of_lane(1)[0]
    assert first.start == pytest.approx(there.end + 1e-5), "its input waits for the link"
    assert back.start == pytest.approx(apart.of_lane(1)[-1].end)


@pytest.mark.covering(1)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_measured_step_has_every_action_once_in_the_lanes_order(schedule, devices):
    model, x = MLP(), torch.randn(6, 12)
    with fxpipe.compile(
        model, ["cpu"] * devices, chunks=3, schedule=schedule, loss_fn=loss
    ) as pipe:
        timeline = pipe.measure(x, rounds=1)
        stages = len(pipe.stages)
        order = joined(named(schedule, lanes=devices, microbatches=3, stages=stages), chain(stages))
        assert pipe.timeline().makespan > 0
    for lane in range(devices):
        spans = [span for span in timeline.of_lane(lane) if span.action is not None]
        assert [span.action for span in spans] == list(order.actions(lane))
        assert all(a.end <= b.start for a, b in pairwise(spans))
    assert [s.name for s in timeline.spans if s.action is None].count("loss") == 3


@pytest.mark.parametrize("segments", [1, 3])
def test_a_measured_step_has_its_recomputations_and_they_predict_the_next_one(segments):
    with fxpipe.compile(
        MLP(),
        ["cpu"] * 2,
        chunks=3,
        schedule="1f1b",
        checkpoint="except_last",
        checkpoint_segments=segments,
        loss_fn=loss,
    ) as pipe:
        timeline = pipe.measure(torch.randn(6, 12), rounds=1)
        again = pipe.timeline()
    for lane, wanted in enumerate(
        ("0F0 0F1 0R0 0B0 0F2 0R1 0B1 0B2", "1F0 1R0 1B0 1F1 1R1 1B1 1F2 1B2")
    ):
        for each in (timeline, again):
            found = [str(span) for span in each.of_lane(lane) if span.action is not None]
            assert " ".join(found) == wanted
    costs = measured_costs(timeline, 2)
    assert [cost.checkpointed for cost in costs] == [2, 2]
    assert all(cost.recompute > 0 for cost in costs)


def test_measuring_leaves_gradients_buffers_and_random_states_alone():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4))
    x, state = torch.randn(6, 4), torch.get_rng_state()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, schedule="1f1b", loss_fn=loss) as pipe:
        pipe.step(x)
        before = [gradients(model), [b.clone() for b in model.buffers()]]
        state = torch.get_rng_state()
        pipe.measure(x, rounds=2)
        assert same([gradients(model), list(model.buffers())], before)
        assert torch.equal(torch.get_rng_state(), state)


def test_measuring_calls_no_hooks_which_might_step_an_optimizer():
    model, x, seen = MLP(), torch.randn(6, 12), []
    for p in model.parameters():
        p.register_hook(lambda grad: seen.append("gradient"))
        p.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, loss_fn=loss) as pipe:
        pipe.measure(x, rounds=2)
        assert not seen
        pipe.step(x)
        assert len(seen) == 2 * 2 * 10


def test_measuring_leaves_inputs_alone_that_the_model_writes_to():
    model, x = nn.Sequential(nn.ELU(inplace=True), nn.Linear(4, 4)), torch.randn(6, 4)
    before = x.clone()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, loss_fn=loss) as pipe:
        pipe.measure(x, rounds=2)
        assert same(x, before)
        pipe.step(x)
        assert same(x, F.elu(before))


def test_the_schedule_may_be_searched_for():
    model, x = MLP(depth=8), torch.randn(8, 12)
    with (
        fxpipe.compile(
            model, ["cpu"] * 2, chunks=8, schedule="auto", stages=4, loss_fn=loss
        ) as pipe,
        fxpipe.compile(model, ["cpu"] * 2, chunks=8, schedule="zbv", loss_fn=loss) as other,
    ):
        pipe.step(x)
        found = gradients(model)
        model.zero_grad()
        other.step(x)
        torch.testing.assert_close(gradients(model), found)
        assert pipe.timeline().makespan <= other.timeline().makespan * (1 + 1e-9)


@pytest.mark.parametrize(
    ("schedule", "kept"), [("gpipe", [4, 4]), ("1f1b", [2, 1])], ids=["gpipe", "1f1b"]
)
def test_the_memory_is_predicted_from_the_micro_batches_that_are_alive(schedule, kept, kept_only):
    x = torch.randn(8, 12)
    with fxpipe.compile(
        MLP(), ["cpu"] * 2, chunks=4, schedule=schedule, example_inputs=(x,)
    ) as pipe:
        costs = [stage.cost for stage in pipe.stages]
        assert pipe.timeline().peak_memory == tuple(
            cost.fixed_bytes + cost.activation_bytes * alive / 4
            for cost, alive in zip(costs, kept, strict=True)
        )


def test_two_stages_of_one_lane_share_its_memory():
    x = torch.randn(8, 12)
    with fxpipe.compile(
        MLP(depth=8), ["cpu"] * 2, chunks=4, schedule="zbv", example_inputs=(x,)
    ) as pipe:
        fixed = [stage.cost.fixed_bytes for stage in pipe.stages]
        start = [held[0][1] for held in pipe.timeline().memory]
    assert start == [fixed[0] + fixed[3], fixed[1] + fixed[2]], "down the lanes, and up again"


@pytest.mark.parametrize(("checkpoint", "first"), [("always", 4), ("except_last", 3)])
def test_checkpointed_micro_batches_hold_what_their_stage_receives(checkpoint, first, kept_only):
    x = torch.randn(8, 12)  # 4 bytes * 8 * 12 = 384, a quarter of which is a micro-batch's
    with fxpipe.compile(
        MLP(), ["cpu"] * 2, chunks=4, checkpoint=checkpoint, example_inputs=(x,)
    ) as pipe:
        costs = [stage.cost for stage in pipe.stages]
        received = [sum(h.bytes for h in pipe.skip_layout.hops if h.target == i) for i in (0, 1)]
        assert received == [384, 384]
        # The first stage begins with a linear layer, and the second with an activation, which saves
        # its result.
        held_by = pipe.timeline().memory
        for cost, held, saves_its_input in zip(costs, held_by, [True, False], strict=True):
            after_forwards = held[4][1] - cost.fixed_bytes
            whole = cost.activation_bytes / 4
            assert after_forwards == first * 96 + (4 - first) * whole
            most = max(amount for _, amount in held)
            again = whole - (96 if saves_its_input else 0)
            assert most == cost.fixed_bytes + after_forwards + again
            assert held[-1][1] == cost.fixed_bytes


def test_a_backward_of_a_checkpoint_begins_with_its_forward():
    x = torch.randn(8, 12)
    steps = {}
    for checkpoint in ("never", "always"):
        with fxpipe.compile(
            MLP(), ["cpu"], chunks=1, checkpoint=checkpoint, example_inputs=(x,)
        ) as pipe:
            steps[checkpoint], cost = pipe.timeline().makespan, pipe.stages[0].cost
    assert steps["never"] == pytest.approx(cost.forward_s + cost.backward_s)
    assert steps["always"] == pytest.approx(2 * cost.forward_s + cost.backward_s)


def test_segments_hold_their_inputs_and_the_activations_of_one_of_them(kept_only):
    x = torch.randn(8, 12)
    with fxpipe.compile(
        nn.Sequential(*(nn.Linear(12, 12) for _ in range(4))),
        ["cpu"],
        chunks=1,
        checkpoint="always",
        checkpoint_segments=2,
        example_inputs=(x,),
    ) as pipe:
        fixed = pipe.stages[0].cost.fixed_bytes
        held = [amount - fixed for _, amount in pipe.timeline().memory[0]]
    # Two segments, of two layers each: each receives 384 bytes, and each layer keeps its input,
    # which is the segment's for the first of them.
    assert held == [0, 2 * 384, 2 * 384 + 384, 0]


def test_the_last_micro_batch_keeps_the_activations_of_all_segments_unless_it_is_recomputed(
    kept_only,
):
    x, held = torch.randn(8, 12), {}
    for checkpoint in ("except_last", "always"):
        with fxpipe.compile(
            nn.Sequential(*(nn.Linear(12, 12) for _ in range(4))),
            ["cpu"],
            chunks=2,
            checkpoint=checkpoint,
            checkpoint_segments=2,
            example_inputs=(x,),
        ) as pipe:
            fixed = pipe.stages[0].cost.fixed_bytes
            held[checkpoint] = max(amount - fixed for _, amount in pipe.timeline().memory[0])
    # As above, with 192 bytes for a micro-batch. While a segment of the first one is recomputed,
    # the last one has kept the inputs of all four layers, or is checkpointed, too.
    assert held == {"except_last": 2 * 192 + 192 + 4 * 192, "always": 2 * 192 + 192 + 2 * 192}


def peaks_of_a_step(model, loss_fn, target, checkpoint):
    """The predicted peaks of both lanes in bytes, before a step and after it."""
    x = torch.randn(8, 12)
    with fxpipe.compile(
        model,
        ["cpu"] * 2,
        chunks=4,
        checkpoint=checkpoint,
        partition=["2"],
        example_inputs=(x,),
        loss_fn=loss_fn,
    ) as pipe:
        before = pipe.timeline().peak_memory
        pipe.step(x, target=target)
        return before, pipe.timeline().peak_memory


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_what_the_loss_saves_is_held_in_the_last_lane_once_there_has_been_a_step(
    checkpoint, kept_only
):
    layers = nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 10)
    model, target = nn.Sequential(*layers), torch.randint(10, (8,))
    before, after = peaks_of_a_step(model, nn.CrossEntropyLoss(), target, checkpoint)
    # Of each row, the logarithms of 10 probabilities and a target; of each micro-batch, the sum of
    # the weights of its rows. With checkpoints the most is held in the first backward, ahead of
    # which the loss of that micro-batch has been freed; or, if that is more, before that.
    saved = 2 * (10 * 4 + 8) + 4
    assert after[0] == before[0]
    again = 2 * 12 * 4  # what is recomputed: the value of a tanh, beside the stage's input
    expected = saved * 4 if checkpoint == "never" else max(saved * 3 + again, saved * 4) - again
    assert after[1] - before[1] == expected


@pytest.mark.parametrize(("checkpoint", "more"), [("never", 0), ("always", 3)])
def test_an_output_that_stage_and_loss_save_is_held_once_but_for_checkpoints(checkpoint, more):
    model = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 10), nn.Sigmoid())
    before, after = peaks_of_a_step(model, lambda y, _: y.square().sum(), None, checkpoint)
    assert after[1] - before[1] == more * 2 * 10 * 4, "outputs of two rows"


def test_a_parameter_in_the_loss_is_not_held_for_each_micro_batch(kept_only):
    model = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 10))

    def penalized(output, _):
        return output.square().sum() + model[2].weight.square().sum()

    before, after = peaks_of_a_step(model, penalized, None, "never")
    assert after[1] - before[1] == 4 * 2 * 10 * 4, "the outputs only"


def test_a_prediction_does_not_call_the_loss():
    seen = []
    note = seen.append  # a list that a loss reaches gets back what it had

    def noted(output, _):
        note(output)
        return output.square().sum()

    with fxpipe.compile(MLP(), ["cpu"] * 2, chunks=4, loss_fn=noted, check=False) as pipe:
        pipe.step(torch.randn(8, 12))
        calls = len(seen)
        pipe.timeline()
    assert len(seen) == calls


class TiedLayers(nn.Sequential):
    """Six layers, of which two, 1 and 4, have the same weight."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(12, 12, bias=False) for _ in range(6)))
        self[4].weight = self[1].weight


@pytest.mark.covering(1)
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zbv"])
@pytest.mark.parametrize("make", [MLP, TiedLayers])
def test_a_plan_and_its_pipeline_hold_the_same_memory(make, schedule, checkpoint, kept_only):
    options = {"chunks": 4, "schedule": schedule, "checkpoint": checkpoint}
    model, x = make(), torch.randn(8, 12)
    plan = fxpipe.plan(model, ["p40"] * 2, example_inputs=(x,), **options)
    with fxpipe.compile(
        model, ["cpu", "cpu:0"], example_inputs=(x,), partition=plan.partition, **options
    ) as pipe:
        assert pipe.timeline().peak_memory == plan.timeline.peak_memory
    if len(plan.stages) == len(plan.devices):
        assert plan.memory == tuple(stage.memory for stage in plan.stages)


def test_a_parameter_that_is_brought_is_no_input_of_every_micro_batch(kept_only):
    x = torch.randn(8, 12)
    with fxpipe.compile(
        TiedLayers(),
        ["cpu", "cpu:0"],
        chunks=4,
        partition=["3"],
        checkpoint="always",
        example_inputs=(x,),
    ) as pipe:
        (held,) = (held for lane, held in enumerate(pipe.timeline().memory) if lane == 1)
        fixed = pipe.stages[1].cost.fixed_bytes
    received = 4 * 2 * 12 * 4  # of each of 4 micro-batches: 2 rows of 12 numbers
    assert held[4][1] - fixed == received


def test_on_one_device_a_shared_parameter_is_not_sent_but_each_micro_batch_has_its_gradient():
    """As where a schedule goes there and back, so that a lane has the first and the last stage."""
    x, chunks, size = torch.randn(8, 12), 4, 4 * 12 * 12
    options = {"partition": ["1", "2", "4"], "chunks": chunks, "schedule": "zbv", "check": False}
    with fxpipe.compile(TiedLayers(), ["cpu"] * 2, loss_fn=loss, **options) as pipe:
        pipe.prepare(x)
        layout, stages = pipe.skip_layout, pipe.stage_graph
        (name,) = (hop.value for hop in layout.hops if hop.value.endswith("_shared"))
        shared = SkipLayout(tuple(hop for hop in layout.hops if hop.value == name))
        edges, once = traffic(shared, chunks, pipe.model_graph.graph)
        memory = stage_memory([stage.cost for stage in pipe.stages], shared, stages)
    assert not once
    assert {(edge.bytes, edge.gradient_bytes) for edge in edges} == {(0, size)}
    assert all(stage.inputs == 0 and stage.kept_results == {} for stage in memory)


def test_the_schedule_that_is_searched_for_fits_checkpointed_micro_batches():
    """A bound that GPipe keeps with checkpoints costs no time."""
    model = nn.Sequential(*(nn.Tanh() for _ in range(16)))
    x = torch.zeros(64, 1024)
    options = {"example_inputs": (x,), "chunks": 8, "schedule": "auto", "checkpoint": "always"}
    roomy = fxpipe.plan(model, [FREE_LINKS] * 2, **options)
    gpipe = fxpipe.plan(model, [FREE_LINKS] * 2, **{**options, "schedule": "gpipe"})
    device = FREE_LINKS.with_memory(max(gpipe.memory))
    short = fxpipe.plan(model, [device] * 2, **options)
    assert short.fits
    assert short.seconds == pytest.approx(roomy.seconds)
