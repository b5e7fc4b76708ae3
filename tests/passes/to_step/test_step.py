"""From the stage graph to a training step."""
# ruff: noqa: E501 (graphs as they are printed)

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from fxpipe import ops
from fxpipe.ir.graph import ACTION, STAGE
from fxpipe.ir.printing import format_graph
from fxpipe.schedule import Schedule, named
from passes import Step, StepError
from tests.zoo import Chain, after

X = torch.ones(4, 3)


class Sum(nn.Module):
    def forward(self, output, target):
        return output.sum()


def step(model, starts, schedule="1f1b", microbatches=1, **options):
    stages = len(starts) + 1
    if isinstance(schedule, str):
        schedule = named(schedule, lanes=stages, microbatches=microbatches)
    gm = after("split", model, (X,), starts, chunks=1)
    return Step(
        loss=Sum(),
        schedule=schedule,
        devices=("cpu",) * stages,
        in_dims=(0,),
        **options,
    )(gm)


def test_a_step_is_forwards_loss_and_backwards_with_what_travels_between():
    assert_expected_inline(
        format_graph(step(Chain(2), ["b"])),
        """\
x: input
x_parts = scatter(x, 0, 1)
scale: input = None
optimizer: input = None
weights = weights(x_parts, 0)
x_mb0 = x_parts[0]
send_s0_mb0 = send((x_mb0,), 'caller', 'cpu/copy')  # stage 0, mb 0, cpu/copy
wait_s0_mb0 = wait(send_s0_mb0, 'cpu/copy', 'cpu/compute')  # stage 0, mb 0, cpu/compute
x_s0_mb0 = wait_s0_mb0[0]  # stage 0, mb 0, cpu/compute
stage_0_mb0_module = self.stage_0  # stage 0, mb 0, cpu/compute
forward_s0_mb0 = forward(stage_0_mb0_module, (x_s0_mb0,), (), True, False)  # stage 0, mb 0, cpu/compute
results_s0_mb0 = forward_s0_mb0[0]  # stage 0, mb 0, cpu/compute
tape_s0_mb0 = forward_s0_mb0[1]  # stage 0, mb 0, cpu/compute
stage_0_s0_mb0 = results_s0_mb0[0]  # stage 0, mb 0, cpu/compute
wait_s0_mb0_1 = wait((stage_0_s0_mb0,), 'cpu/compute', 'cpu/copy')  # stage 0, mb 0, cpu/compute
send_s1_mb0 = send(wait_s0_mb0_1, 'cpu/copy', 'cpu/copy')  # stage 1, mb 0, cpu/copy
wait_s1_mb0 = wait(send_s1_mb0, 'cpu/copy', 'cpu/compute')  # stage 1, mb 0, cpu/compute
stage_0_s1_mb0 = wait_s1_mb0[0]  # stage 1, mb 0, cpu/compute
stage_1_mb0_module = self.stage_1  # stage 1, mb 0, cpu/compute
forward_s1_mb0 = forward(stage_1_mb0_module, (stage_0_s1_mb0,), (), True, False)  # stage 1, mb 0, cpu/compute
results_s1_mb0 = forward_s1_mb0[0]  # stage 1, mb 0, cpu/compute
tape_s1_mb0 = forward_s1_mb0[1]  # stage 1, mb 0, cpu/compute
stage_1_s1_mb0 = results_s1_mb0[0]  # stage 1, mb 0, cpu/compute
loss_mb0_module = self.loss  # stage 1, mb 0, cpu/compute
loss_s1_mb0 = loss(loss_mb0_module, stage_1_s1_mb0, (), 0, (tape_s0_mb0, tape_s1_mb0))  # stage 1, mb 0, cpu/compute
loss_value_s1_mb0 = loss_s1_mb0[0]  # stage 1, mb 0, cpu/compute
tape_s1_mb0_1 = loss_s1_mb0[1]  # stage 1, mb 0, cpu/compute
weight_mb0 = weights[0]
loss_backward_s1_mb0 = loss_backward(tape_s1_mb0_1, weight_mb0, scale)  # stage 1, mb 0, cpu/compute
backward_s1_mb0 = backward(tape_s1_mb0, (loss_backward_s1_mb0,))  # stage 1, mb 0, cpu/compute
grad_stage_0_s1_mb0 = backward_s1_mb0[0]  # stage 1, mb 0, cpu/compute
wait_s1_mb0_1 = wait((grad_stage_0_s1_mb0,), 'cpu/compute', 'cpu/copy')  # stage 1, mb 0, cpu/compute
stage_1_mb0_module_1 = self.stage_1  # stage 1, mb 0, cpu/compute
optimize_s1_mb0 = optimize(optimizer, stage_1_mb0_module_1, ())  # stage 1, mb 0, cpu/compute
send_s0_mb0_1 = send(wait_s1_mb0_1, 'cpu/copy', 'cpu/copy')  # stage 0, mb 0, cpu/copy
wait_s0_mb0_2 = wait(send_s0_mb0_1, 'cpu/copy', 'cpu/compute')  # stage 0, mb 0, cpu/compute
grad_stage_0_s0_mb0 = wait_s0_mb0_2[0]  # stage 0, mb 0, cpu/compute
backward_s0_mb0 = backward(tape_s0_mb0, (grad_stage_0_s0_mb0,))  # stage 0, mb 0, cpu/compute
stage_0_mb0_module_1 = self.stage_0  # stage 0, mb 0, cpu/compute
optimize_s0_mb0 = optimize(optimizer, stage_0_mb0_module_1, ())  # stage 0, mb 0, cpu/compute
loss_all = average((loss_value_s1_mb0,), weights)
return (loss_all, (loss_value_s1_mb0,))
""",
    )


