"""The lines of the model at which each node of a graph is recorded."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx, nn

from fxpipe.trace import trace


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu()  # the inner line


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(4, 4), Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.linear(x))  # the outer line


def lines_of(graph: fx.Graph) -> Iterator[list[tuple[str, str]]]:
    """The files and the lines in the stack trace of each node that has one."""
    for node in graph.nodes:
        if node.stack_trace:
            yield re.findall(r'File "(.*?)", line .*\n *(.*)', node.stack_trace)


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_a_node_has_the_lines_of_the_model_alone_the_innermost_at_the_end(tracer: str) -> None:
    found = list(lines_of(trace(Outer(), (torch.ones(2, 4),), tracer=tracer).graph_module.graph))
    assert {file for lines in found for file, _ in lines} == {__file__}
    codes = [[code.partition("# ")[2] for _, code in lines] for lines in found]
    assert ["the outer line"] in codes, "a module of PyTorch runs for this line"
    assert ["the outer line", "the inner line"] in codes
    assert all(code[0] == "the outer line" for code in codes)


def test_torch_export_records_as_before_once_the_trace_is_over() -> None:
    trace(Outer(), (torch.ones(2, 4),), tracer="export")
    program = torch.export.export(Outer(), (torch.ones(2, 4),), strict=False)
    found = [file for lines in lines_of(program.graph) for file, _ in lines]
    assert any(file != __file__ for file in found)
