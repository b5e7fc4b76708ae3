"""What a forward asks for beside its inputs and its modules: the refusal names the line."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.ir.errors import TraceError
from fxpipe.trace import trace

TWO = ["cpu", "cpu"]
X = torch.ones(4, 4)


def by_function(h: Tensor) -> bool:
    return torch.is_grad_enabled()  # asks


def by_function_for_inference(h: Tensor) -> bool:
    return not torch.is_inference_mode_enabled()  # asks


def by_a_value(h: Tensor) -> bool:
    return not h.is_inference()  # asks


def by_a_function_of_a_value(h: Tensor) -> bool:
    return not torch.is_inference(h)  # asks


def by_history(h: Tensor) -> bool:
    return h.grad_fn is not None  # asks


def by_leaf(h: Tensor) -> bool:
    return not h.is_leaf  # asks


WAYS = (
    by_function,
    by_function_for_inference,
    by_a_value,
    by_a_function_of_a_value,
    by_history,
    by_leaf,
)


class Asks(nn.Module):
    """Doubles a hidden value where gradients are recorded; or asks, and does the same in any
    case."""

    def __init__(self, asks: Callable[[Tensor], bool], factor: float = 2.0) -> None:
        super().__init__()
        self.asks, self.factor = asks, factor
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.first(x)
        y: Tensor = self.second(h * self.factor if self.asks(h) else h)
        return y


class Masks(nn.Module):
    """Masks only where gradients are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.first(x)
        y: Tensor = self.second(h * mask if torch.is_grad_enabled() else h)  # asks
        return y


class HasAGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():  # PyTorch asks whether gradients are recorded, not the model
            noise = torch.rand(x.shape, generator=self.generator)  # draws
        y: Tensor = self.linear(x + noise)
        return y


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


@pytest.mark.parametrize("tracer", ["auto", "export"])
def test_an_example_that_hides_the_difference_does_not_help(tracer: str) -> None:
    pipe = fxpipe.compile(Masks(), TWO, chunks=2, tracer=tracer)
    with pytest.raises(TraceError, match=r"depends on whether gradients are recorded.*# asks"):
        pipe(X, torch.ones(4, 4))


@pytest.mark.covering(1)
@pytest.mark.parametrize("tracer", ["auto", "export"])
@pytest.mark.parametrize("asks", WAYS)
def test_a_model_that_does_something_else_without_gradients_is_refused(
    asks: Callable[[Tensor], bool], tracer: str
) -> None:
    """A graph would go the way of a training step in an evaluation."""
    with pytest.raises(TraceError, match=r"depends on whether gradients are recorded.*# asks"):
        fxpipe.compile(Asks(asks), TWO, chunks=2, tracer=tracer, example_inputs=(X,))
    with pytest.raises(TraceError, match=r"let it ask for self\.training instead"):
        trace(Asks(asks), (X,), tracer=tracer)


@pytest.mark.parametrize("asks", WAYS)
def test_a_model_may_ask_to_no_effect(asks: Callable[[Tensor], bool]) -> None:
    """So do layers that ask ahead of a checkpoint."""
    model = Asks(asks, factor=1.0)
    with fxpipe.compile(model, TWO, chunks=2, tracer="export") as pipe:
        for mode in torch.enable_grad(), torch.no_grad(), torch.inference_mode():
            with mode:
                torch.testing.assert_close(pipe(X), model(X))


def test_the_line_is_named_that_draws_from_a_generator_of_the_models_own() -> None:
    with pytest.raises(TraceError) as raised:
        trace(HasAGenerator(), (X,))
    line = next(line for line in str(raised.value).splitlines() if line.startswith("  It "))
    assert "It draws random numbers from a generator of its own" in line
    assert "# draws)" in line
    assert str(raised.value).count("\n  It ") == 1


def test_nothing_is_said_of_a_model_that_is_refused_for_another_reason() -> None:
    with pytest.raises(TraceError) as raised:
        trace(Branches(), (X,))
    assert "\n  It " not in str(raised.value)


@pytest.mark.parametrize("tracer", ["auto", "export"])
@pytest.mark.parametrize("asks", [by_history, by_leaf])
def test_a_frozen_model_is_refused_that_does_something_else_once_it_is_thawed(
    asks: Callable[[Tensor], bool], tracer: str
) -> None:
    model = Asks(asks)
    model.requires_grad_(False)
    with pytest.raises(TraceError, match=r"asks \(at .*# asks"):
        fxpipe.compile(model, TWO, chunks=2, tracer=tracer, example_inputs=(X,))
    assert not any(parameter.requires_grad for parameter in model.parameters())


class Padded(nn.Module):
    """Two layers of PyTorch's transformer, which have a fast path for eval mode."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder, self.last = nn.TransformerEncoder(layer, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.last(self.encoder(x, src_key_padding_mask=mask))


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("padded", [0, 2])
def test_a_fast_path_of_pytorchs_that_gives_something_else_is_warned_of(
    is_trained: bool, padded: int
) -> None:
    x, mask = torch.randn(4, 6, 8), torch.zeros(4, 6, dtype=torch.bool)
    mask[::2, 6 - padded :] = True
    model = Padded().train(is_trained)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with fxpipe.compile(model, TWO, chunks=2, example_inputs=(x, mask)) as pipe:
            pipe.eval()
            with torch.no_grad():
                found = pipe(x, mask)
    said = [str(each.message) for each in caught if "fast path" in str(each.message)]
    assert bool(said) is bool(padded)
    if said:
        assert "(at " in said[0] and "transformer.py" in said[0]
    torch.testing.assert_close(found, model.eval()(x, mask))
