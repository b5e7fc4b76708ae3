"""The vocabulary is seen by a trace: a call on proxies becomes a node that calls the same op."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import fx, nn

from fxpipe import ops
from passes import Defer


class Calls(fx.Tracer):
    """Records one call whose arguments are all proxies."""

    def __init__(self):
        super().__init__()
        self.graph = fx.Graph(tracer_cls=Calls)
        self.root = nn.Module()

    def proxies(self, names):
        return {name: self.create_proxy("placeholder", name, (), {}) for name in names}


@pytest.mark.parametrize("by_name", [False, True], ids=["by position", "by name"])
@pytest.mark.parametrize("op", ops.VOCABULARY, ids=lambda op: op.__name__)
def test_a_call_on_proxies_is_a_node(op, by_name):
    tracer = Calls()
    given = tracer.proxies(
        name
        for name, parameter in inspect.signature(op).parameters.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    )
    result = op(**given) if by_name else op(*given.values())
    assert isinstance(result, fx.Proxy)
    assert result.node.target is op
    nodes = {name: proxy.node for name, proxy in given.items()}
    assert result.node.kwargs == (nodes if by_name else {})
    assert result.node.args == (() if by_name else tuple(nodes.values()))


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(input=x)


def test_a_module_called_by_name_is_deferred_in_a_second_trace_too():
    gm = Defer()(fx.symbolic_trace(ByName()))
    again = fx.symbolic_trace(gm)
    (node,) = again.graph.find_nodes(op="call_function", target=ops.defer)
    assert list(node.kwargs) == ["input"]
    x = torch.randn(2, 3)
    assert torch.equal(again(x), gm(x))


def test_a_proxy_within_a_keyword_argument_counts():
    tracer = Calls()
    (x,) = tracer.proxies("x").values()
    assert ops.fork(values=(x, {"y": [x]})).node.target is ops.fork
