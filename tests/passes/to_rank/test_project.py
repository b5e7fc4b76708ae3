"""From the graph of all stages to those of ranks."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import nn

from fxpipe import ops
from fxpipe.ir.printing import format_graph
from fxpipe.runtime.lanes import run_inline
from fxpipe.runtime.program import lower
from fxpipe.schedule import named
from passes import Project, Step, default_chain
from passes.chain import ToStages
from passes.partition.partition import Partition
from passes.verify.transfers import verify
from tests.passes.to_rank.played import played
from tests.zoo import Chain, Tied, after, gradients, same

X = torch.ones(4, 3)
TOKENS = torch.arange(24).view(4, 6) % 11


class Sum(nn.Module):
    def forward(self, output, target):
        return output.sum()


def step(model, starts, schedule="1f1b", microbatches=1, inputs=(X,), places=(), **options):
    """The step graph; with ``places``, that of stages in several processes."""
    stages = len(starts) + 1
    if isinstance(schedule, str):
        schedule = named(schedule, lanes=stages, microbatches=microbatches)
    context = ToStages(
        inputs,
        (0,),
        ("cpu",) * stages,
        Partition(stages, starts),
        chunks=microbatches,
        places=places,
    )
    gm = torch.fx.symbolic_trace(model)
    for rewrite in default_chain().passes(context):
        gm = rewrite(gm)
    return Step(
        loss=Sum(),
        schedule=schedule,
        devices=("cpu",) * stages,
        in_dims=(0,),
        **options,
    )(gm)


def projected(gm, ranks, **options):
    """The graphs of all ranks, which fit together."""
    graphs = [Project(ranks, rank, **options)(gm) for rank in range(1 + max(ranks))]
    verify(graphs)
    return graphs


def text(graph):
    """A graph as text, without the comments that say where nodes belong."""
    return "\n".join(line.partition("  #")[0] for line in format_graph(graph).splitlines()) + "\n"


def test_what_goes_to_another_rank_is_transmitted_here_and_received_there():
    first, last = projected(step(Chain(2), ["b"]), (0, 1))
    assert_expected_inline(
        text(first),
        """\
transport: input
x: input
x_parts = scatter(x, 0, 1)
scale: input = None
optimizer: input = None
x_mb0 = x_parts[0]
send_s0_mb0 = send((x_mb0,), 'caller', 'cpu/copy')
wait_s0_mb0 = wait(send_s0_mb0, 'cpu/copy', 'cpu/compute')
x_s0_mb0 = wait_s0_mb0[0]
stage_0_mb0_module = self.stage_0
forward_s0_mb0 = forward(stage_0_mb0_module, (x_s0_mb0,), (), True, False)
results_s0_mb0 = forward_s0_mb0[0]
tape_s0_mb0 = forward_s0_mb0[1]
stage_0_s0_mb0 = results_s0_mb0[0]
wait_s0_mb0_1 = wait((stage_0_s0_mb0,), 'cpu/compute', 'cpu/copy')
transmit_wait_s0_mb0_1 = transmit(transport, wait_s0_mb0_1, (0, 1), 0)
receive_wait_s1_mb0_1 = receive(transport, (1, 0), 0)
arrived_wait_s1_mb0_1 = arrived(receive_wait_s1_mb0_1)
send_s0_mb0_1 = send(arrived_wait_s1_mb0_1, 'cpu/copy', 'cpu/copy')
wait_s0_mb0_2 = wait(send_s0_mb0_1, 'cpu/copy', 'cpu/compute')
grad_stage_0_s0_mb0 = wait_s0_mb0_2[0]
backward_s0_mb0 = backward(tape_s0_mb0, (grad_stage_0_s0_mb0,))
stage_0_mb0_module_1 = self.stage_0
optimize_s0_mb0 = optimize(optimizer, stage_0_mb0_module_1, ())
receive_output = receive(transport, (1, 0), 1)
arrived_output = arrived(receive_output)
return arrived_output
""",
    )
    assert_expected_inline(
        text(last),
        """\
