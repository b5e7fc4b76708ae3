"""Small models, their inputs, and both front ends, for tests of tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxpipe.ir._torch import FakeTensor, FunctionalTensor
from fxpipe.trace import Traced

BOTH = pytest.mark.parametrize("tracer", ["symbolic", "export"])


def x(batch: int = 4, width: int = 8) -> Tensor:
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(batch))


def run(traced: Traced, *args: Any, **kwargs: Any) -> Any:
    return traced.rebuild(traced.graph_module(*traced.bind(args, kwargs)))


def in_a_run(x: Any) -> bool:
    """Whether a model that is given ``x`` runs, and is not being traced."""
    return not isinstance(x, fx.Proxy | FakeTensor | FunctionalTensor)


def placeholders(traced: Traced) -> list[str]:
    return [node.name for node in traced.graph_module.graph.nodes if node.op == "placeholder"]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + 1


class Options(nn.Module):
    """Every kind of argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, flag: bool = True, *, scale: float = 2.0
    ) -> dict[str, Any]:
        h = self.linear(x) if flag else x
        if mask is not None:
            h = h * mask
        return {"h": h * scale, "parts": [h, (h + 1, None)], "flag": flag}


class Noisy(nn.Module):
    """All that a careless tracer disturbs: buffers, random states, plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.constant = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(x)) + self.constant + torch.tensor(2.0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        self.b = nn.Linear(8, 8)
        self.b.weight = self.a.weight
        self.shift = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) + self.shift


class Scaled(nn.Module):
    """Scales by a number that is looked up by the length."""

    def __init__(self, look_up: Callable[[int], float]) -> None:
        super().__init__()
        self.a, self.b, self.look_up = nn.Linear(4, 4), nn.Linear(4, 4), look_up

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * self.look_up(x.shape[1]))


TEXTS: dict[str, Callable[[int], float]] = {
    "str": lambda t: {"3": 2.0, "9": 3.0}.get(str(t), 1.0),
    "repr": lambda t: {"3": 2.0, "9": 3.0}.get(repr(t), 1.0),
    "f-string": lambda t: {"3": 2.0, "9": 3.0}.get(f"{t}", 1.0),
    "%s": lambda t: {"3": 2.0, "9": 3.0}.get("%s" % t, 1.0),  # noqa: UP031
}
"""Numbers that are looked up by the text of a size."""
