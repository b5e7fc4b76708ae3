"""Micro-batches of a size that has not come before: a model or a loss that takes rows in pairs is
right for some sizes only."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.compiler import later_checks
from fxpipe.meaning.errors import BatchWarning


def of_pairs(output, target):
    return -F.logsigmoid(output[0::2] - output[1::2]).mean()


def scores() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))


@pytest.mark.covering(1)
@pytest.mark.parametrize("first", [True, False], ids=["at once", "after others"])
@pytest.mark.parametrize("rows", [12, 4])
def test_a_loss_of_pairs_is_told_of_once_a_micro_batch_has_an_odd_number_of_rows(rows, first):
    torch.manual_seed(0)
    pipe = fxpipe.compile(scores(), ["cpu", "cpu"], chunks=4, loss_fn=of_pairs)
    if not first:
        with warnings.catch_warnings():
            warnings.simplefilter("error", BatchWarning)
            for _ in range(3):
                pipe.step(torch.randn(16, 6), target=torch.zeros(16))
    with pytest.warns(BatchWarning, match="neither a mean over the rows nor a sum"):
        pipe.step(torch.randn(rows, 6), target=torch.zeros(rows))


class Pairs(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 4))

    def forward(self, x):
        output = super().forward(x)
        return output[0::2] - output[1::2]


@pytest.mark.parametrize("rows", [[8, 12], [12, 8], [12, 10, 4, 16, 6]])
def test_a_model_of_pairs_gets_micro_batches_that_it_takes(rows):
    torch.manual_seed(0)
    model = Pairs()
    pipe = fxpipe.compile(model, ["cpu", "cpu"], chunks=4)
    for n in rows:
        x = torch.randn(n, 6)
        torch.testing.assert_close(pipe(x), model(x))


class ReturningItsLoss(Pairs):
    def forward(self, x, labels):
        return -F.logsigmoid(super().forward(x)).mean()


@pytest.mark.parametrize("rows", [[8, 12], [12]])
def test_a_model_that_returns_its_loss_of_pairs_is_told_of_at_an_odd_size(rows):
    torch.manual_seed(0)
    pipe = fxpipe.compile(ReturningItsLoss(), ["cpu", "cpu"], chunks=4)
    *before, last = rows
    for n in before:
        pipe.step(torch.randn(n, 6), labels=torch.zeros(n))
    with pytest.warns(BatchWarning, match="micro-batches of 3 rows"):
        pipe.step(torch.randn(last, 6), labels=torch.zeros(last))


def test_other_models_and_losses_are_not_checked_as_a_whole_at_new_sizes(monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("the model was checked again")

    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    pipe = fxpipe.compile(model, ["cpu", "cpu"], chunks=4, loss_fn=F.mse_loss)
    monkeypatch.setattr(later_checks, "takes_size", never)
    for n in 8, 12, 4, 7:
        x, y = torch.randn(n, 6), torch.randn(n, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("error", BatchWarning)
            loss = pipe.step(x, target=y)
        torch.testing.assert_close(loss, F.mse_loss(model(x), y).detach())
