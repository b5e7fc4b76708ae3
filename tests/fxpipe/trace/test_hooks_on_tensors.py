"""A gradient hook that a forward registers on a tensor is in no graph: a warning names the line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe


class Keeps(nn.Module):
    """Keeps the gradient of a hidden value, as Grad-CAM does."""

    gradient: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 2)

    def keep(self, gradient: Tensor) -> None:
        self.gradient = gradient

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        hidden.register_hook(self.keep)
        y: Tensor = self.second(hidden)
        return y


def test_a_hook_that_keeps_the_gradient_is_told_of_and_not_called() -> None:
    model, x = Keeps(), torch.randn(8, 6)
    said = r"Keeps registers a gradient hook on a tensor .*: hidden.register_hook\(self.keep\)\)"
    with (
        fxpipe.compile(model, ["cpu"] * 2, chunks=4) as pipe,
        pytest.warns(UserWarning, match=said),
    ):
        pipe(x).sum().backward()
        assert model.gradient is None
        pipe.module(x).sum().backward()
        assert model.gradient is not None


class Clamps(Keeps):
    """Clamps the gradient of a hidden value."""

    def keep(self, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.clamp(-0.01, 0.01)


@pytest.mark.filterwarnings("error")  # of a graph that is refused nothing else is to be said
def test_a_hook_that_changes_the_gradient_is_named_where_the_graph_is_refused() -> None:
    said = r"another gradient for .*; the forward registers a hook on a tensor \(at .*self.keep\)"
    with (
        fxpipe.compile(Clamps(), ["cpu"] * 2, chunks=4) as pipe,
        pytest.raises(fxpipe.TraceError, match=said),
    ):
        pipe(torch.randn(8, 6))
