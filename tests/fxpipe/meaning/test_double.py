"""What is computed in float32 and returned in float64 has the rounding errors of float32."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.meaning.errors import BatchError, BatchWarning


def network(outputs: int) -> nn.Module:
    hidden = nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh()
    return nn.Sequential(*hidden, nn.Linear(16, outputs))


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = network(4)

    def forward(self, x):
        return self.body(x).double()


class Complex(Doubled):
    def forward(self, x):
        return torch.complex(super().forward(x), super().forward(x) * 2)


class DoubleHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = network(16), nn.Linear(16, 4).double()

    def forward(self, x):
        return self.head(self.body(x).double())


class DoubleInput(Doubled):
    def forward(self, x):
        return self.body(x.float()).double() + x[:, :4]


class SingleWithin(Doubled):
    """Only what is computed within is of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.body = self.body.double()

    def forward(self, x):
        weights = (self.body[0].weight.float(), self.body[2].weight.float())
        hidden = torch.tanh(F.linear(x.float(), weights[0]))
        return F.linear(hidden, weights[1]).double()[:, :4]


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", [Doubled, Complex, DoubleHead, DoubleInput, SingleWithin])
@pytest.mark.parametrize("seed", range(3))
def test_a_model_that_computes_in_single_precision_may_return_double(kind, seed):
    torch.manual_seed(seed)
    model = kind()
    is_double = kind in (DoubleInput, SingleWithin)
    x = torch.randn(8, 6, dtype=torch.double if is_double else torch.float)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BatchWarning)
        pipe = fxpipe.compile(model, ["cpu", "cpu"], chunks=4)
        torch.testing.assert_close(pipe(x), model(x), atol=1e-6, rtol=1e-6)
        if kind is not Complex:
            pipe = fxpipe.compile(model, ["cpu", "cpu"], chunks=4, loss_fn=F.cross_entropy)
            pipe.step(x, target=torch.randint(4, (8,)))


class OwnLoss(Doubled):
    def forward(self, x, labels):
        return F.cross_entropy(self.body(x), labels).double()


@pytest.mark.parametrize("seed", range(3))
def test_a_loss_in_double_precision_of_what_is_single_is_a_mean(seed):
    torch.manual_seed(seed)
    x, labels = torch.randn(8, 6), torch.randint(4, (8,))
    with warnings.catch_warnings():
        warnings.simplefilter("error", BatchWarning)
        fxpipe.compile(OwnLoss(), ["cpu", "cpu"], chunks=4).step(x, labels=labels)
        pipe = fxpipe.compile(
            Doubled().body,
            ["cpu", "cpu"],
            chunks=4,
            loss_fn=lambda o, t: F.cross_entropy(o, t).double(),
        )
        pipe.step(x, target=labels)


def test_what_mixes_rows_is_refused_in_double_precision_too():
    class Mixed(Doubled):
        def forward(self, x):
            output = super().forward(x)
            return output - 0.01 * output.mean(0)

    with pytest.raises(BatchError, match="depends on which other rows there are"):
        fxpipe.compile(Mixed(), ["cpu", "cpu"], chunks=4)(torch.randn(8, 6))