transport: input
x: input
x_parts = scatter(x, 0, 1)
scale: input = None
optimizer: input = None
weights = weights(x_parts, 0)
receive_wait_s0_mb0_1 = receive(transport, (0, 1), 0)
arrived_wait_s0_mb0_1 = arrived(receive_wait_s0_mb0_1)
send_s1_mb0 = send(arrived_wait_s0_mb0_1, 'cpu/copy', 'cpu/copy')
wait_s1_mb0 = wait(send_s1_mb0, 'cpu/copy', 'cpu/compute')
stage_0_s1_mb0 = wait_s1_mb0[0]
stage_1_mb0_module = self.stage_1
forward_s1_mb0 = forward(stage_1_mb0_module, (stage_0_s1_mb0,), (), True, False)
results_s1_mb0 = forward_s1_mb0[0]
tape_s1_mb0 = forward_s1_mb0[1]
stage_1_s1_mb0 = results_s1_mb0[0]
loss_mb0_module = self.loss
stage_0_module = self.stage_0
stage_0_elsewhere = elsewhere(stage_0_module)
loss_s1_mb0 = loss(loss_mb0_module, stage_1_s1_mb0, (), 0, (stage_0_elsewhere, tape_s1_mb0))
loss_value_s1_mb0 = loss_s1_mb0[0]
tape_s1_mb0_1 = loss_s1_mb0[1]
weight_mb0 = weights[0]
loss_backward_s1_mb0 = loss_backward(tape_s1_mb0_1, weight_mb0, scale)
backward_s1_mb0 = backward(tape_s1_mb0, (loss_backward_s1_mb0,))
grad_stage_0_s1_mb0 = backward_s1_mb0[0]
wait_s1_mb0_1 = wait((grad_stage_0_s1_mb0,), 'cpu/compute', 'cpu/copy')
transmit_wait_s1_mb0_1 = transmit(transport, wait_s1_mb0_1, (1, 0), 0)
stage_1_mb0_module_1 = self.stage_1
optimize_s1_mb0 = optimize(optimizer, stage_1_mb0_module_1, ())
loss_all = average((loss_value_s1_mb0,), weights)
transmit_output = transmit(transport, (loss_all, (loss_value_s1_mb0,)), (1, 0), 1)
return (loss_all, (loss_value_s1_mb0,))
""",
    )


def test_outputs_are_gathered_on_the_last_rank_and_go_to_all_or_nowhere():
    gm = after("microbatch", Chain(2), (X,), ["b"], chunks=2)
    assert_expected_inline(
        "\n".join(map(text, projected(gm, (0, 1)))),
        """\
transport: input
x: input
x_parts = scatter(x, 0, 2)
x_mb0 = x_parts[0]
x_mb1 = x_parts[1]
stage_0_mb0 = stage_0(x_mb0)
transmit_stage_0_mb0 = transmit(transport, stage_0_mb0, (0, 1), 0)
stage_0_mb1 = stage_0(x_mb1)
transmit_stage_0_mb1 = transmit(transport, stage_0_mb1, (0, 1), 1)
receive_output = receive(transport, (1, 0), 0)
arrived_output = arrived(receive_output)
return arrived_output

