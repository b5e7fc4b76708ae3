"""The work of operators that run on real tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fxpipe.ir.load import Counting, Load

FLOAT, ID = 4, 8  # bytes


def test_flops_operators_and_the_bytes_that_they_move_are_counted_and_views_are_none():
    x, weight = torch.ones(3, 5), torch.ones(7, 5)
    work = Load()
    with Counting(work):
        torch.mm(x, weight.t()).relu()
    assert work.flops == 2 * 3 * 5 * 7
    assert work.operators == 2, "the transposed weight is a view"
    assert work.bytes == FLOAT * (3 * 5 + 5 * 7 + 3 * 7) + FLOAT * 2 * (3 * 7)


def test_of_a_table_only_the_rows_that_are_looked_up_are_read():
    ids, table = torch.zeros(6, dtype=torch.int64), torch.ones(10_000, 8)
    work = Load()
    with Counting(work):
        F.embedding(ids, table)
    assert work.bytes == ID * 6 + FLOAT * 2 * (6 * 8)
