"""Gradients of a parameter that several devices use are added up in one order."""

from __future__ import annotations

import itertools

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import fxpipe
from fxpipe import ops
from fxpipe.ir.printing import format_graph
from tests.zoo import Tied

X = torch.tensor([[1, 2], [3, 4]])


def tied(**options) -> fxpipe.Pipeline:
    """One weight at the first and the last layer, which are on two devices."""
    model = Tied()
    return fxpipe.compile(
        model, ["cpu", "cpu:0"], chunks=2, partition=["head"], example_inputs=(X,), **options
    )


def test_the_stage_where_a_parameter_lives_is_given_a_view_as_every_other_stage_is():
    with tied() as pipe:
        lines = [line.partition("  #")[0] for line in format_graph(pipe.graph).splitlines()]
        assert_expected_inline(
            "\n".join(line for line in lines if "embed_weight" in line),
            """\
embed_weight = self.embed.weight
embed_weight_lent = lend(embed_weight, 2)
embed_weight_lent_0 = embed_weight_lent[0]
embed_weight_lent_1 = embed_weight_lent[1]
embed_weight_s0 = bring(embed_weight_lent_0, 'cpu/copy', 'cpu/compute')
embed_weight_s1 = bring(embed_weight_lent_1, 'cpu:0/copy', 'cpu:0/compute')
stage_0_mb0 = stage_0_given(tokens_s0_mb0, embed_weight_s0)
stage_0_mb1 = stage_0_given(tokens_s0_mb1, embed_weight_s0)
stage_1_mb0 = stage_1(embed_weight_s1, mix_1_s1_mb0)
stage_1_mb1 = stage_1(embed_weight_s1, mix_1_s1_mb1)""",
        )
        stage = format_graph(pipe.graph_module.get_submodule("stage_0_given")).splitlines()
        assert_expected_inline(
            "\n".join(stage[:5]),
            """\
tokens: input
embed_weight: input
embed_weight_shared = share(embed_weight)  # stage 0
embed_module = self.embed
embed = call(embed_module, {'weight': embed_weight_shared}, tokens)  # stage 0""",
        )


def test_nothing_is_lent_where_there_is_no_backward():
    with tied(training=False) as pipe:
        assert not pipe.graph.find_nodes(op="call_function", target=ops.lend)


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_whichever_gradient_comes_first_the_sum_has_the_same_bits(order):
    """Autograd runs first what was made last."""
    parameter = nn.Parameter(torch.ones(1))
    views = ops.lend(parameter, 3)
    gradients = torch.tensor([1.0, 1e8, -1e8])  # (1 + 1e8) - 1e8 is 0, and 1 + (1e8 - 1e8) is 1
    uses = {i: views[i] * gradients[i] for i in order}
    torch.stack([uses[i] for i in range(3)]).sum().backward()
    assert parameter.grad.item() == 0


def test_a_view_that_nobody_uses_adds_nothing():
    parameter = nn.Parameter(torch.ones(2))
    own, _ = ops.lend(parameter, 2)
    (own * 3).sum().backward()
    assert parameter.grad.tolist() == [3, 3]


def test_sparse_gradients_meet_dense_ones():
    table = nn.Parameter(torch.ones(3, 2))
    own, other = ops.lend(table, 2)
    rows = nn.functional.embedding(torch.tensor([1]), own, sparse=True)
    (rows.sum() + other.sum()).backward()
    assert table.grad.to_dense().tolist() == [[1, 1], [2, 2], [1, 1]]
