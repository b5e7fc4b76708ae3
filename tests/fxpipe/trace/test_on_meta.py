"""A model on "meta" is traced as the same model on the CPU is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, fx, nn

from fxpipe.trace import on_meta, trace
from tests.fxpipe.trace.small import BOTH, run, x


class Routed(nn.Module):
    """Counts the rows for each of its experts by an operator that takes whole numbers on
    accelerators only, as the mixtures of experts of transformers do, and makes a tensor on the
    device of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.out = nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        device = next(self.parameters()).device
        chosen = self.router(x).argmax(-1)
        chosen = chosen.float() if device.type == "cpu" else chosen.int()
        counts = torch.histc(chosen, 4, 0, 3).cumsum(0)
        return self.out(x) * counts.sum() + torch.arange(8, device=device)


def traced_code(model: nn.Module, rows: Tensor, tracer: str) -> str:
    graph_module = trace(model, (rows,), tracer=tracer, check=False).graph_module
    return str(graph_module.code)


@BOTH
def test_it_goes_the_way_that_it_goes_on_the_cpu(tracer: str) -> None:
    model = Routed()
    there = copy.deepcopy(model).to("meta")
    assert traced_code(there, x().to("meta"), tracer) == traced_code(model, x(), tracer)


def test_what_it_makes_during_a_symbolic_trace_has_values() -> None:
    graph_module = trace(Routed().to("meta"), (x().to("meta"),), check=False).graph_module
    (made,) = (each for name, each in graph_module.named_buffers() if "constant" in name)
    assert torch.equal(made, torch.arange(8))


class Prepared(nn.Module):
    """Is run, where no tracer can look into it: what it gets may be no fake."""

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, fx.Proxy) or torch.compiler.is_exporting():
            raise ValueError("this module is not traced")
        assert x.device.type == "meta"
        return x + torch.arange(8, device=x.device)


def test_a_module_that_is_run_to_learn_its_shapes_runs_on_meta() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Prepared(), nn.Linear(8, 8)).to("meta")
    traced = trace(model, (x().to("meta"),), tracer="export", check=False)
    assert traced.graph_module.graph.find_nodes(op="call_module", target="1")


def test_a_model_that_has_values_may_hold_a_tensor_on_meta_that_says_so() -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.like = nn.Linear(8, 8), torch.empty(3, device="meta")

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * (2.0 if self.like.device.type == "meta" else 1.0)

    model = Holds()
    traced = trace(model, (x(),), check=False)
    assert torch.equal(run(traced, x()), model(x()))


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).flatten(2).mean(2)


def test_an_export_with_fakes_made_in_few_steps_is_the_one_with_those_of_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def exported() -> tuple[str, list[str], str]:
        args = (torch.randn(4, 3, 9, 8),)
        traced = trace(Pictures(), args, tracer="export", batch_dims=[0], any_size=True)
        graph_module = traced.graph_module
        values = [str(node.meta.get("val")) for node in graph_module.graph.nodes]
        return graph_module.code, values, str(traced.sizes)

    in_few_steps = exported()
    monkeypatch.setattr(on_meta, "made_at_once", lambda *_: None)
    assert in_few_steps == exported()
