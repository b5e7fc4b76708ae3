"""What a forward asks of an input beside its values, its class and its attributes, is answered as
in a real run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.ir.errors import TraceError

TWO = ["cpu", "cpu"]
X = torch.randn(8, 4)


class Image(Tensor):
    """As torchvision has one."""


class Other(Image):
    pass


def is_an_image(x: Tensor) -> bool:
    return isinstance(x, Image)  # asks


def is_plain(x: Tensor) -> bool:
    return type(x) is Tensor  # asks


def has_a_tag(x: Tensor) -> bool:
    return hasattr(x, "tag")  # asks


def has_it_set(x: Tensor) -> bool:
    return bool(getattr(x, "tag", False))  # asks


def may_have_it(x: Tensor) -> bool:
    try:
        return bool(x.tag)  # type: ignore[attr-defined]  # asks
    except AttributeError:
        return False


class Asks(nn.Module):
    def __init__(self, asks: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.asks = asks
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = x * 3 if self.asks(x) else x
        h: Tensor = self.second(self.first(y).relu())
        return h


def tagged() -> Tensor:
    x = X.clone()
    x.tag = True  # type: ignore[attr-defined]
    return x


@pytest.mark.covering(1)
@pytest.mark.parametrize("asks", [is_an_image, is_plain])
@pytest.mark.parametrize("order", [1, -1])
def test_each_class_of_an_input_has_a_program(asks: Callable[[Tensor], bool], order: int) -> None:
    model = Asks(asks)
    calls = [X, X.as_subclass(Image), nn.Parameter(X), X.as_subclass(Other), X.clone()]
    with fxpipe.compile(model, TWO, chunks=2) as pipe:
        for x in calls[::order]:
            expected = torch.cat([model(part) for part in x.chunk(2)])
            torch.testing.assert_close(pipe(x), expected)
        assert len(pipe.compilations) == 3


def test_the_guard_says_it() -> None:
    with fxpipe.compile(Asks(is_an_image), TWO, chunks=2, example_inputs=(X,)) as pipe:
        assert pipe.guards.failure(X.clone()) == ""
        for x in X.as_subclass(Image), tagged():
            said = pipe.guards.failure(x)
            assert said == "arguments: x is of another class, or has other attributes"


def test_an_export_that_asks_for_the_class_of_such_an_input_is_refused() -> None:
    """Its tensors without values are plain ones. Zeros hide the branch."""
    x = torch.zeros(8, 4).as_subclass(Image)
    with pytest.raises(TraceError, match=r"class of a value, and an input is of the class Image"):
        fxpipe.compile(Asks(is_an_image), TWO, tracer="export", chunks=2, example_inputs=(x,))


@pytest.mark.parametrize("tracer", ["auto", "symbolic", "export"])
@pytest.mark.parametrize("asks", [has_a_tag, has_it_set, may_have_it])
def test_a_forward_that_asks_for_an_attribute_of_an_input_is_refused_where_that_is_set(
    asks: Callable[[Tensor], bool], tracer: str
) -> None:
    """A micro-batch has no such attributes."""
    model = Asks(asks)
    with fxpipe.compile(model, TWO, chunks=2, tracer=tracer) as pipe:
        if asks is not may_have_it or tracer == "export":
            torch.testing.assert_close(pipe(X), model(X))
        with pytest.raises(TraceError, match=r"attribute tag of an input \(at .*# asks\)"):
            pipe(tagged())


def test_an_attribute_that_nobody_asks_for_does_no_harm() -> None:
    model = Asks(is_an_image)
    with fxpipe.compile(model, TWO, chunks=2) as pipe:
        torch.testing.assert_close(pipe(tagged()), model(X))
