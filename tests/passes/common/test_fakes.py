"""What is said where a graph on fake tensors needs values."""

from __future__ import annotations

import re

import pytest
import torch
from torch import fx, nn

from fxpipe.ir.errors import NeedsValues
from passes.common.fakes import FakeInterpreter


@pytest.mark.parametrize(
    "operator, advice",
    [(torch.nonzero, 'tracer="export"'), (torch.ops.aten.nonzero.default, "module of its own")],
    ids=["of the symbolic front end", "of an export"],
)
def test_a_graph_that_needs_values_is_told_with_what_its_front_end_has_not_tried(operator, advice):
    graph = fx.Graph()
    graph.output(graph.call_function(operator, (graph.placeholder("x"),)))
    interpreter = FakeInterpreter(fx.GraphModule(nn.Module(), graph))
    with pytest.raises(NeedsValues, match=re.escape(advice)), interpreter.mode:
        interpreter.run(interpreter.fake(torch.ones(3)))


class GoesOn(nn.Module):
    """Goes on from the hidden state that the call before has left."""

    def __init__(self):
        super().__init__()
        self.layer, self.hidden = nn.RNNCell(3, 3), None

    def forward(self, x):
        self.hidden = self.layer(x, self.hidden)
        return self.hidden


def test_a_module_that_is_called_as_a_whole_keeps_no_fake():
    model, graph = nn.Sequential(GoesOn()), fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_module("0", (x,)))
    gm = fx.GraphModule(model, graph)
    interpreter = FakeInterpreter(gm)
    for rows in 2, 5:  # a hidden state of two rows would not be taken with five
        with interpreter.mode:
            assert interpreter.run(interpreter.fake(torch.ones(rows, 3))).shape == (rows, 3)
    assert model[0].hidden is None
