"""Rows of many numbers each, all of them alike: what a loss computes across such rows is nearly a
mean over them, and is told from a mean by rows that are less like each other."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxpipe
from fxpipe.meaning.sample import uneven

X, Y = torch.randn(8, 1, 32, 32), (torch.rand(8, 32, 32) > 0.8).long()


def dice(output, target, rows):
    """The overlap with class 1: of each row, whose mean is taken, or of all rows together."""
    dims = (1, 2) if rows else (0, 1, 2)
    p, t = output.softmax(1)[:, 1], target.float()
    return (1 - 2 * (p * t).sum(dims) / (p.sum(dims) + t.sum(dims))).mean()


def weighted(output, target):
    return F.cross_entropy(output, target, weight=torch.tensor([0.2, 2.0]))


ACROSS = {
    "an overlap over the batch": lambda o, t: dice(o, t, rows=False),
    "a cross entropy with weights of classes": weighted,
    "a square of a mean": lambda o, t: F.cross_entropy(o, t).square(),
}
OF_ROWS = {
    "an overlap of each row": lambda o, t: dice(o, t, rows=True),
    "a cross entropy": F.cross_entropy,
    "the mean of squares": lambda o, t: (o[:, 1] - t).square().mean(),
}


def step(loss_fn):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 3, padding=1))
    with fxpipe.compile(model, ["cpu"] * 2, chunks=4, loss_fn=loss_fn) as pipe:
        return pipe.step(X, target=Y), loss_fn(model(X), Y)


@pytest.mark.parametrize("name", ACROSS)
def test_a_loss_across_rows_is_told_from_a_mean_also_where_all_rows_are_alike(name):
    with pytest.warns(fxpipe.BatchWarning, match="neither a mean over the rows nor a sum"):
        loss, whole = step(ACROSS[name])
    assert loss != whole
    torch.testing.assert_close(loss, whole.detach(), rtol=2e-2, atol=0)


@pytest.mark.parametrize("name", OF_ROWS)
def test_a_mean_over_rows_is_none_of_these(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxpipe.BatchWarning)
        loss, whole = step(OF_ROWS[name])
    torch.testing.assert_close(loss, whole.detach())


def test_uneven_rows_have_shares_of_their_own_and_values_of_the_example():
    labels = torch.arange(4).repeat(8, 256)
    found = uneven(labels, 0, seed=0)
    most = torch.stack([torch.bincount(row, minlength=4).max() for row in found])
    assert found.shape == labels.shape and set(found.unique().tolist()) == {0, 1, 2, 3}
    assert len(set(most.tolist())) == 8
    numbers = torch.rand(8, 256)
    means = uneven(numbers, 0, seed=0).mean(1)
    assert means.min() < 0.2 and means.max() > 0.4
    assert uneven(numbers, 0, seed=0).min() == numbers.min()


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(8), torch.rand(8, 1), torch.rand(8, 4) > 0.5, torch.zeros(0, 4)],
    ids=["a class for each row", "a number for each row", "flags", "no rows"],
)
def test_what_has_no_shares_stays_as_it_is(tensor):
    assert torch.equal(uneven(tensor, 0, seed=0), tensor)


def test_what_is_not_finite_stays_so():
    tensor = torch.tensor([[1.0, float("inf")], [float("nan"), 2.0]])
    found = uneven(tensor, 0, seed=0)
    assert found.isinf().tolist() == tensor.isinf().tolist()
    assert found.isnan().tolist() == tensor.isnan().tolist()
