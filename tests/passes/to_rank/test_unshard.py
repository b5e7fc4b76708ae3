"""Parameters in shards are gathered once for all micro-batches."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline

from fxpipe import ops
from fxpipe.runtime.lanes import run_inline
from fxpipe.runtime.program import lower
from fxpipe.schedule import Schedule
from passes import Reduce, Unshard
from passes.verify.transfers import verify
from tests.passes.to_rank.test_project import X, projected, step, text
from tests.zoo import Chain, gradients, same

SHOWN = (
    *(ops.unshard, ops.unsharded, ops.reduce_scatter, ops.reshard, ops.resharded),
    *(ops.forward, ops.replay, ops.backward, ops.reduce, ops.reduced, ops.optimize),
)


def order(gm):
    """The names of the nodes that use or gather parameters, in order."""
    return "\n".join(node.name for node in gm.graph.nodes if node.target in SHOWN)


def test_a_stage_has_whole_parameters_from_its_first_forward_to_its_last_backward():
    gm = Unshard(frozenset({0}))(Reduce()(step(Chain(2), ["b"], microbatches=2)))
    assert_expected_inline(
        order(gm),
        """\
unshard_s0
unsharded_s0
forward_s0_mb0
forward_s0_mb1
forward_s1_mb0
backward_s1_mb0
backward_s0_mb0
forward_s1_mb1
backward_s1_mb1
reduce_s1_mb1
backward_s0_mb1
reduce_s0_mb1
reduce_scatter_s0
reshard_s0
reduced_s1_mb1
reduced_s0_mb1
resharded_s0
optimize_s1_mb1
optimize_s0_mb1""",
    )
    verify(projected(gm, (0, 1)))


def test_a_stage_may_have_whole_parameters_for_each_action_only():
    gm = step(Chain(2), ["b"], microbatches=2, checkpoint="always")
    gm = Unshard(frozenset({0}), briefly=frozenset({0}))(Reduce()(gm))
    (first, _) = projected(gm, (0, 1))
    assert_expected_inline(
        order(first),
        """\
unshard_s0
unsharded_s0
forward_s0_mb0
reshard_s0
unshard_s0_1
unsharded_s0_1
forward_s0_mb1
reshard_s0_1
unshard_s0_2
unsharded_s0_2
replay_s0_mb0
backward_s0_mb0
reshard_s0_2
unshard_s0_3
unsharded_s0_3
replay_s0_mb1
backward_s0_mb1
reduce_s0_mb1
reduce_scatter_s0
reshard_s0_3
reduced_s0_mb1
resharded_s0
optimize_s0_mb1""",
    )


def test_parameters_are_let_go_between_a_recomputation_and_a_later_backward():
    ahead = Schedule.from_text("0F0 0F1 0R1 0R0 0B0 0B1 \n 1F0 1B0 1F1 1B1")
    gm = step(Chain(2), ["b"], ahead, microbatches=2, checkpoint="always")
    gm = Unshard(frozenset({0}), briefly=frozenset({0}))(Reduce()(gm))
    (first, _) = projected(gm, (0, 1))
    parts = ("forward", "replay", "backward", "reshard_")
    assert_expected_inline(
        "\n".join(name for name in order(first).splitlines() if name.startswith(parts)),
        """\
forward_s0_mb0
reshard_s0
forward_s0_mb1
reshard_s0_1
replay_s0_mb1
reshard_s0_2
replay_s0_mb0
backward_s0_mb0
reshard_s0_3
backward_s0_mb1
reshard_s0_4""",
    )


def test_without_shards_the_graph_computes_what_it_did():
    model = Chain(3)
    gm = Reduce()(step(model, ["b", "c"], microbatches=2))
    before = text(gm)
    assert text(Unshard(frozenset())(gm)) == before
    found = []
    for stages in (set(), {0, 2}):
        model.zero_grad()
        made = Unshard(frozenset(stages))(gm)
        count = len(made.graph.find_nodes(op="placeholder"))
        with torch.no_grad():
            found.append(run_inline(lower(made), [X, *[None] * (count - 1)]))
        found.append(gradients(model))
    assert same(found[0], found[2]) and same(found[1], found[3])
