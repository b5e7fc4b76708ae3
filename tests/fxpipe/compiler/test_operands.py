"""Numbers that differ between calls are to be given as tensors only where that helps."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import fxpipe

X = torch.randn(8, 4)


class Scaled(nn.Module):
    """Computes with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, n: float) -> Tensor:
        return self.second(self.first(x).tanh() * n + n / 2)


class Looped(Scaled):
    """Goes through a loop as often as a number says."""

    def forward(self, x: Tensor, n: float) -> Tensor:
        for _ in range(int(n)):
            x = self.first(x).tanh()
        return self.second(x)


class Indexed(Scaled):
    """Takes a column by its number."""

    def forward(self, x: Tensor, n: float) -> Tensor:
        return self.second(self.first(x)) + x[:, int(n) % 4, None] * 2


def advice(model: nn.Module, tracer: str) -> str:
    """What the user is told after eight calls with eight numbers."""
    with (
        fxpipe.compile(model, ["cpu", "cpu"], chunks=2, tracer=tracer) as pipe,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        for n in range(1, 9):
            pipe(X, n)
    said = (str(each.message) for each in told)
    (found,) = (text for text in said if "has been compiled 8 times" in text)
    return found


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_a_number_that_is_computed_with_is_to_be_a_tensor(tracer):
    model = Scaled()
    assert advice(model, tracer).endswith("and give numbers as tensors")
    with fxpipe.compile(model, ["cpu", "cpu"], chunks=2, tracer=tracer) as pipe:
        for n in range(1, 4):
            torch.testing.assert_close(pipe(X, torch.tensor(float(n))), model(X, n))
        assert len(pipe.compilations) == 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("tracer", ["symbolic", "export"])
@pytest.mark.parametrize("kind", [Looped, Indexed])
def test_a_number_that_decides_what_is_computed_is_not(kind, tracer):
    found = advice(kind(), tracer)
    assert "as tensors" not in found
    assert "What the model computes depends on it" in found
