"""What stages keep of values that come from another device."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from fxpipe.ir.cost import memories_of
from fxpipe.ir.graph import SAVED, nodes_of_stages, stages_of
from passes import Alias, AnalyticCost, Borders, Free, Partition, Rows, Split

ROWS, CHUNKS, WIDTH = 8, 4, 6
VALUE = 4 * ROWS * WIDTH  # bytes
TWO, ONE = ("cuda:0", "cuda:1"), ("cuda:0", "cuda:0")


def cut(model, starts, devices, chunks=CHUNKS, places=(), training=True):
    """The stage graph of a model, with costs."""
    x = torch.randn(ROWS, 3, WIDTH)
    gm = Rows((x,), (0,), chunks)(Alias((x,))(fx.symbolic_trace(model)))
    costs = AnalyticCost(chunks=chunks, training=training)
    gm = Partition(len(devices), starts)(costs(gm))
    return Borders(devices, places, chunks, training=training)(Split()(Free()(gm)))


def kept(gm, stage):
    """The bytes of the memories that a stage keeps."""
    nodes = nodes_of_stages(gm)[stage]
    return sorted(dict(m for node in nodes for m in node.meta.get(SAVED, ())).values())


class Parts(nn.Module):
    """Multiplies two of three parts of one tensor."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.ReLU()

    def forward(self, x):
        one, other, _ = self.first(x).unbind(1)
        return self.last(one * other)


@pytest.mark.parametrize("chunks", [1, CHUNKS])
def test_a_part_of_a_tensor_arrives_in_memory_of_its_own(chunks):
    apart = cut(Parts(), ["mul"], TWO, chunks)
    assert kept(apart, 1) == [VALUE, VALUE, VALUE], "both factors, and what relu returns"
    together = cut(Parts(), ["mul"], ONE, chunks)
    assert kept(together, 1) == [VALUE, 3 * VALUE], "the factors are views of one tensor"
    assert kept(cut(Parts(), ["mul"], ONE, chunks, (0, 1)), 1) == kept(apart, 1), "on two ranks"


class InARow(nn.Module):
    """Its second half puts all that it is given in one row, by a copy unless it is in order."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(3 * WIDTH // 2, WIDTH)

    def forward(self, x):
        some = self.first(x)[:, :, : WIDTH // 2]
        return self.second(some.flatten(1))


def test_nodes_that_are_given_tensors_in_order_are_run_again():
    apart, together = (cut(InARow(), ["flatten"], devices) for devices in (TWO, ONE))
    assert kept(apart, 1) == kept(together, 1) == [3 * VALUE // 2]
    (inner,) = stages_of(apart)[1].graph.find_nodes(op="placeholder")
    (flat,) = inner.users
    assert memories_of(flat) == memories_of(inner), "in order, it is a view"
    (inner,) = stages_of(together)[1].graph.find_nodes(op="placeholder")
    (flat,) = inner.users
    assert memories_of(flat) != memories_of(inner), "a copy"


@pytest.mark.parametrize("model, start", [(Parts, "mul"), (InARow, "flatten")])
def test_without_a_backward_nothing_is_kept_but_outputs(model, start):
    apart, together = (cut(model(), [start], each, training=False) for each in (TWO, ONE))
    for stage in 0, 1:
        assert kept(apart, stage) == kept(together, stage) == [VALUE] * stage


class Weight(nn.Module):
    """Multiplies by a weight that it has turned round, by a view, ahead of all else."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        turned = self.weight.t()
        return self.first(x) @ turned


@pytest.mark.parametrize(
    ("partition", "devices", "copies"),
    [
        ({"t": 0, "first": 0, "matmul": 1}, TWO, CHUNKS),
        ({"t": 0, "first": 0, "matmul": 1}, ONE, 0),
        ({"first": 0, "t": 1, "matmul": 1}, TWO, 0),
    ],
)
def test_a_device_keeps_its_copies_of_a_view_of_a_parameter(partition, devices, copies):
    weight = 4 * WIDTH * WIDTH
    expected = [copies * weight] * bool(copies) + [3 * VALUE]
    assert kept(cut(Weight(), partition, devices), 1) == expected, "the input of the product"


class Visits(nn.Module):
    """A value that the first stage makes, and all others use."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        x = first = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x) * first
        return x


def test_a_value_has_one_memory_from_where_it_arrives_to_the_next_device():
    starts, devices = ["layers.1", "layers.2", "layers.3"], ("cuda:0", "cuda:1", "cuda:1", "cuda:0")
    gm = cut(Visits(), starts, devices)
    inputs = [stage.graph.find_nodes(op="placeholder") for stage in stages_of(gm)]
    found = [dict(zip(map(str, own), map(memories_of, own), strict=True)) for own in inputs]
    first = [each["layers_0"] for each in found[1:]]
    assert first[0] == first[1] != first[2]
    (made,) = (node for node in gm.stage_0.graph.nodes if node.name == "layers_0")
    assert memories_of(made) not in first, "no way back to the memory that it comes from"
