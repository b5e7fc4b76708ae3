from __future__ import annotations

import copy

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.ir.graph import COST, stage_nodes
from fxpipe.runtime.lanes import threads_of_a_lane
from passes import Alias, AnalyticCost, Rows
from passes.cost import measured as measure_module
from passes.cost.measured import MeasuredCost
from passes.cost.timer import HostTimer
from tests.zoo import MODELS, same


def measured(model, *inputs, **options):
    gm = Alias(inputs)(fx.symbolic_trace(model))
    MeasuredCost(inputs, budget_s=0.2, **options)(gm)
    return {n.name: n.meta[COST] for n in stage_nodes(gm.graph)}


@pytest.mark.parametrize("name", MODELS)
def test_every_node_that_does_something_takes_time(name):
    make, inputs = MODELS[name]
    found = measured(make(), *inputs(4))
    assert all(cost.forward_s > 0 for cost in found.values())
    gm = AnalyticCost()(Alias(inputs(4))(fx.symbolic_trace(make())))
    estimated = {n.name: n.meta[COST] for n in stage_nodes(gm.graph)}
    for node, cost in found.items():
        assert cost.backward_s > 0 or estimated[node].backward_s == 0
        assert cost.flops == estimated[node].flops
        assert cost.activation_bytes == estimated[node].activation_bytes


def test_what_takes_longer_costs_more():
    layers = [nn.Linear(1024, 1024), nn.Linear(1024, 8), nn.Linear(8, 8)]
    found = measured(nn.Sequential(*layers), torch.randn(256, 1024))
    assert found["_0"].seconds > 3 * found["_2"].seconds


def test_equal_nodes_cost_the_same():
    found = measured(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), torch.randn(4, 8))
    assert found["_1"].seconds == found["_2"].seconds == found["_3"].seconds


class RunAgain(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_forward_hook(lambda *_: None)  # which makes it a node

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=True)


def test_a_backward_that_must_accumulate_counts_as_two_forwards():
    model, x = nn.Sequential(nn.Linear(3, 3), RunAgain()), torch.randn(4, 3)
    with fxpipe.compile(model, ["cpu"] * 2, example_inputs=(x,), costs="measured") as pipe:
        cost = pipe.stages[1].cost
    assert cost.backward_s == pytest.approx(2 * cost.forward_s) and cost.forward_s > 0


class TooLarge(nn.Module):
    """Its backward needs more memory than there is."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise torch.OutOfMemoryError("there is no more")

    def forward(self, x):
        return self.Function.apply(x)


@pytest.mark.parametrize("kind", [AnalyticCost, MeasuredCost])
def test_a_backward_that_needs_more_memory_than_there_is_is_not_estimated(kind):
    graph, x = fx.Graph(), torch.randn(4, 3)
    node = graph.placeholder("x")
    for name in "01":
        node = graph.call_module(name, (node,))
    graph.output(node)
    gm = fx.GraphModule(nn.Sequential(nn.Linear(3, 3), TooLarge()), graph)
    options = {} if kind is AnalyticCost else {"inputs": (x,)}
    with pytest.raises(torch.OutOfMemoryError, match="there is no more"):
        kind(**options)(Alias((x,))(gm))


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_as_it_was(name):
    make, inputs = MODELS[name]
    model, x = make(), inputs(4)
    before, state = copy.deepcopy(model), torch.get_rng_state()
    measured(model, *x)
    assert same([*model.parameters(), *model.buffers()], [*before.parameters(), *before.buffers()])
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_buffer_that_is_only_read_is_not_written_to():
    """A backward of the user's may need it with its version."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval())
    versions = [buffer._version for buffer in model.buffers()]
    measured(model, torch.randn(8, 4))
    assert [buffer._version for buffer in model.buffers()] == versions


