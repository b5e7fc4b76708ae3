"""The passes from the stage graph to the pipeline graph: graph in, graph out, as text."""

from __future__ import annotations

import re

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from fxpipe import ops
from fxpipe.ir.graph import MICROBATCH, STAGE
from fxpipe.ir.printing import format_graph, format_node
from passes import Checkpoint, Microbatch, Split
from passes.to_pipeline.cells import cells
from tests.zoo import Chain, after, labelled

X = torch.ones(4, 3)


def text(name, model, starts, chunks, checkpoint="never"):
    """The graph after a pass; without the streams, which are all on the CPU."""
    graph = format_graph(after(name, model, (X,), starts, chunks=chunks, checkpoint=checkpoint))
    return re.sub(r", cpu/\w+$", "", graph, flags=re.M)


def of_cell(name, model, starts, cell, **options):
    """What one cell (micro-batch, stage) does after a pass."""
    gm = after(name, model, (X,), starts, **options)
    lines = [n for n in gm.graph.nodes if (n.meta.get(MICROBATCH), n.meta.get(STAGE)) == cell]
    return "".join(format_node(node).split("  #")[0] + "\n" for node in lines)


def test_microbatch_unrolls_in_clock_order():
    assert_expected_inline(
        text("microbatch", Chain(2), ["b"], 2),
        """\
x: input
x_parts = scatter(x, 0, 2)
x_mb0 = x_parts[0]  # mb 0
x_mb1 = x_parts[1]  # mb 1
stage_0_mb0 = stage_0(x_mb0)  # stage 0, mb 0
stage_0_mb1 = stage_0(x_mb1)  # stage 0, mb 1
stage_1_mb0 = stage_1(stage_0_mb0)  # stage 1, mb 0
stage_1_mb1 = stage_1(stage_0_mb1)  # stage 1, mb 1
b_out = gather((stage_1_mb0, stage_1_mb1), 0, x_parts, 0)  # stage 1
return b_out
""",
    )


def test_two_stages():
    assert_expected_inline(
        text("dependencies", Chain(2), ["b"], 2),
        """\
x: input
x_parts = scatter(x, 0, 2)
x_mb0 = x_parts[0]  # mb 0
x_mb1 = x_parts[1]  # mb 1
copy_s0_mb0 = copy((x_mb0,), 'caller', 'cpu/copy')  # stage 0, mb 0
wait_s0_mb0 = wait(copy_s0_mb0, 'cpu/copy', 'cpu/compute')  # stage 0, mb 0
x_s0_mb0 = wait_s0_mb0[0]  # stage 0, mb 0
stage_0_mb0 = stage_0(x_s0_mb0)  # stage 0, mb 0
wait_s0_mb0_1 = wait((stage_0_mb0,), 'cpu/compute', 'cpu/copy')  # stage 0, mb 0
fork_s0_mb0 = fork(wait_s0_mb0_1)  # stage 0, mb 0
phony_s0_mb0 = fork_s0_mb0[1]  # stage 0, mb 0
values_s0_mb0 = fork_s0_mb0[0]  # stage 0, mb 0
a_s0_mb0 = values_s0_mb0[0]  # stage 0, mb 0
copy_s0_mb1 = copy((x_mb1,), 'caller', 'cpu/copy')  # stage 0, mb 1
wait_s0_mb1 = wait(copy_s0_mb1, 'cpu/copy', 'cpu/compute')  # stage 0, mb 1
x_s0_mb1 = wait_s0_mb1[0]  # stage 0, mb 1
stage_0_mb1 = stage_0(x_s0_mb1)  # stage 0, mb 1
wait_s0_mb1_1 = wait((stage_0_mb1,), 'cpu/compute', 'cpu/copy')  # stage 0, mb 1
join_s0_mb1 = join(wait_s0_mb1_1, phony_s0_mb0)  # stage 0, mb 1
a_s0_mb1 = join_s0_mb1[0]  # stage 0, mb 1
copy_s1_mb0 = copy((a_s0_mb0,), 'cpu/copy', 'cpu/copy')  # stage 1, mb 0
wait_s1_mb0 = wait(copy_s1_mb0, 'cpu/copy', 'cpu/compute')  # stage 1, mb 0
a_s1_mb0 = wait_s1_mb0[0]  # stage 1, mb 0
stage_1_mb0 = stage_1(a_s1_mb0)  # stage 1, mb 0
fork_s1_mb0 = fork((stage_1_mb0,))  # stage 1, mb 0
phony_s1_mb0 = fork_s1_mb0[1]  # stage 1, mb 0
values_s1_mb0 = fork_s1_mb0[0]  # stage 1, mb 0
b_s1_mb0 = values_s1_mb0[0]  # stage 1, mb 0
copy_s1_mb1 = copy((a_s0_mb1,), 'cpu/copy', 'cpu/copy')  # stage 1, mb 1
wait_s1_mb1 = wait(copy_s1_mb1, 'cpu/copy', 'cpu/compute')  # stage 1, mb 1
join_s1_mb1 = join(wait_s1_mb1, phony_s1_mb0)  # stage 1, mb 1
a_s1_mb1 = join_s1_mb1[0]  # stage 1, mb 1
stage_1_mb1 = stage_1(a_s1_mb1)  # stage 1, mb 1
b_out = gather((b_s1_mb0, stage_1_mb1), 0, x_parts, 0)  # stage 1
return b_out
""",
    )


