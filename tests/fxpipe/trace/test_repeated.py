"""Layers that repeat are exported once, where nothing tells them apart; else each by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxpipe
from fxpipe.trace import Traced, trace
from fxpipe.trace.example import Example
from fxpipe.trace.operators import operators_of
from tests.fxpipe.trace.small import run


class Layer(nn.Module):
    exported: list[int] = []  # noqa: RUF012  # a list, as what is in one is not put back

    def __init__(self, number: int, width: int = 8) -> None:
        super().__init__()
        self.number = number
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            Layer.exported.append(1)
        return x + self.linear(self.norm(x)).relu()


class Net(nn.Module):
    def __init__(self, kind: type[Layer] = Layer, count: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.layers = nn.ModuleList(kind(i) for i in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def exported(model: nn.Module, *inputs: Tensor) -> tuple[Traced, int]:
    """The graph, which gives what the model gives, and how often a layer has been exported."""
    torch.manual_seed(0)
    Layer.exported.clear()
    inputs = inputs or (torch.randn(6, 4),)
    traced = trace(model, inputs, tracer="export")
    torch.testing.assert_close(run(traced, *inputs), model(*inputs))
    return traced, len(Layer.exported)


def test_the_nodes_of_the_first_layer_are_copied_for_the_others() -> None:
    model = Net()
    traced, times = exported(model)
    assert times == 1
    graph = traced.graph_module.graph
    read = {str(node.target) for node in graph.find_nodes(op="get_attr")}
    assert read == dict(model.named_parameters()).keys()
    linear = graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    paths = [list(node.meta["nn_module_stack"].values())[-1][0] for node in linear]
    assert paths == ["first", *(f"layers.{i}.linear" for i in range(5))]
    assert not graph.find_nodes(op="call_function", target=torch.ops.fxpipe.whole.default)


def test_a_pipeline_of_copied_layers_trains_like_the_model() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(6, 4)
    model(x).square().mean().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, tracer="export") as pipe:
        pipe(x).square().mean().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name])


class Scaled(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (self.number + 1)


def test_layers_are_exported_by_themselves_if_a_number_that_they_read_differs() -> None:
    assert exported(Net(Scaled))[1] == 5


def test_an_attribute_of_a_copied_layer_is_a_guard() -> None:
    class Switched(Layer):
        is_on = True

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.is_on else x

    torch.manual_seed(0)
    model, x = Net(Switched), torch.randn(6, 4)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=1, tracer="export") as pipe:
        Layer.exported.clear()
        pipe(x)
        assert len(Layer.exported) == 1
        model.layers[3].is_on = False
        torch.testing.assert_close(pipe(x), model(x))


class Normed(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.norm = nn.BatchNorm1d(8)


def test_each_copy_writes_to_the_buffers_of_its_own_layer() -> None:
    model, twin = Net(Normed), Net(Normed)
    twin.load_state_dict(model.state_dict())
    traced, times = exported(model, x := torch.randn(6, 4))
    assert times == 1
    model.load_state_dict(twin.state_dict())
    run(traced, x)
    twin(x)
    for (name, one), other in zip(model.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


class InPlace(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).add_(1)


def test_a_layer_that_writes_to_what_it_computes_is_copied() -> None:
    assert exported(Net(InPlace))[1] == 1


class Captured(Layer):
    """Uses a tensor that is no argument, and leaves one that it does not return."""

    seen: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.seen:
            y = y + self.seen[-1]
        self.seen.append(y)
        return y


def test_layers_that_know_of_each_other_by_other_ways_are_exported_by_themselves() -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            seen: list[Tensor] = []
            for layer in self.layers:
                layer.seen = seen
            return super().forward(x)

    assert exported(Model(Captured))[1] > 5


def test_a_layer_whose_inputs_have_another_shape_is_exported_once_more() -> None:
    class Halving(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)[:, None].expand(-1, 6, -1)
            for i, layer in enumerate(self.layers):
                x = layer(x[:, ::2] if i == 2 else x)
            return x

    assert exported(Halving(count=7))[1] <= 4


class Nested(Layer):
    def forward(self, x: Tensor, mask: Tensor, *, scale: dict[str, float]) -> tuple[Tensor, None]:
        return super().forward(x) * mask * scale["by"], None


@pytest.mark.parametrize("factors, times", [([2.0] * 5, 1), ([2.0, 2.0, 3.0, 3.0, 2.0], 2)])
def test_arguments_and_results_may_be_nested_and_constants_tell_layers_apart(
    factors: list[float], times: int
) -> None:
    class Model(Net):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            x = self.first(x)
            for layer, factor in zip(self.layers, factors, strict=True):
                x, _ = layer(x, mask, scale={"by": factor})
            return x

    assert exported(Model(Nested), torch.randn(6, 4), torch.randn(8))[1] == times


def test_layers_with_hooks_or_shared_parameters_are_exported_by_themselves() -> None:
    shared = Net()
    for layer in shared.layers:
        layer.norm = shared.layers[0].norm
    assert exported(shared)[1] == 5
    dropped = Net()
    dropped.layers[1].linear.training = False  # another module than those beside it
    assert exported(dropped)[1] == 2


def test_dropout_draws_for_every_copy_anew() -> None:
    class Dropped(Layer):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.dropout(super().forward(x))

    model, x = Net(Dropped), torch.randn(6, 4)
    Layer.exported.clear()
    traced = trace(model, (x,), tracer="export")
    assert len(Layer.exported) == 1
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    torch.testing.assert_close(run(traced, x), expected)


class Counter:
    count = 0


class Counted(Layer):
    def forward(self, x: Tensor, counter: Counter) -> Tensor:
        counter.count += 1
        return super().forward(x) * counter.count


def test_layers_that_are_given_an_object_are_exported_by_themselves() -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            counter, x = Counter(), self.first(x)
            for layer in self.layers:
                x = layer(x, counter)
            return x

    assert exported(Model(Counted))[1] == 5


class Global(Layer):
    def forward(self, x: Tensor) -> Tensor:
        Counter.count += 1
        return super().forward(x) * Counter.count


class WithGlobal(Net):
    def __init__(self) -> None:
        super().__init__(Global)

    def forward(self, x: Tensor) -> Tensor:
        Counter.count = 0
        return super().forward(x)


def test_what_layers_compute_by_a_global_variable_shows_in_the_comparison() -> None:
    assert exported(WithGlobal())[1] == 6, "once for all layers, and then each by itself"


def on_meta(model: nn.Module, *inputs: Tensor) -> tuple[fx.Graph, int]:
    """The graph of a model on "meta", and how often a layer has been exported. Nothing is compared:
    the graph is trained with later, when the model has been loaded."""
    Layer.exported.clear()
    inputs = inputs or (torch.randn(6, 4, device="meta"),)
    traced = trace(model.to("meta"), inputs, tracer="export", check=False)
    return traced.graph_module.graph, len(Layer.exported)


def calls(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=target)


def test_where_nothing_has_values_layers_that_run_the_same_operators_are_exported_once() -> None:
    graph, times = on_meta(model := Net())
    assert times == 1
    assert {str(n.target) for n in graph.find_nodes(op="get_attr")} == {*model.state_dict()}
    assert len(calls(graph, torch.ops.aten.linear.default)) == 6


def test_so_are_layers_of_a_model_whose_values_are_not_looked_at() -> None:
    Layer.exported.clear()
    trace(Net(), (torch.randn(6, 4),), tracer="export", check=False)
    assert len(Layer.exported) == 1


def test_a_global_variable_shows_in_the_operators_where_nothing_is_compared() -> None:
    graph, times = on_meta(WithGlobal())
    assert times == 5
    assert [node.args[1] for node in calls(graph, torch.ops.aten.mul.Tensor)] == [1, 2, 3, 4, 5]


class Double(torch.autograd.Function):
    """The identity, whose gradient is twice what it gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class WithBackward(Layer):
    def forward(self, x: Tensor) -> Tensor:
        Counter.count += 1
        x = super().forward(x)
        return Double.apply(x) if Counter.count == 4 else x.clone()


