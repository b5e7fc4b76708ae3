"""Slices of everything are taken out of exported graphs where they are steps of an index."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from fxpipe.trace import trace
from tests.fxpipe.trace.small import run


class Indexes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        first = x[:, 0] + x[:, 1:, None].sum(1)[:, 0]
        every = x[:]
        written = torch.zeros_like(x)
        written[:, 1] = first
        return first[:, None] + every + written


def test_a_slice_of_everything_is_taken_out_where_the_next_step_of_an_index_follows() -> None:
    x = torch.arange(24.0).view(4, 6)
    traced = trace(Indexes(), (x,), tracer="export")
    assert torch.equal(run(traced, x), Indexes()(x))
    lines = traced.graph_module.code.split("\n")
    found = [line.split(";")[0].strip() for line in lines if "slice" in line or "select" in line]
    assert_expected_inline(
        "\n".join(found),
        """\
select = torch.ops.aten.select.int(x, 1, 0)
slice_3 = torch.ops.aten.slice.Tensor(x, 1, 1, 9223372036854775807)
unsqueeze = torch.ops.aten.unsqueeze.default(slice_3, 2)
select_1 = torch.ops.aten.select.int(sum_1, 1, 0)
add = torch.ops.aten.add.Tensor(select, select_1)
slice_5 = torch.ops.aten.slice.Tensor(x, 0, 0, 9223372036854775807)
select_2 = torch.ops.aten.select.int(zeros_like, 1, 1)
copy_ = torch.ops.aten.copy_.default(select_2, add)
add_1 = torch.ops.aten.add.Tensor(unsqueeze_1, slice_5)""",
    )
