"""The twin of a model: another model of the same structure, on the same parameters."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.trace.twin import Twin, model_of


class Helper:
    """An object that is no module, and leads to one."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer


class Config:
    size = 4

    def __init__(self) -> None:
        self.names = ["a"]


class Wired(nn.Module):
    """All ways in which a model may lead to its own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.same = self.layers[0]
        self.layers[1].weight = self.same.weight
        self.listed = [self.layers[0], [self.layers[1]]]
        self.by_module = {self.layers[0]: "first"}
        self.bound = self.scaled
        self.partial = partial(Wired.scaled, self)
        self.closure = lambda x: self.layers[1](x)
        self.helper = Helper(self.layers[1])
        self.weak = weakref.ref(self.layers[0])
        self.pair = (self.layers[0], 1)
        self.config = Config()
        self.seen: list[float] = []
        table = torch.arange(8.0)
        self.register_buffer("table", table)
        self.register_buffer("begin", table[:4])
        self.handle = self.same.register_forward_hook(lambda *_: None)

    def scaled(self, x: Tensor) -> Tensor:
        return self.same(x) * self.begin

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1.0)
        x = self.partial(self.bound(x)) + self.closure(x) + self.helper.layer(x)
        return x + self.listed[0](x) + self.listed[1][0](x) + self.weak()(x) + self.pair[0](x)


def test_what_leads_to_a_module_leads_to_that_of_the_twin() -> None:
    model = Wired()
    twin: Any = Twin(model).model
    first, second = twin.layers
    assert type(twin) is Wired and model_of(twin) is model and model_of(model) is model
    assert {*map(id, twin.modules())}.isdisjoint(map(id, model.modules()))
    assert twin.same is first and twin.listed[0] is first and twin.listed[1][0] is second
    assert list(twin.by_module) == [first] and twin.weak() is first and twin.pair == (first, 1)
    assert twin.bound.__self__ is twin and twin.partial.args == (twin,)
    assert twin.closure.__closure__[0].cell_contents is twin
    assert twin.helper.layer is second
    assert twin.config is model.config, "what leads to no module is the very same"


def test_tensors_are_shared_as_they_are_in_the_model() -> None:
    model = Wired()
    twin: Any = Twin(model).model
    weight = twin.layers[0].weight
    assert weight is twin.layers[1].weight and weight is not model.same.weight
    assert weight.data_ptr() == model.same.weight.data_ptr(), "no memory is needed for it"
    twin.table.zero_()
    assert not twin.begin.any() and model.table.sum() == 28


def test_a_twin_computes_the_same_and_leaves_the_model_alone() -> None:
    model = Wired()
    twin: Any = Twin(model).model
    x = torch.randn(3, 4)
    assert torch.equal(twin(x), model(x))
    assert len(model.seen) == len(twin.seen) == 1
    twin.handle.remove()
    assert model.same._forward_hooks and not twin.same._forward_hooks
    weight = twin.same.weight
    twin(x).sum().backward()
    assert weight.grad is not None and model.same.weight.grad is None


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()) + self.shift


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_a_pipeline_has_nothing_of_the_twin(tracer: str) -> None:
    twins = []

    def noted(self: Twin, model: nn.Module) -> None:
        original(self, model)
        twins.extend(map(weakref.ref, self.model.modules()))

    original = Twin.__init__
    model = Tied()
    x = torch.randn(4, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Twin, "__init__", noted)
        pipe = fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer=tracer, example_inputs=(x,))
    gc.collect()
    assert twins and not any(twin() for twin in twins)
    held = [t for gm in (pipe.model_graph, pipe.stage_graph) for t in gm.parameters()]
    assert {*map(id, held)} <= {*map(id, model.parameters())}
    assert all(b is model.shift for b in pipe.stage_graph.buffers())