class Scaled(nn.Module):
    """The last segment of it uses the input, too."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.b(self.a(x)) * x


def test_a_stage_in_segments_is_a_chain_of_stages_in_its_lane():
    gm = step(Scaled(), [], "gpipe", checkpoint="always", checkpoint_segments=2)
    parts = "send(", "forward(", "loss(", "replay(", "backward(", "optimize("
    lines = [
        line.partition("  #")[0]
        for line in format_graph(gm).splitlines()
        if any(part in line for part in parts)
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
send_s0_0_mb0 = send((x_mb0,), 'caller', 'cpu/copy')
forward_s0_0_mb0 = forward(stage_0_segment_0_mb0_module, (x_s0_0_mb0,), (), True, True)
forward_s0_1_mb0 = forward(stage_0_segment_1_mb0_module, (segment_0_s0_0_mb0, x_s0_0_mb0), (), True, True)
loss_s0_1_mb0 = loss(loss_mb0_module, segment_1_s0_1_mb0, (), 0, (tape_s0_0_mb0, tape_s0_1_mb0))
loss_backward_s0_1_mb0 = loss_backward(tape_s0_1_mb0_1, weight_mb0, scale)
replay_s0_1_mb0 = replay(tape_s0_1_mb0)
backward_s0_1_mb0 = backward(tape_s0_1_mb0, (loss_backward_s0_1_mb0,))
optimize_s0_1_mb0 = optimize(optimizer, stage_0_segment_1_mb0_module_1, ())
replay_s0_0_mb0 = replay(tape_s0_0_mb0)
backward_s0_0_mb0 = backward(tape_s0_0_mb0, (grad_segment_0_s0_1_mb0,))
optimize_s0_0_mb0 = optimize(optimizer, stage_0_segment_0_mb0_module_1, ())""",
    )
    work = [node for node in gm.graph.nodes if ACTION in node.meta]
    assert {node.meta[STAGE] for node in work} == {node.meta[ACTION].stage for node in work} == {0}


