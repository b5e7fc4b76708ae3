from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx, nn

import fxpipe
from fxpipe.ir.graph import STAGE, VALUE
from fxpipe.ir.printing import format_graph
from passes import Alias, Free, Partition, Split
from tests.zoo import gradients, loop, loss_of, same


class Positions(nn.Module):
    """Its second half uses a table of positions, a mask and sizes that the first half has made."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.table = nn.Embedding(9, 4)

    def forward(self, x):
        batch, length = x.size(0), x.size(1)
        positions = torch.arange(length, device=x.device)
        mask = positions[:, None] >= positions[None, :]
        rows = x[:, :1, :1].detach().expand(-1, length, length)
        x = self.a(x).view(batch * length, 4)
        x = self.b(x).view(batch, length, 4) + self.table(positions)
        return (rows * mask.float()) @ x


def stages_of(model, starts, x):
    gm = Partition(len(starts) + 1, starts)(Alias((x,))(fx.symbolic_trace(model)))
    return Split()(Free()(gm))


def test_numbers_are_computed_and_small_tensors_made_and_expanded_where_they_are_used():
    gm = stages_of(Positions(), ["b"], torch.randn(2, 3, 4))
    assert_expected_inline(
        format_graph(gm),
        """\
x: input
stage_0 = stage_0(x)  # stage 0
size = stage_0[0]  # stage 0
size_1 = stage_0[1]  # stage 0
getattr_1 = stage_0[2]  # stage 0
detach = stage_0[3]  # stage 0
view = stage_0[4]  # stage 0
stage_1 = stage_1(view, size, size_1, getattr_1, detach)  # stage 1
return stage_1
""",
    )
    assert_expected_inline(
        format_graph(gm.stage_1),
        """\
view: input
size: input
size_1: input
getattr_1: input
detach: input
b = b(view)  # stage 1
view_1 = .view(b, size, size_1, 4)  # stage 1
arange_1 = arange(size_1, device=getattr_1)  # stage 1
table = table(arange_1)  # stage 1
add = add(view_1, table)  # stage 1
getitem_3 = arange_1[(:, None)]  # stage 1
getitem_4 = arange_1[(None, :)]  # stage 1
ge_1 = ge(getitem_3, getitem_4)  # stage 1
float_1 = .float(ge_1)  # stage 1
expand_1 = .expand(detach, -1, size_1, size_1)  # stage 1
mul_1 = mul(expand_1, float_1)  # stage 1
matmul = matmul(mul_1, add)  # stage 1
return matmul
""",
    )


def test_a_size_is_read_off_a_tensor_that_is_there():
    class Sizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = self.a(x)
            batch = y.size(0)
            return self.b(y).view(batch, 2, 2)

    gm = stages_of(Sizes(), ["b"], torch.randn(3, 4))
    assert_expected_inline(
        format_graph(gm),
        """\
x: input
stage_0 = stage_0(x)  # stage 0
stage_1 = stage_1(stage_0)  # stage 1
return stage_1
""",
    )


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda p: p.add_(1), id="written to"),
        pytest.param(lambda p: p + torch.rand(p.shape).round().long(), id="random"),
        pytest.param(lambda p: p.repeat(1 << 15), id="large"),
    ],
)
def test_what_is_written_to_random_or_large_is_sent(spoil):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            positions = torch.arange(x.size(1))
            positions = spoil(positions)
            return self.b(self.a(x)) + positions[:4]

    gm = stages_of(Model(), ["b"], torch.randn(3, 4))
    arrives = [n.meta[VALUE] for n in gm.stage_1.graph.find_nodes(op="placeholder")]
    assert [tensor.dtype for tensor in arrives] == [torch.float32, torch.int64]


def test_no_stage_is_left_empty():
    class Model(nn.Module):
        def forward(self, x):
            positions = torch.arange(x.size(1))
            return x + positions

    gm = Alias((torch.randn(3, 4),))(fx.symbolic_trace(Model()))
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output"):
            node.meta[STAGE] = 1 if node.name == "add" else 0
    x = torch.randn(5, 4)
    assert same(Split()(Free()(gm))(x), Model()(x))


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_outputs_and_gradients_are_those_of_the_loop(tracer):
    model = Positions()
    with fxpipe.compile(
        model,
        ["cpu"] * 2,
        chunks=3,
        tracer=tracer,
        partition=["b"] if tracer == "symbolic" else "auto",
    ) as pipe:
        for shape in ((6, 3, 4), (7, 5, 4)):
            x = torch.randn(shape)
            expected = loop(model, (x,), 3)
            model.zero_grad()
            output = pipe(x)
            loss_of(output).backward()
            actual = [output.detach(), *gradients(model)]
            tolerance = 0 if tracer == "symbolic" else 1e-5
            torch.testing.assert_close(
                actual, [expected[0], *expected[1]], rtol=tolerance, atol=tolerance
            )
