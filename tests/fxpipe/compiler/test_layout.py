"""What is traced later is cut like what was cut first."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.ir.graph import STAGE, stage_nodes
from tests.passes.partition.test_problem import random_cut
from tests.zoo import gradients, outputs_of_loop, same


class Ways(nn.Module):
    """What its nodes are called depends on the arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, *more, mask=None, scale=1):
        y = self.a(x)
        for each in more:
            y = y + each
        if mask is not None:
            y = y * mask
        return self.b(y) * scale


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_a_model_that_goes_another_way_is_cut_at_the_same_parameters(tracer):
    model, x = Ways(), torch.randn(6, 3)
    calls = [
        lambda call: call(x, x, x, mask=x, scale=2),
        lambda call: call(x),
        lambda call: call(x, x),
        lambda call: call(x, mask=x),
    ]
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer=tracer) as pipe:
        modes = []
        for call in calls * 2:
            torch.testing.assert_close(call(pipe), call(model))
            modes.append(pipe.model_graph)
            assert [list(dict(s.module.named_parameters())) for s in pipe.stages] == [
                ["a.weight", "a.bias"],
                ["b.weight", "b.bias"],
            ]
    assert modes[:4] == modes[4:]  # nothing has been compiled twice


def test_names_that_would_move_a_parameter_are_not_gone_by():
    class Swaps(Ways):
        def forward(self, x, swap=False):
            one, other = (self.b, self.a) if swap else (self.a, self.b)
            return F.linear(F.linear(x, one.weight, one.bias), other.weight, other.bias)

    model, x = Swaps(), torch.randn(6, 3)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        for swap in (False, True, False):
            assert same(pipe(x, swap), torch.cat([model(part, swap) for part in x.split(3)]))
            first = "b.weight" if swap else "a.weight"
            assert first in dict(pipe.stages[0].module.named_parameters())


class Heads(nn.Module):
    """Every block reads the first value; in one of the two modes heads read it as well."""

    def __init__(self, depth: int, in_train_mode: bool) -> None:
        super().__init__()
        self.stem, self.out = nn.Linear(6, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(depth))
        self.heads = nn.ModuleList(nn.Linear(6, 2) for _ in range(depth))
        self.others = nn.ModuleList(nn.Linear(6, 2) for _ in range(depth))
        self.in_train_mode = in_train_mode

    def forward(self, x):
        y = x = torch.tanh(self.stem(x))
        found = []
        for block, head, other in zip(self.blocks, self.heads, self.others, strict=True):
            y = torch.tanh(block(y)) + x
            if self.training == self.in_train_mode:
                found += [head(y), other(x)]
        return [self.out(y), *found]


def total(outputs):
    return sum(torch.sin(output).sum() for output in outputs)


@pytest.mark.covering(1)
@pytest.mark.parametrize("cut", ["auto", random_cut(3, 2)], ids=["auto", "random"])
@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("first", [True, False], ids=["train first", "eval first"])
def test_a_mode_with_more_users_of_a_value_sums_its_gradients_in_its_own_order(first, depth, cut):
    """The cut of the mode without heads says nothing about where the heads' gradients come in."""
    torch.manual_seed(depth)
    model, x = Heads(depth, in_train_mode=not first), torch.randn(4, 6)
    reference = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 3, chunks=2, partition=cut) as pipe:
        homes: dict[str, int] = {}
        for training in (first, not first, first):
            for each in (model, reference):
                each.train(training).zero_grad()
            outputs = pipe(x)
            total(outputs).backward()
            expected = outputs_of_loop(reference, (x,), 2)
            for part in reversed(expected):
                total(part).backward()
            assert same(outputs, [torch.cat(parts) for parts in zip(*expected, strict=True)])
            assert same(gradients(model), gradients(reference))
            for stage in pipe.stages:
                for path, _ in stage.module.named_parameters():
                    assert homes.setdefault(path, stage.index) == stage.index, "it has moved"


class Waves(nn.Module):
    """Two users of one value; in the second mode the value is an output as well, and has three."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        y = self.stem(x)
        z = self.head(y.sin() * 3 + y.cos() * 7)
        return [z] if self.training else [z, y]


CROSSED = {"stem": 0, "cos": 0, "sin": 1, "head": 1}  # the second user is in the earlier stage


def test_names_that_would_sum_gradients_in_another_order_are_not_gone_by():
    model, x = Waves(), torch.randn(64, 6)
    reference = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, partition=CROSSED, tracer="symbolic") as pipe:
        pipe(x)
        assert stages_of_nodes(pipe)["cos"] < stages_of_nodes(pipe)["sin"], "two may be crossed"
        for each in (model, reference):
            each.eval()
        total(pipe(x)).backward()
        for part in reversed(outputs_of_loop(reference, (x,), 2)):
            total(part).backward()
        assert stages_of_nodes(pipe)["cos"] >= stages_of_nodes(pipe)["sin"]
    assert same(gradients(model), gradients(reference))


def test_a_users_own_cut_that_sums_gradients_in_another_order_is_kept():
    model, x = Waves().eval(), torch.randn(4, 6)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, partition=CROSSED, tracer="symbolic") as pipe:
        for training in (False, True):
            model.train(training)
            pipe(x)
            assert stages_of_nodes(pipe)["cos"] < stages_of_nodes(pipe)["sin"]
            pipe.recompile()
            pipe(x)
            assert stages_of_nodes(pipe)["cos"] < stages_of_nodes(pipe)["sin"]


def stages_of_nodes(pipe):
    return {node.name: node.meta[STAGE] for node in stage_nodes(pipe.model_graph.graph)}
