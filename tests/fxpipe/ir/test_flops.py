"""The work of operators that run on real tensors, and of what stands for them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fxpipe.ir.flops import PerformedWork, computed
from passes.cost.load import Counting, Load

FLOAT, ID = 4, 8  # bytes


def test_flops_operators_and_the_bytes_that_they_move_are_counted_and_views_are_none():
    x, weight = torch.ones(3, 5), torch.ones(7, 5)
    with PerformedWork() as work:
        torch.mm(x, weight.t()).relu()
    assert work.flops == 2 * 3 * 5 * 7
    assert work.operators == 2, "the transposed weight is a view"
    assert work.size == FLOAT * (3 * 5 + 5 * 7 + 3 * 7) + FLOAT * 2 * (3 * 7)


def test_of_a_table_only_the_rows_that_are_looked_up_are_read():
    ids, table = torch.zeros(6, dtype=torch.int64), torch.ones(10_000, 8)
    with PerformedWork() as work:
        F.embedding(ids, table)
    assert work.size == ID * 6 + FLOAT * 2 * (6 * 8)


def test_what_stands_for_work_counts_as_much_and_twice_as_much_backward():
    value, load = torch.ones(2, requires_grad=True), Load()
    with Counting(load):
        made = computed(value, 100, 10, 1000)
    ahead = load.flops, load.operators - 1, load.bytes - FLOAT * 4  # without its own copy
    assert ahead == (100, 10, 1000)
    gradient, back = torch.ones(2), Load()
    with Counting(back):
        torch.autograd.grad(made, value, gradient)
    assert (back.flops, back.operators - 1, back.bytes - FLOAT * 4) == (200, 20, 2000)
