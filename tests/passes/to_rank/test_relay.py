"""Values that skip stages go through the stages between, if a runtime knows neighbours only."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from fxpipe.ir.graph import attribute
from fxpipe.ir.printing import format_graph
from passes import Relay, default_chain
from passes.chain import ToStages
from passes.partition.partition import Partition
from tests.zoo import Chain, Tied, same


def staged(model, starts, x):
    """The stage graph."""
    stages = len(starts) + 1
    context = ToStages((x,), (0,), ("cpu",) * stages, Partition(stages, starts))
    gm = torch.fx.symbolic_trace(model)
    for rewrite in default_chain().passes(context):
        gm = rewrite(gm)
    return gm


def test_a_skip_goes_through_the_stages_between():
    model, x = Chain(4, {0: (2, 3)}), torch.randn(2, 3)
    gm = Relay()(staged(model, ["b", "c", "d"], x))
    assert same(gm(x), model(x))
    assert_expected_inline(
        format_graph(gm),
        """\
x: input
stage_0 = stage_0(x)  # stage 0
stage_1 = stage_1(stage_0)  # stage 1
getitem = stage_1[0]  # stage 1
getitem_1 = stage_1[1]  # stage 1
stage_2 = stage_2(getitem, getitem_1)  # stage 2
getitem_2 = stage_2[0]  # stage 2
getitem_3 = stage_2[1]  # stage 2
stage_3 = stage_3(getitem_2, getitem_3)  # stage 3
return stage_3
""",
    )
    assert_expected_inline(
        format_graph(attribute(gm, "stage_1")),
        """\
stage_0: input
stage_1 = stage_1(stage_0)  # stage 1
return (stage_0, stage_1)
""",
    )


class Late(nn.Module):
    """An input that only the last stage uses."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, scale):
        return self.c(self.b(self.a(x))) * scale


def test_an_input_of_the_last_stage_goes_through_all_stages():
    model, x, scale = Late(), torch.randn(2, 3), torch.randn(2, 1)
    context = ToStages((x, scale), (0, 0), ("cpu",) * 3, Partition(3, ["b", "c"]))
    gm = torch.fx.symbolic_trace(model)
    for rewrite in default_chain().passes(context):
        gm = rewrite(gm)
    relayed = Relay()(gm)
    value = (x, scale)
    for stage in relayed.children():
        value = stage(*(value if isinstance(value, tuple) else (value,)))
    assert same(value, model(x, scale))


def test_a_tied_weight_is_refused():
    gm = staged(Tied(), ["other"], torch.randint(11, (2, 4)))
    with pytest.raises(NotImplementedError, match="has no tied weights, so give a partition="):
        Relay()(gm)