def test_each_stage_has_segments_of_its_own():
    modes = ["always", "always", "never"]
    gm = step(Chain(5), ["b", "e"], "gpipe", checkpoint=modes, checkpoint_segments=(1, 3, 2))
    parts = "forward(", "replay(", " backward("
    lines = [
        line.partition("  #")[0]
        for line in format_graph(gm).splitlines()
        if any(part in line for part in parts)
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
forward_s0_0_mb0 = forward(stage_0_segment_0_mb0_module, (x_s0_0_mb0,), (), True, True)
forward_s1_0_mb0 = forward(stage_1_segment_0_mb0_module, (segment_0_s1_0_mb0,), (), True, True)
forward_s1_1_mb0 = forward(stage_1_segment_1_mb0_module, (segment_1_s1_0_mb0,), (), True, True)
forward_s1_2_mb0 = forward(stage_1_segment_2_mb0_module, (segment_2_s1_1_mb0,), (), True, True)
forward_s2_0_mb0 = forward(stage_2_segment_0_mb0_module, (segment_3_s2_0_mb0,), (), True, False)
backward_s2_0_mb0 = backward(tape_s2_0_mb0, (loss_backward_s2_0_mb0,))
replay_s1_2_mb0 = replay(tape_s1_2_mb0)
backward_s1_2_mb0 = backward(tape_s1_2_mb0, (grad_segment_3_s1_2_mb0,))
replay_s1_1_mb0 = replay(tape_s1_1_mb0)
backward_s1_1_mb0 = backward(tape_s1_1_mb0, (grad_segment_2_s1_2_mb0,))
replay_s1_0_mb0 = replay(tape_s1_0_mb0)
backward_s1_0_mb0 = backward(tape_s1_0_mb0, (grad_segment_1_s1_1_mb0,))
replay_s0_0_mb0 = replay(tape_s0_0_mb0)
backward_s0_0_mb0 = backward(tape_s0_0_mb0, (grad_segment_0_s0_0_mb0,))""",
    )


def test_a_skip_visits_its_users_and_its_gradient_comes_back_the_same_way():
    gm = step(Chain(3, {0: (1, 2)}), ["b", "c"])
    lines = [
        line for line in format_graph(gm).splitlines() if "forward(" in line or "backward(" in line
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
forward_s0_mb0 = forward(stage_0_mb0_module, (x_s0_mb0,), (), True, False)  # stage 0, mb 0, cpu/compute
forward_s1_mb0 = forward(stage_1_mb0_module, (stage_0_s1_mb0,), (0,), True, False)  # stage 1, mb 0, cpu/compute
forward_s2_mb0 = forward(stage_2_mb0_module, (stage_1_s2_mb0, stage_0_s2_mb0), (), True, False)  # stage 2, mb 0, cpu/compute
loss_backward_s2_mb0 = loss_backward(tape_s2_mb0_1, weight_mb0, scale)  # stage 2, mb 0, cpu/compute
backward_s2_mb0 = backward(tape_s2_mb0, (loss_backward_s2_mb0,))  # stage 2, mb 0, cpu/compute
backward_s1_mb0 = backward(tape_s1_mb0, (grad_stage_1_s1_mb0, grad_stage_0_s1_mb0))  # stage 1, mb 0, cpu/compute
backward_s0_mb0 = backward(tape_s0_mb0, (grad_stage_0_s0_mb0,))  # stage 0, mb 0, cpu/compute""",
    )


def test_a_checkpointed_stage_is_run_again_ahead_of_the_gradient():
    gm = step(Chain(2), ["b"], checkpoint="always")
    stage_0 = [n.name for n in gm.graph.nodes if n.meta.get("stage") == 0]
    assert stage_0.index("replay_s0_mb0") < stage_0.index("send_s0_mb0_1")


def test_halved_backwards_are_two_nodes_where_another_lane_waits_for_the_first():
    gm = step(Chain(2), ["b"], "zb_h1", 2)
    names = [n.name for n in gm.graph.nodes]
    for i in 0, 1:
        first = names.index(f"backward_input_s1_mb{i}")
        assert first < names.index(f"weight_grad_s1_mb{i}")
        assert f"backward_s0_mb{i}" in names, "nobody is there to wait"


def test_a_schedule_for_other_stages_is_refused():
    gm = after("split", Chain(2), (X,), ["b"], chunks=1)
    with pytest.raises(StepError, match="'gpipe' has 3 stages, the pipeline 2"):
        Step(
            loss=Sum(),
            schedule=named("gpipe", lanes=3, microbatches=1),
            devices=("cpu",) * 2,
            in_dims=(0,),
        )(gm)


def test_what_lanes_wait_for_forever_is_refused():
    from fxpipe.schedule import ScheduleError

    gm = after("split", Chain(2), (X,), ["b"], chunks=1)
    with pytest.raises(ScheduleError, match="deadlock"):
        Step(
            loss=Sum(),
            schedule=Schedule.from_text("0F0 0B0 \n 1B0 1F0"),
            devices=("cpu",) * 2,
            in_dims=(0,),
        )(gm)


def test_a_recomputation_is_where_the_schedule_has_it():
    given = Schedule.from_text("0F0 0F1 0R1 0R0 0B0 0B1 \n 1F0 1B0 1F1 1B1")
    gm = step(Chain(2), ["b"], given, checkpoint="always")
    work = [str(node.meta[ACTION]) for node in gm.graph.nodes if ACTION in node.meta]
    assert [a for a in work if a[0] == "0"] == ["0F0", "0F1", "0R1", "0R0", "0B0", "0B1"]
    assert [a for a in work if a[0] == "1"] == ["1F0", "1R0", "1B0", "1F1", "1R1", "1B1"]


