"""A layer that draws random numbers and is used by several stages gets its weights as values."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, fx, nn

import fxpipe
from fxpipe import ops
from passes.common.values_given import given_values


class Twice(nn.Module):
    """A recurrent layer with dropout, which two stages use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.layer = nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.layer(self.first(x))
        x, _ = self.layer(self.between(x))
        return self.last(x)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_it_gives_in_two_stages_what_it_gives_in_one(checkpoint: str) -> None:
    x, found = torch.randn(4, 5, 6), []
    model = Twice()
    for devices in ["cpu"], ["cpu", "cpu"]:
        own = copy.deepcopy(model)
        options = {} if len(devices) == 1 else {"partition": ["between"]}
        pipe = fxpipe.compile(own, devices, chunks=2, checkpoint=checkpoint, **options)
        with pipe:
            pipe.prepare(x)
            torch.manual_seed(0)
            output = pipe(x)
            output.square().mean().backward()
        found.append([output, *(each.grad for each in own.parameters())])
    assert all(map(torch.equal, *found))


def test_what_a_node_gives_a_module_is_found() -> None:
    layer = nn.Linear(2, 2)
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    module = graph.get_attr("layer")
    called = graph.call_function(ops.call, (module, {"weight": weight}, x))
    graph.output(called)
    gm = fx.GraphModule({"layer": layer}, graph)
    (node,) = gm.graph.find_nodes(op="call_function", target=ops.call)
    (x, weight), (module,) = (gm.graph.find_nodes(op=op) for op in ("placeholder", "get_attr"))
    assert given_values(node) == (module, {"weight": weight})
    assert given_values(x) is None
