"""Autograd functions keep their own backward, in either front end."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe.trace import TraceError, trace
from fxpipe.trace.whole import Whole
from tests.fxpipe.trace.small import BOTH, MLP, run, x
from tests.zoo import same


class Round(torch.autograd.Function):
    """Rounds, and hands the gradient straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Quantized(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return Round.apply(super().forward(x))


def test_an_autograd_function_keeps_its_backward() -> None:
    model = Quantized()
    traced = trace(model, (x(),))
    assert traced.front_end == "symbolic"
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(x()).sum(), parameters)
    assert same(torch.autograd.grad(run(traced, x()).sum(), parameters), expected)
    assert expected[-1].any()


def test_functions_that_other_threads_call_meanwhile_are_none_of_the_models() -> None:
    rounded = threading.Event()

    def round_there() -> None:
        Round.apply(torch.ones(2))
        rounded.set()

    class Beside(MLP):
        def forward(self, x: Tensor) -> Tensor:
            if torch.compiler.is_exporting():
                other = threading.Thread(target=round_there)
                other.start()
                other.join()
            return super().forward(x)

    traced = trace(Beside(), (x(),), tracer="export")
    assert rounded.is_set()
    assert traced.otherwise is None, "no Function of the model's to be kept whole"


def quantize(x: Tensor) -> Tensor:
    return rounded(x)


rounded = Round.apply


class ByItsName(MLP):
    """Has ``apply`` under other names, as PyTorch's documentation does."""

    def __init__(self) -> None:
        super().__init__()
        self.round = Round.apply

    def forward(self, x: Tensor) -> Tensor:
        return self.round(self.layers(quantize(x) * 3))


@BOTH
@pytest.mark.parametrize("kind", [Quantized, ByItsName])
def test_a_function_in_the_models_own_forward_is_a_node_of_either_graph(
    kind: type[nn.Module], tracer: str
) -> None:
    model = kind()
    traced = trace(model, (x(),), tracer=tracer)
    nodes = [
        n for n in traced.graph_module.graph.nodes if getattr(n.target, "__name__", "") == "Round"
    ]
    assert len(nodes) == (1 if kind is Quantized else 2)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(x(5)).square().sum(), parameters)
    assert same(torch.autograd.grad(run(traced, x(5)).square().sum(), parameters), expected)
    assert expected[0].any(), "the derivative of rounding is zero, that of Round is not"


class Both(torch.autograd.Function):
    """Several inputs, among them what is no tensor; several outputs; a context made apart."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, scale: float, name: str = "both") -> tuple[Tensor, Tensor]:
        return x * scale, (x + y).round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.scale + 5 * grads[1], 7 * grads[1], None, None


@BOTH
def test_it_may_have_several_inputs_and_outputs(tracer: str) -> None:
    class Model(MLP):
        def forward(self, x: Tensor) -> Tensor:
            one, other = Both.apply(self.layers(x), x.sin(), 3.0)
            return one * other

    model = Model()
    traced = trace(model, (x(),), tracer=tracer)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(x(3)).sum(), parameters)
    assert same(torch.autograd.grad(run(traced, x(3)).sum(), parameters), expected)


class Doubled(torch.autograd.Function):
    """Writes to its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 5


def test_where_export_cannot_have_it_as_a_node_the_module_is_kept_whole() -> None:
    class Writing(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return Doubled.apply(super().forward(x))

    model = nn.Sequential(nn.Linear(8, 8), Writing())
    traced = trace(model, (x(),), tracer="export")
    kept = [name for name, m in traced.graph_module.named_modules() if isinstance(m, Whole)]
    assert kept == ["1"]
    with pytest.raises(TraceError, match="export: its graph has another gradient for layers"):
        trace(Writing(), (x(),), tracer="export")


class Straight(nn.Module):
    """Rounds within, and has a branch on a fixed size, so that fx does not take it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rounded, self.last = nn.Linear(8, 8), Quantized(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.rounded(self.first(x))
        return self.last(y) if x.shape[1] > 2 else y


def test_export_looks_into_the_module_that_calls_one() -> None:
    model = Straight()
    traced = trace(model, (x(),))
    assert traced.front_end == "export"
    assert not any(isinstance(m, Whole) for m in traced.graph_module.modules())
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(x()).sum(), parameters)
    assert same(torch.autograd.grad(run(traced, x()).sum(), parameters), expected)


class Recomputed(torch.autograd.Function):
    """A reversible layer's way: its backward runs one of its own, which adds to ``.grad``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x.detach())
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(grads[0])
        return x.grad, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return Recomputed.apply(x, self.layer) if x.shape[1] > 2 else x


def test_gradients_that_a_backward_adds_up_by_itself_are_not_left_behind() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Reversible(), nn.Linear(8, 8))
    model[0].weight.grad = before = torch.ones(8, 8)
    traced = trace(model, (x(),))
    assert [p.grad for p in model.parameters()][1:] == [None] * 5
    assert model[0].weight.grad is before and before.eq(1).all()
    model.zero_grad()
    run(traced, x()).sum().backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    model(x()).sum().backward()
    assert same(found, [p.grad for p in model.parameters()])
