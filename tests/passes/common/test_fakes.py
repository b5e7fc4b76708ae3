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
