"""What a model is given becomes placeholders and constants of a trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.trace import TraceError, canonical, trace
from tests.fxpipe.trace.small import BOTH, MLP, Options, placeholders, run, x
from tests.zoo import same


class Nested(nn.Module):
    def forward(self, batch: dict[str, Any], *rest: Tensor) -> Tensor:
        a, b = batch["ids"]
        if batch["mask"] is None:
            return a + b * len(rest)
        return a + b * batch["mask"] + sum(rest)


@BOTH
def test_nested_inputs_become_a_placeholder_for_each_tensor(tracer: str) -> None:
    batch = {"ids": [x(), x(4)], "mask": x(4)}
    traced = trace(Nested(), (batch, x(4), x(4)), tracer=tracer)
    assert placeholders(traced) == ["batch_ids_0", "batch_ids_1", "batch_mask", "rest_0", "rest_1"]
    assert same(run(traced, batch, x(4), x(4)), Nested()(batch, x(4), x(4)))


@BOTH
def test_arguments_may_be_called_what_python_or_the_graph_calls_something_else(tracer: str) -> None:
    class Named(MLP):
        def forward(self, self_: Tensor, lambda_: Tensor, torch: Tensor) -> Tensor:
            return super().forward(self_ + lambda_).relu() + torch[:, :1]

    model = Named()
    traced = trace(model, (x(), x(), x()), tracer=tracer)
    assert placeholders(traced) == ["self_", "lambda_", "torch_"]
    assert same(run(traced, x(), x(), x()), model(x(), x(), x()))


@BOTH
def test_none_within_a_structure_is_part_of_the_trace(tracer: str) -> None:
    batch = {"ids": [x(), x(4)], "mask": None}
    traced = trace(Nested(), (batch,), tracer=tracer)
    assert placeholders(traced) == ["batch_ids_0", "batch_ids_1"]
    assert same(run(traced, batch), Nested()(batch))


@BOTH
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"mask": None}, {"mask": x()}, {"flag": False}, {"scale": 3.0, "mask": x(), "flag": True}],
    ids=str,
)
def test_arguments_and_defaults_mean_what_they_mean_to_the_model(
    tracer: str, kwargs: dict[str, Any]
) -> None:
    model = Options()
    traced = trace(model, (x(),), kwargs, tracer=tracer)
    assert placeholders(traced) == ["x", "mask"][: 1 + (kwargs.get("mask") is not None)]
    assert same(run(traced, x=x(), **kwargs), model(x(), **kwargs))
    targets = {str(node.target) for node in traced.graph_module.graph.nodes}
    assert not any("assert" in target for target in targets)


def test_canonical_puts_arguments_where_the_signature_does() -> None:
    args, kwargs = canonical(Options(), (), {"scale": 1.0, "mask": 2, "x": 3})
    assert (args, kwargs) == ((3, 2), {"scale": 1.0})
    with pytest.raises(TypeError, match=r"Options.forward\(\): missing .* 'x'"):
        canonical(Options(), (), {})


class Resized(nn.Module):
    def forward(self, x: Tensor, size: torch.Size) -> Tensor:
        return x.sum(1, keepdim=True).expand(-1, size.numel()) * 2


@BOTH
def test_a_shape_is_an_argument(tracer: str) -> None:
    size = torch.Size([2, 3])
    traced = trace(Resized(), (x(), size), tracer=tracer)
    assert same(run(traced, x(), size), Resized()(x(), size))


def test_inputs_of_another_structure_are_refused() -> None:
    traced = trace(Options(), (x(),))
    with pytest.raises(TypeError, match="when the model was traced"):
        traced.bind((x(),), {"mask": x()})


class Box:
    def __init__(self, value: Tensor, scale: float = 2.0) -> None:
        self.value, self.scale = value, scale


@BOTH
def test_objects_of_any_class_are_inputs_and_outputs(tracer: str) -> None:
    class Reboxes(nn.Module):
        def forward(self, box: Box) -> dict[str, Any]:
            return {"box": Box(box.value * box.scale, box.scale)}

    traced = trace(Reboxes(), (Box(x()),), tracer=tracer)
    assert placeholders(traced) == ["box_value"]
    given = Box(x(3))
    output = run(traced, given)["box"]
    assert type(output) is Box and output.scale == 2.0
    assert torch.equal(output.value, x(3) * 2) and output.value is not given.value


def test_an_array_is_no_input() -> None:
    with pytest.raises(TraceError, match="an input is a ndarray, whose values a graph cannot see"):
        trace(MLP(), (x().numpy(),))


class Scales(MLP):
    """Goes through an argument."""

    def forward(self, x: Tensor, scales: Any) -> Tensor:
        for scale in scales["all"]:
            x = x * scale
        return super().forward(x)


ITERATORS = {
    "generator": lambda: (scale for scale in (2.0, 3.0)),
    "list_iterator": lambda: iter([2.0, 3.0]),
    "map": lambda: map(float, "23"),
    "zip": lambda: zip((2.0, 3.0), strict=True),
    "list_reverseiterator": lambda: reversed([3.0, 2.0]),
}


@pytest.mark.parametrize("kind", ITERATORS)
def test_an_iterator_is_no_input_since_the_check_would_use_it_up(kind: str) -> None:
    with fxpipe.compile(Scales(), ["cpu"] * 2, chunks=2) as pipe:
        pipe(x(4), {"all": [2.0, 3.0]})
        for scales in (iterator := ITERATORS[kind](), iterator):
            said = rf"the argument scales.all is a {kind}, which can .*such as list\(scales.all\)"
            with pytest.raises(TraceError, match=said):
                pipe(x(4), {"all": scales})
        assert len(list(iterator)) == 2, "it has not been gone through"


def test_an_iterator_is_no_target_since_the_first_micro_batch_would_use_it_up() -> None:
    def weighted(output: Tensor, target: Any) -> Tensor:
        return sum(weight * output.mean() for weight in target["weights"])

    with fxpipe.compile(MLP(), ["cpu"] * 2, chunks=2, loss_fn=weighted) as pipe:
        pipe.step(x(4), target={"weights": [0.5, 1.5]})
        with pytest.raises(TypeError, match=r"the target has a list_iterator, .*give a list"):
            pipe.step(x(4), target={"weights": iter([0.5, 1.5])})