class OneWithBackward(WithGlobal):
    def __init__(self) -> None:
        Net.__init__(self, WithBackward)


def test_a_backward_of_a_layers_own_shows_although_its_operators_are_those_of_the_others() -> None:
    """Whatever becomes of that backward in the graph, the other layers are no copies of it, and it
    is no copy of theirs."""
    example = Example.of(
        model := OneWithBackward().to("meta"), (torch.randn(6, 4, device="meta"),), {}, None
    )
    noted = operators_of(example, {layer: f"layers.{i}" for i, layer in enumerate(model.layers)})
    assert [noted[f"layers.{i}"] == noted["layers.0"] for i in range(5)] == [1, 1, 1, 0, 1]
    operators = [noted[f"layers.{i}"][0] for i in (0, 3)]  # type: ignore[index]
    assert operators[0] == operators[1]


class Leaky(Layer):
    """The third layer leaves a tensor that it does not return."""

    left: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        Counter.count += 1
        x = self.linear(super().forward(x))
        if Counter.count == 3:
            self.left.append(x)
        return x.relu()


def test_a_layer_is_like_no_other_if_what_it_does_not_return_is_used() -> None:
    class Model(WithGlobal):
        def __init__(self) -> None:
            Net.__init__(self, Leaky)

        def forward(self, x: Tensor) -> Tensor:
            left: list[Tensor] = []
            Leaky.left = left
            return super().forward(x) + left[0]

    graph, times = on_meta(Model())
    *_, left = calls(graph, torch.ops.aten.add.Tensor)
    assert times > 1
    assert list(left.args[1].meta["nn_module_stack"].values())[-1][0] == "layers.2.linear"


def test_layers_are_exported_by_themselves_if_the_model_does_not_run_without_values() -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_exporting():
                raise ValueError("this model is for export only")
            return super().forward(x)

    assert on_meta(Model())[1] == 5