def test_a_long_skip_is_one_portal_and_nothing_in_the_stages_between():
    class Skip(Chain):
        def forward(self, x):
            return self.d(self.c(self.b(torch.tanh(a := self.a(x))))) + a

    gm = after("dependencies", Skip(4), (X,), ["b", "c", "d"], chunks=2)
    for triple in (ops.portal_blue, ops.portal_copy, ops.portal_orange):
        where = [n.meta[MICROBATCH] for n in gm.graph.nodes if n.target is triple]
        assert where == [0, 1], "one for each micro-batch"
        stages = {n.meta[STAGE] for n in gm.graph.nodes if n.target is triple}
        assert stages == {0 if triple is ops.portal_blue else 3}, "at the ends"
    for cell, nodes in cells(gm.graph).items():
        if cell[1] in (1, 2):
            assert not any(n.name.startswith(("a_", "portal")) for n in nodes)
    # The skip's source and consumer, for the first micro-batch.
    options = dict(starts=["b", "c", "d"], chunks=2)
    assert_expected_inline(
        of_cell("dependencies", Skip(4), cell=(0, 0), **options),
        """\
copy_s0_mb0 = copy((x_mb0,), 'caller', 'cpu/copy')
wait_s0_mb0 = wait(copy_s0_mb0, 'cpu/copy', 'cpu/compute')
x_s0_mb0 = wait_s0_mb0[0]
stage_0_mb0 = stage_0(x_s0_mb0)
a_mb0 = stage_0_mb0[0]
tanh_mb0 = stage_0_mb0[1]
portal_blue_s0_mb0 = portal_blue(a_mb0)
wait_s0_mb0_1 = wait((tanh_mb0, portal_blue_s0_mb0), 'cpu/compute', 'cpu/copy')
fork_s0_mb0 = fork(wait_s0_mb0_1)
phony_s0_mb0 = fork_s0_mb0[1]
values_s0_mb0 = fork_s0_mb0[0]
tanh_s0_mb0 = values_s0_mb0[0]
a_s0_mb0 = values_s0_mb0[1]
""",
    )
    assert_expected_inline(
        of_cell("dependencies", Skip(4), cell=(0, 3), **options),
        """\
copy_s3_mb0 = copy((c_s2_mb0,), 'cpu/copy', 'cpu/copy')
c_s3_mb0 = copy_s3_mb0[0]
portal_copy_s3_mb0 = portal_copy(a_s0_mb0, 'cpu/copy', 'cpu/copy')
wait_s3_mb0 = wait((c_s3_mb0, portal_copy_s3_mb0), 'cpu/copy', 'cpu/compute')
c_s3_mb0_1 = wait_s3_mb0[0]
a_s3_mb0 = wait_s3_mb0[1]
portal_orange_s3_mb0 = portal_orange(a_s3_mb0)
stage_3_mb0 = stage_3(c_s3_mb0_1, portal_orange_s3_mb0)
fork_s3_mb0 = fork((stage_3_mb0,))
phony_s3_mb0 = fork_s3_mb0[1]
values_s3_mb0 = fork_s3_mb0[0]
add_s3_mb0 = values_s3_mb0[0]
""",
    )


