from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import fxpipe
from fxpipe.ir.graph import VALUE, stages_of
from passes.to_stages.devices import Devices

CPU, META = torch.device("cpu"), torch.device("meta")


class Positions(nn.Module):
    """Makes tensors of its own in both of its halves."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        y = self.a(x) + torch.arange(3, device=x.device)
        return self.b(y) + torch.ones(3, device=x.device) + torch.zeros(3, device="cpu")


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
@pytest.mark.parametrize("traced", [CPU, META])  # as if on the CPU
def test_what_a_stage_makes_is_on_its_device(tracer, traced):
    model, x = Positions(), torch.randn(4, 3)
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=2, example_inputs=(x,), tracer=tracer, partition=["b"]
    ) as pipe:
        stage_graph = pipe.stage_graph
    Devices(traced, (CPU, META))(stage_graph)
    first, second = stages_of(stage_graph)
    second.to("meta")
    values = [node.meta[VALUE] for node in second.graph.find_nodes(op="placeholder")]
    given = [
        torch.empty(v.shape, dtype=v.dtype, device=META) if isinstance(v, torch.Tensor) else CPU
        for v in values
    ]
    assert all(t.device == CPU for t in devices_of(first, [x]))
    assert all(t.device == META for t in devices_of(second, given))


def devices_of(stage: fx.GraphModule, inputs):
    seen = []

    class Watch(fx.Interpreter):
        def run_node(self, n):
            value = super().run_node(n)
            if isinstance(value, torch.Tensor):
                seen.append(value)
            return value

    Watch(stage).run(*inputs)
    return seen


class Rotated(nn.Module):
    """Turns autocast off for a part, as rotary embeddings do, which an export keeps as a graph of
    its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        y = self.b(self.a(x))
        with torch.autocast(x.device.type, enabled=False):
            return y + torch.arange(3, device=x.device).float()


@pytest.mark.parametrize("traced", [CPU, META])
def test_what_is_done_without_autocast_is_on_the_stages_device_too(traced):
    model, x = Rotated(), torch.randn(4, 3)
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=2, example_inputs=(x,), tracer="export", partition=["linear_1"]
    ) as pipe:
        stage_graph, before = pipe.stage_graph, inner(pipe.model_graph).code
        Devices(traced, (CPU, META))(stage_graph)
        _, second = stages_of(stage_graph)
        assert "device(type='meta')" in inner(second).code and "'cpu'" not in inner(second).code
        assert "wrap_with_autocast('meta'" in second.code
        assert inner(pipe.model_graph).code == before, "the model graph stays as it is"


def inner(gm):
    (body,) = (m for m in gm.modules() if isinstance(m, fx.GraphModule) and m is not gm)
    return body
