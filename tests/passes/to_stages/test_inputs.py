"""What a model writes to its inputs, the caller sees."""

from __future__ import annotations

import copy

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import fxpipe
from fxpipe.ir.printing import format_graph
from passes import Alias, InputError, WrittenInputs
from tests.zoo import gradients, loss_of, parts, same


class Writes(nn.Module):
    """Writes to a part of its input by way of views, and reads it before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.b(torch.tanh(self.a(x * 2)))
        x[:, 1:].view(-1, 3)[:, 0].mul_(3)
        return y * x


def test_an_input_is_copied_and_written_back():
    x = torch.randn(2, 4)
    gm = torch.fx.symbolic_trace(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)))
    gm = WrittenInputs((x,), (0,))(Alias((x,))(gm))
    assert_expected_inline(
        format_graph(gm),
        """\
input_1: input
input_1_own = clone(input_1)
_0 = 0(input_1_own)
_1 = 1(_0)
input_1_back = write_back(input_1, 0, (_0,))
return _1
""",
    )
    seen = x.clone()
    gm(seen)
    assert same(seen, torch.relu(x))


def test_what_is_not_written_to_is_left_alone():
    gm, x = torch.fx.symbolic_trace(nn.Linear(4, 4)), torch.ones(2, 4)
    before = format_graph(gm)
    assert format_graph(WrittenInputs((x,), (0,))(Alias((x,))(gm))) == before


@pytest.mark.covering(1)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("stages", [1, 2])
def test_values_and_gradients_are_those_of_the_loop(stages, checkpoint):
    model, x = Writes(), torch.randn(5, 4)
    reference, seen = copy.deepcopy(model), x.clone()
    rows = parts(x.clone(), 2)
    rows = [row.clone() for row in rows]
    outputs = [reference(row) for row in rows]
    for output in reversed(outputs):
        loss_of(output).backward()
    with fxpipe.compile(model, ["cpu"] * stages, chunks=2, checkpoint=checkpoint) as pipe:
        output = pipe(seen)
        loss_of(output).backward()
    assert same(output.detach(), torch.cat(outputs).detach())
    assert same(gradients(model), gradients(reference))
    assert same(seen, torch.cat(rows))


def test_the_history_of_an_input_goes_on_behind_the_model():
    model, x = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), torch.randn(4, 4)
    for run in (lambda t: pipe(t), model):
        leaf = x.clone().requires_grad_()
        seen = leaf * 2
        with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
            out = run(seen)
        (out.sum() + (seen * 5).sum()).backward()
        torch.testing.assert_close(
            leaf.grad, (10 + 2 * model[1].weight.sum(0)) * (x > 0), rtol=1e-5, atol=1e-5
        )


def test_a_leaf_that_needs_a_gradient_is_refused_as_by_the_model():
    model, x = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), torch.randn(4, 4)
    x.requires_grad_()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        for run in (model, pipe):
            with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
                run(x)


def test_an_input_that_all_micro_batches_share_is_refused():
    class Table(nn.Module):
        def forward(self, x, table):
            return x + table.add_(1)

    x, table = torch.randn(4, 3), torch.zeros(3)
    with (
        fxpipe.compile(Table(), ["cpu"], chunks=2, in_dims=(0, None)) as pipe,
        pytest.raises(InputError, match="'add_' writes to the input 'table', which has no batch"),
    ):
        pipe(x, table)
    with fxpipe.compile(Table(), ["cpu"], chunks=1, in_dims=(0, None)) as pipe:
        assert same(pipe(x, table), x + 1)
        assert same(table, torch.ones(3))