def test_a_value_with_three_consumers_is_sent_once_to_each():
    # a is used in stages 1, 2 and 4: copied to 1, from there to 2, and from there by a portal to 4.
    model = Chain(6, {0: (2, 4)})
    starts = ["b", "c", "d", "e", "f"]
    gm = after("streams", model, (X,), starts, chunks=1)
    sent = [
        (node.meta[STAGE], node.target.__name__)
        for node in gm.graph.nodes
        if node.target in (ops.copy, ops.portal_copy) and node.meta[STAGE] > 0
    ]
    assert sent == [
        (1, "copy"),
        (2, "copy"),
        (3, "copy"),
        (4, "copy"),
        (4, "portal_copy"),
        (5, "copy"),
    ]
    # The middle one: gets a and b, uses both, and sends a on, hidden, beside its own result.
    assert_expected_inline(
        of_cell("streams", model, starts, (0, 2), chunks=1),
        """\
copy_s2_mb0 = copy((b_s1_mb0, a_s1_mb0_1), 'cpu/copy', 'cpu/copy')
wait_s2_mb0 = wait(copy_s2_mb0, 'cpu/copy', 'cpu/compute')
b_s2_mb0 = wait_s2_mb0[0]
a_s2_mb0 = wait_s2_mb0[1]
stage_2_mb0 = stage_2(b_s2_mb0, a_s2_mb0)
portal_blue_s2_mb0 = portal_blue(a_s2_mb0)
wait_s2_mb0_1 = wait((stage_2_mb0, portal_blue_s2_mb0), 'cpu/compute', 'cpu/copy')
add_s2_mb0 = wait_s2_mb0_1[0]
a_s2_mb0_1 = wait_s2_mb0_1[1]
""",
    )


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("never", set()), ("except_last", {0, 1}), ("always", {0, 1, 2})],
)
def test_checkpoint_modes_say_which_micro_batches(mode, expected):
    gm = after("checkpoint", Chain(2), (X,), ["b"], chunks=3, checkpoint=mode)
    for op in (ops.checkpoint, ops.recompute):
        found = [(n.meta[MICROBATCH], n.meta[STAGE]) for n in gm.graph.nodes if n.target is op]
        assert sorted(found) == [(i, j) for i in sorted(expected) for j in (0, 1)]


def test_stages_have_segments_of_their_own_which_are_checkpointed_one_by_one():
    options = dict(starts=["b"], chunks=1, checkpoint="always", checkpoint_segments=(1, 3))
    assert_expected_inline(
        of_cell("checkpoint", Chain(4), cell=(0, 0), **options),
        """\
copy_s0_mb0 = copy((x_mb0,), 'caller', 'cpu/copy')
wait_s0_mb0 = wait(copy_s0_mb0, 'cpu/copy', 'cpu/compute')
x_s0_mb0 = wait_s0_mb0[0]
stage_0_mb0_module = self.stage_0
checkpoint_s0_mb0 = checkpoint(stage_0_mb0_module, x_s0_mb0)
a_s0_mb0_1 = checkpoint_s0_mb0[0]
handle_s0_mb0 = checkpoint_s0_mb0[1]
wait_s0_mb0_1 = wait((a_s0_mb0_1,), 'cpu/compute', 'cpu/copy')
recompute_s0_mb0 = recompute(wait_s0_mb0_1, handle_s0_mb0)
a_s0_mb0 = recompute_s0_mb0[0]
""",
    )
    assert_expected_inline(
        of_cell("checkpoint", Chain(4), cell=(0, 1), **options),
        """\
copy_s1_mb0 = copy((a_s0_mb0,), 'cpu/copy', 'cpu/copy')
wait_s1_mb0 = wait(copy_s1_mb0, 'cpu/copy', 'cpu/compute')
a_s1_mb0 = wait_s1_mb0[0]
segment_0_mb0_module = self.stage_1_segments.segment_0
checkpoint_s1_mb0 = checkpoint(segment_0_mb0_module, a_s1_mb0)
b_s1_mb0 = checkpoint_s1_mb0[0]
segment_1_mb0_module = self.stage_1_segments.segment_1
checkpoint_s1_mb0_1 = checkpoint(segment_1_mb0_module, b_s1_mb0)
c_s1_mb0 = checkpoint_s1_mb0_1[0]
segment_2_mb0_module = self.stage_1_segments.segment_2
checkpoint_s1_mb0_2 = checkpoint(segment_2_mb0_module, c_s1_mb0)
d_s1_mb0 = checkpoint_s1_mb0_2[0]
handle_s1_mb0_2 = checkpoint_s1_mb0_2[1]
recompute_s1_mb0 = recompute((d_s1_mb0,), handle_s1_mb0_2)
d_s1_mb0_1 = recompute_s1_mb0[0]
""",
    )


