"""What is traced later is cut like what was cut first."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from tests.zoo import same


class Ways(nn.Module):
    """What its nodes are called depends on the arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, *more, mask=None, scale=1):
        y = self.a(x)
        for each in more:
            y = y + each
        if mask is not None:
            y = y * mask
        return self.b(y) * scale


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_a_model_that_goes_another_way_is_cut_at_the_same_parameters(tracer):
    model, x = Ways(), torch.randn(6, 3)
    calls = [
        lambda call: call(x, x, x, mask=x, scale=2),
        lambda call: call(x),
        lambda call: call(x, x),
        lambda call: call(x, mask=x),
    ]
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer=tracer) as pipe:
        modes = []
        for call in calls * 2:
            torch.testing.assert_close(call(pipe), call(model))
            modes.append(pipe.model_graph)
            assert [list(dict(s.module.named_parameters())) for s in pipe.stages] == [
                ["a.weight", "a.bias"],
                ["b.weight", "b.bias"],
            ]
    assert modes[:4] == modes[4:]  # nothing has been compiled twice


def test_names_that_would_move_a_parameter_are_not_gone_by():
    class Swaps(Ways):
        def forward(self, x, swap=False):
            one, other = (self.b, self.a) if swap else (self.a, self.b)
            return F.linear(F.linear(x, one.weight, one.bias), other.weight, other.bias)

    model, x = Swaps(), torch.randn(6, 3)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        for swap in (False, True, False):
            assert same(pipe(x, swap), torch.cat([model(part, swap) for part in x.split(3)]))
            first = "b.weight" if swap else "a.weight"
            assert first in dict(pipe.stages[0].module.named_parameters())
