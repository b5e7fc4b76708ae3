"""The verifier accepts what the passes make, and names the nodes that break a promise."""

from __future__ import annotations

import operator

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

import fxpipe
from fxpipe import ops
from fxpipe.ir.graph import LANE, STAGE, STREAM, TURN
from passes import Verify, VerifyError
from passes.verify.values import lane_of
from tests.passes.verify.graphs import MODELS, pipeline_graph, step_graph
from tests.passes.verify.mutants import Mutant, take_out
from tests.zoo import mean_loss


@pytest.mark.covering(1)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("checkpoint, segments", [("never", 1), ("except_last", 1), ("always", 2)])
def test_pipelines_are_accepted(model, checkpoint, segments):
    Verify()(pipeline_graph(model, checkpoint, segments))


@pytest.mark.covering(1)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zb_h1", "zbv", "dualpipe_v"]
)
def test_steps_are_accepted_in_every_schedule(model, schedule):
    lanes = 4 if schedule in ("gpipe", "1f1b", "zb_h1") else 2
    Verify()(step_graph(model, schedule, "except_last", 1, 4, lanes))
    Verify()(step_graph(model, schedule, "always", 2, 4, lanes))


class PassingBy(nn.Module):
    """A model with a stage whose own value nobody uses, and that two outputs without a gradient
    pass by."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Bilinear(4, 4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sin, cos, h = x.sin(), x.cos(), self.a(x)
        self.b(sin, cos)
        return self.c(h), sin, cos


def test_values_without_a_gradient_that_arrive_and_leave_need_no_common_gate():
    fxpipe.compile(
        PassingBy(),
        ["cpu"] * 3,
        chunks=2,
        partition=["b", "c"],
        tracer="symbolic",
        example_inputs=(torch.randn(4, 4),),
    )


def named(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.name == name)


def refused(gm: fx.GraphModule, name: str, change) -> str:
    """What the verifier says after a change at the node of that name."""
    mutant = Mutant(gm)
    change(named(mutant.graph, name))
    with pytest.raises(VerifyError) as caught:
        Verify()(mutant)
    return str(caught.value)


def pipeline(model="U-Net", *args):
    return pipeline_graph(model, *args)


def step(model="U-Net", *args):
    return step_graph(model, *args)


def test_a_value_that_is_used_before_its_stream_has_waited_is_named_with_its_maker():
    assert_expected_inline(
        refused(pipeline(), "wait_s1_mb0", take_out),
        """\
relu of micro-batch 0 is arriving at lane 1, and the node uses it on the compute stream of lane 1:
    copy_s1_mb0 = copy((relu_s0_mb0,), 'cuda:0/copy', 'cuda:1/copy')  # stage 1, mb 0, cuda:1/copy
      ┆ missing: a wait of the compute stream
    stage_1_mb0 = stage_1(relu_s1_mb0)  # stage 1, mb 0, cuda:1/compute""",
    )


def test_a_value_that_has_not_been_copied_is_named():
    assert "a copy to the lane that uses it, between two waits" in refused(
        step("tied"), "send_s1_mb0", take_out
    )


def test_backwards_in_no_order_are_named_with_the_missing_edge():
    assert "the backward of micro-batch 0 at stage 2 is not made to come after" in refused(
        pipeline(), "join_s2_mb1", take_out
    )


def test_a_replay_that_never_comes_is_missed():
    assert "missing: a replay of the forward" in refused(
        step("tied", "1f1b", "always"), "replay_s0_mb0", take_out
    )


def test_a_backward_with_the_gradients_of_another_micro_batch_is_refused():
    def change(node: fx.Node) -> None:
        node.args = (node.args[0], named(node.graph, "backward_s1_mb0").args[1])

    assert "a node of micro-batch 1 is given a value of micro-batch 0" in refused(
        step("tied"), "backward_s1_mb1", change
    )


def test_an_optimizer_ahead_of_the_last_gradient_is_refused():
    def change(node: fx.Node) -> None:
        first = next(n for n in node.graph.nodes if n.name == "backward_s0_mb2")
        first.prepend(node.args[1])
        first.prepend(node)

    assert "it comes when all actions of its stage are done" in refused(
        step(), "optimize_s0_mb2", change
    )


def test_an_optimizer_that_steps_a_parameter_whose_memory_another_stage_reads_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    told = {"chunks": 2, "loss_fn": mean_loss, "partition": ["1"]}
    with fxpipe.compile(model, ["cpu"] * 2, **told) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
        pipe.step(torch.ones(4, 4), target=torch.ones(4), optimizer=optimizer)
        gm = pipe.step_graph

    def at_once(node: fx.Node) -> None:
        node.args = node.args[:3]

    (node, _) = gm.graph.find_nodes(op="call_function", target=ops.optimize)
    said = refused(gm, node.name, at_once)
    assert "is stepped while another stage may read its memory, in which it has another" in said


def test_a_gradient_that_never_goes_home_is_missed():
    gm = step("tied")
    (*_, node) = gm.graph.find_nodes(op="call_function", target=ops.accumulate)
    assert "the gradient of a replica goes home once, and not 0 times" in refused(
        gm, node.name, take_out
    )


def test_actions_in_another_order_than_the_schedule_are_refused():
    def change(node: fx.Node) -> None:
        before = node.prev
        while TURN not in before.meta or lane_of(before) != lane_of(node):
            before = before.prev
        before.prepend(node)

    assert "in another order than the schedule" in refused(
        step("U-Net", "zb_h1"), "weight_grad_s3_mb1", change
    )