def test_recompute_comes_after_the_wait_and_so_before_it_in_the_backward():
    options = dict(starts=["b"], chunks=1, cell=(0, 0))
    assert_expected_inline(
        of_cell("checkpoint", Chain(2), checkpoint="always", **options),
        """\
copy_s0_mb0 = copy((x_mb0,), 'caller', 'cpu/copy')
wait_s0_mb0 = wait(copy_s0_mb0, 'cpu/copy', 'cpu/compute')
x_s0_mb0 = wait_s0_mb0[0]
stage_0_mb0_module = self.stage_0
checkpoint_s0_mb0 = checkpoint(stage_0_mb0_module, x_s0_mb0)
a_s0_mb0_1 = checkpoint_s0_mb0[0]
handle_s0_mb0 = checkpoint_s0_mb0[1]
wait_s0_mb0_1 = wait((a_s0_mb0_1,), 'cpu/compute', 'cpu/copy')
recompute_s0_mb0 = recompute(wait_s0_mb0_1, handle_s0_mb0)
a_s0_mb0 = recompute_s0_mb0[0]
""",
    )
    assert_expected_inline(
        of_cell("checkpoint", Chain(2), checkpoint="never", **options),
        """\
copy_s0_mb0 = copy((x_mb0,), 'caller', 'cpu/copy')
wait_s0_mb0 = wait(copy_s0_mb0, 'cpu/copy', 'cpu/compute')
x_s0_mb0 = wait_s0_mb0[0]
stage_0_mb0 = stage_0(x_s0_mb0)
wait_s0_mb0_1 = wait((stage_0_mb0,), 'cpu/compute', 'cpu/copy')
a_s0_mb0 = wait_s0_mb0_1[0]
""",
    )


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_adjacent_micro_batches_are_tied_by_one_fork_and_join_at_every_stage(checkpoint):
    model = Chain(3)
    gm = after("dependencies", model, (X,), ["b", "c"], chunks=4, checkpoint=checkpoint)
    ties = set()
    for node in gm.graph.nodes:
        if node.target is ops.join:
            phony = node.args[1]
            assert phony.args[1] == 1 and phony.args[0].target is ops.fork
            ties.add((phony.meta[MICROBATCH], node.meta[MICROBATCH], node.meta[STAGE]))
            assert phony.meta[STAGE] == node.meta[STAGE]
    assert ties == {(i, i + 1, stage) for i in range(3) for stage in range(3)}


def test_a_first_stage_joins_at_its_exit_since_nothing_that_enters_has_a_gradient():
    assert_expected_inline(
        of_cell("dependencies", Chain(2), ["b"], (1, 0), chunks=2),
        """\
copy_s0_mb1 = copy((x_mb1,), 'caller', 'cpu/copy')
wait_s0_mb1 = wait(copy_s0_mb1, 'cpu/copy', 'cpu/compute')
x_s0_mb1 = wait_s0_mb1[0]
stage_0_mb1 = stage_0(x_s0_mb1)
wait_s0_mb1_1 = wait((stage_0_mb1,), 'cpu/compute', 'cpu/copy')
join_s0_mb1 = join(wait_s0_mb1_1, phony_s0_mb0)
a_s0_mb1 = join_s0_mb1[0]
""",
    )


def test_an_input_for_a_later_stage_only_is_copied_straight_to_it():
    class Late(Chain):
        def forward(self, x, y):
            return super().forward(x) + y

    gm = after("dependencies", Late(3), (X, X), ["b", "c"], chunks=1)
    copies = [n for n in gm.graph.nodes if n.target is ops.copy and n.args[1] == "caller"]
    assert [(str(n.args[0][0]), n.meta[STAGE]) for n in copies] == [("x_mb0", 0), ("y_mb0", 2)]


def test_outputs_of_several_stages_are_gathered_and_enter_the_backward_together():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            a = self.a(x)
            b = self.b(a)
            return a, b, torch.relu(b)

    assert_expected_inline(
        text("dependencies", Two(), ["b"], 1),
        """\
x: input
x_parts = scatter(x, 0, 1)
x_mb0 = x_parts[0]  # mb 0
copy_s0_mb0 = copy((x_mb0,), 'caller', 'cpu/copy')  # stage 0, mb 0
wait_s0_mb0 = wait(copy_s0_mb0, 'cpu/copy', 'cpu/compute')  # stage 0, mb 0
x_s0_mb0 = wait_s0_mb0[0]  # stage 0, mb 0
stage_0_mb0 = stage_0(x_s0_mb0)  # stage 0, mb 0
wait_s0_mb0_1 = wait((stage_0_mb0,), 'cpu/compute', 'cpu/copy')  # stage 0, mb 0
a_s0_mb0 = wait_s0_mb0_1[0]  # stage 0, mb 0
copy_s1_mb0 = copy((a_s0_mb0,), 'cpu/copy', 'cpu/copy')  # stage 1, mb 0
wait_s1_mb0 = wait(copy_s1_mb0, 'cpu/copy', 'cpu/compute')  # stage 1, mb 0
a_s1_mb0 = wait_s1_mb0[0]  # stage 1, mb 0
stage_1_mb0 = stage_1(a_s1_mb0)  # stage 1, mb 0
b_mb0 = stage_1_mb0[0]  # stage 1, mb 0
relu_mb0 = stage_1_mb0[1]  # stage 1, mb 0
fork_s1_mb0 = fork((a_s1_mb0, b_mb0, relu_mb0))  # stage 1, mb 0
values_s1_mb0 = fork_s1_mb0[0]  # stage 1, mb 0
a_s1_mb0_1 = values_s1_mb0[0]  # stage 1, mb 0
b_s1_mb0 = values_s1_mb0[1]  # stage 1, mb 0
relu_s1_mb0 = values_s1_mb0[2]  # stage 1, mb 0
a_out = gather((a_s1_mb0_1,), 0, x_parts, 0)  # stage 1
b_out = gather((b_s1_mb0,), 0, x_parts, 0)  # stage 1
relu_out = gather((relu_s1_mb0,), 0, x_parts, 0)  # stage 1
return (a_out, b_out, relu_out)
""",
    )