def test_the_first_round_only_warms_up(monkeypatch):
    rounds = []

    def finish(timer):
        rounds.append(timer)
        while timer.tapes:
            timer.tapes.pop()
        seconds = (9.0, 9.0, 9.0) if len(rounds) == 1 else (1.0, 2.0, 0.0)
        return dict.fromkeys(stage_nodes(timer.module.graph), seconds)

    monkeypatch.setattr(measure_module._TimingInterpreter, "finish", finish)
    found = measured(nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2))
    assert len(rounds) == 1 + measure_module.ROUNDS
    assert (found["_0"].forward_s, found["_0"].backward_s) == (1.0, 2.0)


def test_without_time_for_another_round_the_first_one_counts():
    gm = Alias((torch.ones(1, 2),))(fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2))))
    MeasuredCost((torch.ones(1, 2),), budget_s=0.0)(gm)
    assert all(n.meta[COST].forward_s > 0 for n in stage_nodes(gm.graph))


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_shown_beside_what_is_printed_and_on_a_terminal_only(
    is_terminal, monkeypatch, capsys
):
    monkeypatch.setenv("FORCE_COLOR" if is_terminal else "NO_COLOR", "1")
    measured(nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2))
    said = capsys.readouterr()
    assert said.out == ""
    assert ("measuring" in said.err) == is_terminal


def test_writes_are_done_to_copies():
    x = torch.ones(4, 4)
    measured(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), -x)
    found = measured(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), x)
    assert found["_1"].backward_s > 0
    assert torch.equal(x, torch.ones(4, 4))


class Watched(nn.Module):
    """Notes how many rows it is given, and takes as long for one as for many."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.rows = set()

    def forward(self, x):
        self.rows.add(len(x))
        return self.linear(x)


@pytest.mark.parametrize("dims, rows, times", [((0,), 3, 4), (None, 12, 1)])
def test_one_micro_batch_is_measured_for_all_of_them(monkeypatch, dims, rows, times):
    class Leaves(fx.Tracer):
        def is_leaf_module(self, module, name):
            return True

    monkeypatch.setattr(HostTimer, "time", lambda timer, key, run: (run(), 1.0))
    model, x = nn.Sequential(Watched()), torch.ones(12, 4)
    gm = Rows((x,), (0,), 4)(Alias((x,))(fx.GraphModule(model, Leaves().trace(model))))
    model[0].rows.clear()
    MeasuredCost((x,), budget_s=0.0, chunks=4, in_dims=dims)(gm)
    (cost,) = (n.meta[COST] for n in stage_nodes(gm.graph))
    assert rows in model[0].rows
    assert (cost.forward_s, cost.accumulation_s) == (times, 1.0)
    assert cost.backward_s == times + (times - 1), "gradients are added to those that are there"


def test_sparse_gradients_are_not_accumulated_at_the_size_of_their_table():
    ids = torch.zeros(4, dtype=torch.long)
    for is_sparse in (False, True):
        (cost,) = measured(nn.Sequential(nn.Embedding(9, 4, sparse=is_sparse)), ids).values()
        assert (cost.accumulation_s > 0) != is_sparse


def test_nodes_are_measured_with_the_threads_of_a_lane_and_the_callers_are_put_back():
    seen, before, graph = [], torch.get_num_threads(), fx.Graph()

    def doubled(x):
        seen.append(torch.get_num_threads())
        return x * 2

    graph.output(graph.call_function(doubled, (graph.placeholder("x"),)))
    inputs = (torch.ones(2),)
    gm = Alias(inputs)(fx.GraphModule({}, graph))
    MeasuredCost(inputs, budget_s=0.0, threads=3)(gm)
    assert seen[-1] == 3 and torch.get_num_threads() == before


def test_the_lanes_of_the_cpu_share_the_threads_out(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    cpu, other = torch.device("cpu"), torch.device("cuda")
    assert [
        threads_of_a_lane(lanes) for lanes in ([cpu], [cpu] * 3, [cpu, cpu, other], [other])
    ] == [
        8,
        2,
        4,
        8,
    ]
