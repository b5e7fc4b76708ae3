"""What a forward asks for beside its inputs and its modules: the refusal names the line."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxpipe.ir.errors import TraceError
from fxpipe.trace import trace


class AsksForGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if torch.is_grad_enabled() else x  # asks


class HasAGenerator(AsksForGradients):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():  # PyTorch asks whether gradients are recorded, not the model
            noise = torch.rand(x.shape, generator=self.generator)  # draws
        return self.linear(x + noise)


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


@pytest.mark.parametrize(
    "model, said",
    [
        (AsksForGradients(), ["It asks whether gradients are recorded", "# asks)"]),
        (HasAGenerator(), ["It draws random numbers from a generator of its own", "# draws)"]),
    ],
)
def test_the_line_is_named_that_asks_for_what_no_graph_has(
    model: nn.Module, said: list[str]
) -> None:
    with pytest.raises(TraceError) as raised:
        trace(model, (torch.ones(4, 4),))
    line = next(line for line in str(raised.value).splitlines() if line.startswith("  It "))
    assert all(each in line for each in said)
    assert str(raised.value).count("\n  It ") == 1


def test_nothing_is_said_of_a_model_that_is_refused_for_another_reason() -> None:
    with pytest.raises(TraceError) as raised:
        trace(Branches(), (torch.ones(4, 4),))
    assert "\n  It " not in str(raised.value)