def test_entries_for_inputs_and_outputs_must_be_as_many_as_these():
    gm = Split()(labelled(Chain(2), (X,), ["b"]))
    with pytest.raises(ValueError, match="in_dims has 2 entries for 1 values"):
        Microbatch(2, (0, 0), (0,))(gm)


def test_an_unknown_checkpoint_mode_is_refused():
    with pytest.raises(
        ValueError,
        match=r"'never', 'selective', 'except_last', 'always', 'offload', .always 1/2., .offload",
    ):
        Checkpoint("sometimes")


def test_a_stage_that_keeps_results_of_products_runs_again_where_any_checkpointed_one_does():
    assert_expected_inline(
        of_cell("checkpoint", Chain(2), ["b"], (0, 0), chunks=1, checkpoint="selective"),
        """\
copy_s0_mb0 = copy((x_mb0,), 'caller', 'cpu/copy')
wait_s0_mb0 = wait(copy_s0_mb0, 'cpu/copy', 'cpu/compute')
x_s0_mb0 = wait_s0_mb0[0]
stage_0_mb0_module = self.stage_0
selective_s0_mb0 = selective(stage_0_mb0_module, x_s0_mb0)
a_s0_mb0_1 = selective_s0_mb0[0]
handle_s0_mb0 = selective_s0_mb0[1]
wait_s0_mb0_1 = wait((a_s0_mb0_1,), 'cpu/compute', 'cpu/copy')
recompute_s0_mb0 = recompute(wait_s0_mb0_1, handle_s0_mb0)
a_s0_mb0 = recompute_s0_mb0[0]
""",
    )


def test_activations_on_the_host_come_back_where_a_stage_would_run_again_but_for_the_last():
    options = dict(starts=["b"], chunks=2, checkpoint="offload")
    assert_expected_inline(
        of_cell("checkpoint", Chain(2), cell=(0, 0), **options),
        """\
copy_s0_mb0 = copy((x_mb0,), 'caller', 'cpu/copy')
wait_s0_mb0 = wait(copy_s0_mb0, 'cpu/copy', 'cpu/compute')
x_s0_mb0 = wait_s0_mb0[0]
stage_0_mb0_module = self.stage_0
offloaded_s0_mb0 = offloaded(stage_0_mb0_module, 'cpu/compute', 1.0, x_s0_mb0)
a_s0_mb0_1 = offloaded_s0_mb0[0]
handle_s0_mb0 = offloaded_s0_mb0[1]
wait_s0_mb0_1 = wait((a_s0_mb0_1,), 'cpu/compute', 'cpu/copy')
recompute_s0_mb0 = recompute(wait_s0_mb0_1, handle_s0_mb0)
a_s0_mb0 = recompute_s0_mb0[0]
""",
    )
    assert_expected_inline(
        of_cell("checkpoint", Chain(2), cell=(1, 0), **options),
        """\
copy_s0_mb1 = copy((x_mb1,), 'caller', 'cpu/copy')
wait_s0_mb1 = wait(copy_s0_mb1, 'cpu/copy', 'cpu/compute')
x_s0_mb1 = wait_s0_mb1[0]
stage_0_mb1 = stage_0(x_s0_mb1)
wait_s0_mb1_1 = wait((stage_0_mb1,), 'cpu/compute', 'cpu/copy')
a_s0_mb1 = wait_s0_mb1_1[0]
""",
    )