def test_a_portal_that_is_opened_twice_is_refused():
    def change(node: fx.Node) -> None:
        with node.graph.inserting_after(node):
            node.graph.node_copy(node)

    name = next(n.name for n in pipeline().graph.nodes if n.target is ops.portal_orange)
    assert "moved and taken out once each, not 1 and 2 times" in refused(pipeline(), name, change)


def test_a_parameter_that_is_not_brought_is_refused():
    assert "without having been brought there" in refused(
        pipeline("tied"), "embed_weight_s3", take_out
    )


def test_a_parameter_whose_gradients_do_not_meet_in_one_order_is_refused():
    def take_the_same(node: fx.Node) -> None:
        node.args = (named(node.graph, "embed_weight_lent_0"), *node.args[1:])

    gm = pipeline("tied")
    assert "another stage is brought the same view" in refused(gm, "embed_weight_s3", take_the_same)

    def exchange(node: fx.Node) -> None:
        other = named(node.graph, "embed_weight_s0")
        own, theirs = node.args[0], other.args[0]
        node.args, other.args = (theirs, *node.args[1:]), (own, *other.args[1:])

    assert "not in the order of the stages" in refused(gm, "embed_weight_s3", exchange)

    def take_it_itself(node: fx.Node) -> None:
        node.args = (named(node.graph, "embed_weight"), *node.args[1:])

    assert "the parameter has to be lent" in refused(gm, "embed_weight_s3", take_it_itself)

    def use_it_itself(node: fx.Node) -> None:
        node.target, node.args = "stage_0", node.args[:1]

    assert "itself, which is lent" in refused(gm, "stage_0_mb0", use_it_itself)


def test_statistics_that_nobody_updates_are_missed():
    assert "the stage gives bn_mean, which nobody uses" in refused(
        pipeline("batch norm"), "bn_update", take_out
    )


def test_an_input_that_is_written_to_while_stages_have_views_of_it_is_refused():
    def change(node: fx.Node) -> None:
        node.args = node.args[:3]

    assert "its parts have to be copies" in refused(pipeline("writing"), "x_parts", change)


def test_a_node_on_the_stream_of_another_kind_is_refused():
    def change(node: fx.Node) -> None:
        node.meta[STREAM] = "cuda:1/compute"

    assert "it belongs to the stream 'cuda:1/copy'" in refused(step(), "send_s1_mb0", change)


def test_a_stage_in_two_lanes_is_refused():
    def change(node: fx.Node) -> None:
        node.meta[LANE] = 0

    assert "stage 2 is in lane 2, and this node in lane 0" in refused(step(), "wait_s2_mb1", change)


def test_a_value_that_is_used_ahead_of_its_node_is_refused():
    assert "it uses a value that is not computed ahead of it" in refused(
        pipeline(), "wait_s1_mb0", lambda node: node.append(node.all_input_nodes[0])
    )


def test_a_stage_that_the_graph_module_does_not_have_is_refused():
    def change(node: fx.Node) -> None:
        node.target = "stage_7"

    assert "the graph module has nothing at stage_7" in refused(pipeline(), "stage_1_mb0", change)


def test_two_nodes_of_one_name_are_refused_as_the_generated_code_would_mix_them_up():
    def change(node: fx.Node) -> None:
        node.name = "stage_0_mb0"

    assert "another node has the name stage_0_mb0, too" in refused(
        pipeline(), "stage_1_mb0", change
    )


@pytest.mark.parametrize("kind", ["function", "method"])
def test_a_call_of_a_users_pass_is_accepted_where_its_stream_has_the_values(kind):
    def put_ahead_of(stage: fx.Node) -> None:
        (value,) = stage.all_input_nodes
        target = operator.neg if kind == "function" else "neg"
        with gm.graph.inserting_before(stage):
            added = gm.graph.create_node(f"call_{kind}", target, (value,))
        added.meta = dict(stage.meta)
        stage.replace_input_with(value, added)

    gm = pipeline("U-Net")
    put_ahead_of(named(gm.graph, "stage_1_mb0"))
    with pytest.raises(VerifyError, match="not treated alike"):
        Verify()(gm)
    for i in (1, 2):
        put_ahead_of(named(gm.graph, f"stage_1_mb{i}"))
    Verify()(gm)


def other_input(name: str):
    """Gives a node the first argument of another node."""

    def change(node: fx.Node) -> None:
        node.args = (named(node.graph, name).args[0], *node.args[1:])

    return change


@pytest.mark.parametrize("make", [pipeline, step], ids=["pipeline", "step"])
def test_running_statistics_that_are_updated_by_those_of_another_norm_are_refused(make):
    said = refused(make("several"), "bn2_update", other_input("bn1_update"))
    assert "it is noted to be given ('bn2.running_mean', 'bn2.running_var'" in said
    assert "and is given ('bn1.running_mean', 'bn2.running_var'" in said


@pytest.mark.parametrize("make", [pipeline, step], ids=["pipeline", "step"])
def test_what_is_written_back_to_another_input_is_refused(make):
    said = refused(make("several"), "y_back", other_input("x_back"))
    assert "it is noted to be given ('y', 'add_'), and is given ('x', 'add_')" in said


@pytest.mark.parametrize("function", [ops.replicate, ops.gathered, ops.optimize])
def test_a_node_that_is_noted_at_the_other_stage_of_its_lane_is_refused(function):
    gm = step_graph("several", "zbv", "always", 2, 4, 2)  # stages 0 and 3 in a lane, and 1 and 2
    nodes = gm.graph.find_nodes(op="call_function", target=function)
    assert nodes

    def to_the_other_stage(node: fx.Node) -> None:
        node.meta[STAGE] = 3 - node.meta[STAGE]

    for node in nodes:
        refused(gm, node.name, to_the_other_stage)
