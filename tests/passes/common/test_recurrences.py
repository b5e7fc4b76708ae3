"""A recurrent layer of many steps is not run over all of them, and costs what it would."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxpipe
from fxpipe.ir.graph import COST, RANDOM
from passes import Alias, AnalyticCost, Rows
from passes.common import recurrences
from passes.cost.analytic import WORK

ROWS, STEPS = 12, 50
"""Micro-batches have 300 rows and steps: as many as 50 rows of 6 steps, and 25 of 12."""

LAYERS = {
    "GRU": lambda: nn.GRU(5, 7, batch_first=True),
    "GRU in two directions, with dropout": lambda: nn.GRU(
        5, 7, 2, batch_first=True, bidirectional=True, dropout=0.5
    ),
    "RNN": lambda: nn.RNN(5, 7, 3, batch_first=True),
    "RNN without biases": lambda: nn.RNN(5, 7, bias=False, nonlinearity="relu", batch_first=True),
    "LSTM without a kernel": lambda: nn.LSTM(5, 7, 2, batch_first=True).double(),
    "LSTM with a projection": lambda: nn.LSTM(5, 7, batch_first=True, proj_size=3),
}


class Around(nn.Module):
    """A layer whose input is that of another stage."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        y, _ = self.layer(2 * x)
        return 2 * y


def of_layer(layer, x, training=True, chunks=2):
    """The metadata of the node of a layer."""
    gm = Alias((x,), training)(fx.symbolic_trace(Around(layer)))
    gm = AnalyticCost(chunks=chunks, training=training)(Rows((x,), (0,), chunks)(gm))
    return next(node.meta for node in gm.graph.nodes if node.op == "call_module")


@pytest.fixture
def dispatched(monkeypatch):
    """Counts the operators that run on fake tensors."""
    count, before = [0], FakeTensorMode.dispatch

    def dispatch(*args, **kwargs):
        count[0] += 1
        return before(*args, **kwargs)

    monkeypatch.setattr(FakeTensorMode, "dispatch", dispatch)
    return count


@pytest.mark.covering(1)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_it_costs_what_it_costs_when_it_runs_over_all_steps(make, training, monkeypatch):
    x = torch.randn(ROWS, STEPS, 5).to(next((layer := make()).parameters()).dtype)
    short = of_layer(layer, x, training)
    monkeypatch.setattr(recurrences, "RUN", STEPS)
    full = of_layer(layer, x, training)
    for part in "forward", "backward", "rest":
        assert getattr(short[WORK], part) == getattr(full[WORK], part), part
    assert short[COST] == full[COST]
    assert short.get(RANDOM) == full.get(RANDOM)
    of_saved = "saved_inputs", "saved_outputs", "edges", "gradients", "weights", "accumulation"
    assert all(getattr(short[WORK], each) == getattr(full[WORK], each) for each in of_saved)
    assert sum(short[WORK].saved_inside) == sum(full[WORK].saved_inside)


def test_where_numbers_of_rows_and_steps_do_not_divide_a_little_more_memory_is_taken(monkeypatch):
    layer, x = nn.GRU(5, 7, batch_first=True), torch.randn(6, 53, 5)
    short = of_layer(layer, x)[WORK]
    monkeypatch.setattr(recurrences, "RUN", 53)
    full = of_layer(layer, x)[WORK]
    for one, other in (short.forward, full.forward), (short.backward, full.backward):
        # a micro-batch of 3 rows of 53 steps as 14 rows of 12: 5.7 % more of each row and step
        assert other.memory <= one.memory <= 1.06 * other.memory
        assert replace(one, memory=0) == replace(other, memory=0)


def test_more_steps_take_no_longer(dispatched):
    counts = []
    for steps in 40, 400:
        dispatched[0] = 0
        of_layer(nn.GRU(5, 7, batch_first=True), torch.randn(4, steps, 5))
        counts.append(dispatched[0])
    few, many = counts
    assert many < 1.2 * few, "but for what the caches of fake tensors have had"


@pytest.mark.parametrize("layer", ["GRU", "RNN"])
def test_weights_that_it_uses_at_each_step_get_the_bits_of_the_loop(layer):
    around, x = Around(LAYERS[layer]()), torch.randn(ROWS, STEPS, 5)
    reference = copy.deepcopy(around)
    for output in reversed([reference(part) for part in x.chunk(3)]):
        output.square().sum().backward()
    with fxpipe.compile(around, ["cpu"], chunks=3) as pipe:
        pipe(x).square().sum().backward()
    for own, expected in zip(around.parameters(), reference.parameters(), strict=True):
        assert torch.equal(own.grad, expected.grad)


def test_a_layer_with_a_kernel_of_its_own_runs_as_it_is():
    with FakeTensorMode(), recurrences.Recurrences(counts=False):
        y, _ = nn.LSTM(5, 7)(torch.randn(100, 4, 5))
    assert y.grad_fn.name() != "_StandInCallBackward"


@pytest.mark.parametrize("steps", [recurrences.RUN, recurrences.RUN + 1])
def test_few_steps_run_as_they_are(steps):
    with FakeTensorMode(), recurrences.Recurrences(counts=False):
        y, h = nn.GRU(5, 7)(torch.randn(steps, 4, 5))
    assert (y.shape, h.shape) == ((steps, 4, 7), (1, 4, 7))
    assert (y.grad_fn.name() == "_StandInCallBackward") == (steps > recurrences.RUN)


def test_a_packed_sequence_runs_as_it_is():
    layer = nn.GRU(5, 7, batch_first=True)
    packed = nn.utils.rnn.pack_sequence([torch.randn(n, 5) for n in (60, 50, 40)])
    expected, _ = layer(packed)
    with recurrences.Recurrences(counts=False):
        found, _ = layer(packed)
    assert torch.equal(found.data, expected.data)