transport: input
x: input
x_parts = scatter(x, 0, 2)
receive_stage_0_mb0 = receive(transport, (0, 1), 0)
receive_stage_0_mb1 = receive(transport, (0, 1), 1)
arrived_stage_0_mb0 = arrived(receive_stage_0_mb0)
stage_1_mb0 = stage_1(arrived_stage_0_mb0)
arrived_stage_0_mb1 = arrived(receive_stage_0_mb1)
stage_1_mb1 = stage_1(arrived_stage_0_mb1)
b_out = gather((stage_1_mb0, stage_1_mb1), 0, x_parts, 0)
transmit_output = transmit(transport, b_out, (1, 0), 0)
return b_out
""",
    )
    first, last = projected(gm, (0, 1), everywhere=False)
    assert text(first).endswith("return None\n") and text(last).endswith("return b_out\n")
    assert not last.graph.find_nodes(op="call_function", target=ops.transmit)


class Skipping(Chain):
    """The second stage does not use what goes from the first to the third."""

    def forward(self, x):
        x = self.a(x)
        skip = torch.tanh(x)
        return self.c(self.b(torch.sin(x))) + skip


def test_a_skip_goes_straight_to_the_rank_that_uses_it_and_its_gradient_comes_straight_back():
    graphs = projected(step(Skipping(3), ["b", "c"]), (0, 1, 2))
    sent = [
        [node.args[2] for node in graph.graph.find_nodes(op="call_function", target=ops.transmit)]
        for graph in graphs
    ]
    loss = [(2, 0), (2, 1)]
    assert sent == [[(0, 1), (0, 2)], [(1, 2), (1, 0)], [(2, 0), (2, 1), *loss]]


def test_a_tied_weight_goes_to_the_other_rank_once_and_its_gradient_comes_back_once():
    gm = step(Tied(), ["other"], microbatches=3, inputs=(TOKENS,), places=(0, 1))
    first, _ = projected(gm, (0, 1))
    lines = [line for line in text(first).splitlines() if "weight" in line or "bias" in line]
    assert_expected_inline(
        "\n".join(lines),
        """\
mix_weight = self.mix.weight
transmit_mix_weight = transmit(transport, mix_weight, (0, 1), 2)
mix_bias = self.mix.bias
transmit_mix_bias = transmit(transport, mix_bias, (0, 1), 3)
embed_weight = self.embed.weight
transmit_embed_weight = transmit(transport, embed_weight, (0, 1), 4)
mix_weight_s1_grad_s0_mb2 = wait_s0_mb2_3[0]
mix_weight_s1_accumulate_s0_mb2 = accumulate(mix_weight, mix_weight_s1_grad_s0_mb2)
mix_bias_s1_grad_s0_mb2 = wait_s0_mb2_4[0]
mix_bias_s1_accumulate_s0_mb2 = accumulate(mix_bias, mix_bias_s1_grad_s0_mb2)
embed_weight_s1_grad_s0_mb2 = wait_s0_mb2_5[0]
embed_weight_s1_accumulate_s0_mb2 = accumulate(embed_weight, embed_weight_s1_grad_s0_mb2)""",
    )


def test_seeds_are_those_of_the_first_rank_and_the_others_draw_as_many():
    class Dropping(Chain):
        def forward(self, x):
            return torch.nn.functional.dropout(super().forward(x), 0.5, self.training)

    graphs = projected(step(Dropping(2), ["b"], microbatches=2), (0, 1))
    lines = [[line for line in text(g).splitlines() if "seed" in line] for g in graphs]
    assert_expected_inline(
        "\n\n".join(map("\n".join, lines)),
        """\
seeds = seeds(2)
transmit_seeds = transmit(transport, seeds, (0, 1), 0)

unused_seeds = seeds(2)
receive_seeds = receive(transport, (0, 1), 0)
arrived_seeds = arrived(receive_seeds)
seed_mb0 = arrived_seeds[0]
forward_s1_mb0 = forward(stage_1_mb0_module, (stage_0_s1_mb0, seed_mb0), (), True, False)
seed_mb1 = arrived_seeds[1]
forward_s1_mb1 = forward(stage_1_mb1_module, (stage_0_s1_mb1, seed_mb1), (), True, False)""",
    )


def test_ranks_give_the_bits_of_one_process():
    model = Tied()
    gm = step(model, ["other"], "zb_h1", 3, (TOKENS,), places=(0, 1), checkpoint="always")
    with torch.no_grad():
        alone = run_inline(lower(gm), [TOKENS, None, None])
    expected = gradients(model)
    model.zero_grad()
    assert same(played(projected(gm, (0, 1)), [TOKENS, None, None]), [alone, alone])
    assert same(gradients(model), expected)
