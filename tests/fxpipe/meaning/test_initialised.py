"""Models whose first call initialises their parameters by the rows that it is given."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fxpipe


class ActNorm(nn.Module):
    """Normalises by the mean and the deviation of the first batch, as Glow does."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(8))
        self.register_buffer("is_initialised", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_initialised:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.std(0, correction=0) + 1e-6))
                self.is_initialised.fill_(1)
        return (x + self.shift) * self.scale


@pytest.mark.parametrize("options", [{}, {"check": "warn"}, {"chunks": 1}])
def test_a_first_call_that_initialises_parameters_is_to_be_made_ahead(options) -> None:
    model = nn.Sequential(nn.Linear(8, 8), ActNorm(), nn.Linear(8, 4))
    x, before = torch.randn(12, 8), copy.deepcopy(model.state_dict())
    pipe = fxpipe.compile(model, ["cpu"] * 2, **({"chunks": 3} | options))
    with pytest.raises(fxpipe.TraceError, match=r"first called in train mode, .* call it once"):
        pipe(x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model(x)
    parts = [model(part) for part in x.chunk(options.get("chunks", 3))]
    assert torch.equal(pipe(x), torch.cat(parts))
