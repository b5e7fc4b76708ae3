"""What is divided among the micro-batches, and what each of them has in full."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxpipe
from fxpipe.ir.cost import copies_of, memories_of
from fxpipe.ir.graph import COPIES, PART, SAVED
from passes import Alias, AnalyticCost, Rows
from tests.benchmarks.memory import DEVICE, Held

CHUNKS = 4


class Computed(nn.Module):
    """A weight that is computed, a mean over the batch, and an input that all rows share."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.weight = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6))

    def forward(self, x, mask):
        x = self.a(x) * mask
        x = F.linear(x, self.weight.exp())
        mean = x.mean(0)
        return x - mean, x.size(0)


def looked_at(model, inputs, in_dims, chunks=CHUNKS):
    gm = Alias(inputs)(fx.symbolic_trace(model))
    return Rows(inputs, in_dims, chunks)(gm)


def by_name(gm):
    return {node.name: node for node in gm.graph.nodes}


def test_what_does_not_grow_with_the_batch_is_there_for_each_micro_batch():
    nodes = by_name(looked_at(Computed(), (torch.randn(8, 6), torch.ones(6)), (0, None)))
    found = {name: node.meta[COPIES] for name, node in nodes.items() if COPIES in node.meta}
    one, each = (1,), (CHUNKS,)
    assert found == {
        "x": one,
        "mask": each,
        "a": one,
        "mul": one,
        "exp": each,
        "linear": one,
        "mean": each,
        "sub": one,
        "size": (),
    }
    assert copies_of(nodes["weight"]) == one, "a parameter is there once"


class Shares(nn.Module):
    """Computes sums, which are all alike, and views."""

    def forward(self, x):
        for _ in range(2):
            x = x + x.view(-1, 6)
        return x, x[:], x + x


def test_values_have_the_memories_that_they_have_in_a_micro_batch():
    nodes = by_name(looked_at(Shares(), (torch.randn(8, 6),), (0,)))
    memories = {name: memories_of(node) for name, node in nodes.items() if name != "output"}
    numbers = {name: number for name, ((number, _),) in memories.items()}
    assert {size for ((_, size),) in memories.values()} == {8 * 6 * 4}, "of all micro-batches"
    assert numbers["x"] == numbers["view"] != numbers["add"]
    assert numbers["add_1"] == numbers["getitem"]
    assert len({numbers[name] for name in ("x", "add", "add_1", "add_2")}) == 4, "though all alike"


@pytest.mark.parametrize(("in_dims", "chunks"), [((0,), 1), ((None,), CHUNKS)])
def test_nothing_is_noted_where_there_are_no_micro_batches(in_dims, chunks):
    gm = looked_at(nn.Sequential(nn.Tanh()), (torch.randn(8, 6),), in_dims, chunks)
    assert not any({COPIES, PART} & node.meta.keys() for node in gm.graph.nodes)


def test_nothing_is_noted_where_the_graph_takes_no_other_batch():
    class Fixed(nn.Module):
        def forward(self, x):
            return x.view(2, 4, 6).sum(0) + x[4:]

    gm = looked_at(Fixed(), (torch.randn(8, 6),), (0,))
    assert not any({COPIES, PART} & node.meta.keys() for node in gm.graph.nodes)


def test_what_a_module_keeps_inside_is_told_apart_too():
    """A normed weight is kept by each micro-batch, what is kept of the rows is divided."""
    module = torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    gm = looked_at(nn.Sequential(nn.Linear(6, 6), module), (torch.randn(8, 6),), (0,))
    once, all_chunks = (AnalyticCost(chunks=n)(gm) and by_name(gm)["_1"] for n in (1, CHUNKS))
    assert once is all_chunks
    sizes = [size for _, size in all_chunks.meta[SAVED]]
    rows, weight, norms = 8 * 6 * 4, 6 * 6 * 4, 6 * 4
    assert sorted(sizes) == sorted([rows, CHUNKS * weight, CHUNKS * norms])


class Layers(nn.Module):
    """Four layers, of which some compute their weights, or take what all rows share."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        layers = [nn.Linear(16, 16) for _ in range(4)]
        if kind == "normed":
            layers = [torch.nn.utils.parametrizations.weight_norm(layer) for layer in layers]
        self.layers, self.kind = nn.ModuleList(layers), kind
        self.weights = nn.ParameterList(torch.randn(16, 16) for _ in range(4))

    def forward(self, x, table=None):
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if self.kind == "computed":
                x = F.linear(x, torch.exp(self.weights[i]))
            if self.kind == "shared" and i == 2:
                x = x * table
        return x


@pytest.mark.covering(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("kind", ["plain", "computed", "normed", "shared"])
def test_a_step_holds_what_is_there_for_each_micro_batch(kind, schedule):
    x = torch.randn(8, 5, 16)
    inputs, dims = ((x, torch.randn(5, 16)), (0, None)) if kind == "shared" else ((x,), None)
    model = Layers(kind)
    options = {"example_inputs": inputs, "chunks": CHUNKS, "in_dims": dims}
    plan = fxpipe.plan(model, [DEVICE] * 2, partition=["layers.2"], schedule=schedule, **options)
    with fxpipe.compile(
        model,
        ["cpu", "cpu:0"],  # which differ, so that what is sent is copied
        partition=plan.partition,
        schedule=schedule,
        loss_fn=lambda output, target: output.square().mean(),
        **options,
    ) as pipe:
        held = Held(model)
        for stage in pipe.stages:
            held.watch(stage)
        pipe.step(*inputs)
        assert pipe.skip_layout == plan.layout
        if schedule == "gpipe":  # all micro-batches are alive at once
            estimated = [stage.cost.activation_bytes for stage in pipe.stages]
            assert estimated == [stage.activation_bytes for stage in plan.stages]
    first, second = plan.stages
    assert held.most[1] == second.activation_bytes
    views = x.nbytes if schedule == "1f1b" else 0  # of the mini-batch, which is there as a whole
    assert held.most[0] == first.activation_bytes + views / 2


def test_a_shared_input_is_sent_with_every_micro_batch():
    class Twice(Layers):
        def forward(self, x, table):
            return self.layers[1](self.layers[0](x) * table) * table

    x, table = torch.randn(8, 5, 16), torch.randn(5, 16)
    plan = fxpipe.plan(
        Twice("plain"),
        [DEVICE] * 2,
        example_inputs=(x, table),
        chunks=CHUNKS,
        in_dims=(0, None),
        partition=["layers.1"],
    )
    assert plan.links == {(0, 1): x.nbytes + CHUNKS * table.nbytes}


class RowByRow(nn.Module):
    """Its graph is for one size of the batch: so many rows, so many nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        y = self.a(x)
        return self.b(torch.stack([y[i] * 2 for i in range(x.shape[0])]))


def test_a_graph_for_one_size_sends_what_all_micro_batches_do():
    x = torch.randn(8, 6)
    with fxpipe.compile(
        RowByRow(), ["cpu"] * 2, chunks=CHUNKS, example_inputs=(x,), partition=["b"]
    ) as pipe:
        (hop,) = (hop for hop in pipe.skip_layout.hops if hop.source == 0)
        assert hop.bytes == x.nbytes


def test_rows_that_are_nodes_are_no_copies():
    """The graph takes a larger batch, but gives no more: it has been unrolled for this one."""
    x = torch.randn(8, 6)
    plan = fxpipe.plan(
        RowByRow(), [DEVICE] * 2, example_inputs=(x,), chunks=CHUNKS, partition=["b"]
    )
    assert plan.links == {(0, 1): x.nbytes}