@pytest.mark.parametrize(
    "checkpoint, segments, message",
    [
        ("never", 1, r"has 0R1, and stage 0 keeps the activations of micro-batch 1, .* give check"),
        ("except_last", 1, "has 0R1, and stage 0 keeps the activations of micro-batch 1"),
        ("always", 2, "has 0R1, and checkpoint_segments=2 recomputes a stage in parts"),
    ],
)
def test_a_recomputation_that_there_cannot_be_is_refused(checkpoint, segments, message):
    given = Schedule.from_text("0F0 0F1 0R1 0B0 0B1 \n 1F0 1B0 1F1 1B1")
    with pytest.raises(StepError, match=message):
        step(Chain(2), ["b"], given, checkpoint=checkpoint, checkpoint_segments=segments)


def test_a_forward_is_told_that_its_replay_takes_the_results_of_products():
    graph = step(
        Chain(2), ["b"], named("gpipe", lanes=2, microbatches=1), 1, checkpoint="selective"
    )
    (first, _) = graph.graph.find_nodes(op="call_function", target=ops.forward)
    assert first.args[4] == "selective"
    assert graph.graph.find_nodes(op="call_function", target=ops.replay)


def test_activations_leave_behind_the_results_and_come_back_an_action_ahead_of_the_backward():
    """The input of that action (micro-batch 2) is on the link ahead of what comes back."""
    given = Schedule.from_text("0F0 0F1 0F2 0B0 0B1 0B2 \n 1F0 1B0 1F1 1B1 1F2 1B2")
    gm = step(Chain(2), ["b"], given, 3, checkpoint="offload")
    parts = "wait(", "forward(", "offload(", "reload(", " backward("
    lines = [
        line.partition("  #")[0]
        for line in format_graph(gm).splitlines()
        if "_s0_" in line.split(" = ")[0] and any(part in line for part in parts)
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
wait_s0_mb0 = wait(send_s0_mb0, 'cpu/copy', 'cpu/compute')
forward_s0_mb0 = forward(stage_0_mb0_module, (x_s0_mb0,), (), True, 'offload')
wait_s0_mb0_1 = wait((stage_0_s0_mb0,), 'cpu/compute', 'cpu/copy')
offload_s0_mb0 = offload(tape_s0_mb0, 'cpu/compute', 1.0)
wait_s0_mb1 = wait(send_s0_mb1, 'cpu/copy', 'cpu/compute')
forward_s0_mb1 = forward(stage_0_mb1_module, (x_s0_mb1,), (), True, 'offload')
wait_s0_mb1_1 = wait((stage_0_s0_mb1,), 'cpu/compute', 'cpu/copy')
offload_s0_mb1 = offload(tape_s0_mb1, 'cpu/compute', 1.0)
wait_s0_mb2 = wait(send_s0_mb2, 'cpu/copy', 'cpu/compute')
reload_s0_mb0 = reload(tape_s0_mb0)
forward_s0_mb2 = forward(stage_0_mb2_module, (x_s0_mb2,), (), True, 'offload')
wait_s0_mb2_1 = wait((stage_0_s0_mb2,), 'cpu/compute', 'cpu/copy')
offload_s0_mb2 = offload(tape_s0_mb2, 'cpu/compute', 1.0)
reload_s0_mb1 = reload(tape_s0_mb1)
wait_s0_mb0_2 = wait(send_s0_mb0_1, 'cpu/copy', 'cpu/compute')
backward_s0_mb0 = backward(tape_s0_mb0, (grad_stage_0_s0_mb0,))
reload_s0_mb2 = reload(tape_s0_mb2)
wait_s0_mb1_2 = wait(send_s0_mb1_1, 'cpu/copy', 'cpu/compute')
backward_s0_mb1 = backward(tape_s0_mb1, (grad_stage_0_s0_mb1,))
wait_s0_mb2_2 = wait(send_s0_mb2_1, 'cpu/copy', 'cpu/compute')
backward_s0_mb2 = backward(tape_s0_mb2, (grad_stage_0_s0_mb2,))""",
    )


def test_a_stage_may_say_when_it_is_recomputed_though_another_one_has_segments():
    given = Schedule.from_text("0F0 0F1 0R1 0B0 0B1 \n 1F0 1B0 1F1 1B1")
    gm = step(Chain(3), ["b"], given, checkpoint="always", checkpoint_segments=(1, 2))
    work = [str(node.meta[ACTION]) for node in gm.graph.nodes if ACTION in node.meta]
    assert [a for a in work if a[0] == "0"] == ["0F0", "0F1", "0R1", "0R0", "0B0", "0B1"]
