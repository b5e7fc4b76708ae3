"""Losses of which only few rows count: a part of a sample without such a row has no loss, and the
loss of the other part, which is that of the whole, does not tell a mean from a sum."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.meaning.errors import BatchWarning

ROWS = 16


def masked_mean(out, target):
    y, mask = target
    return ((out - y) ** 2).mean(1).mul(mask).sum() / mask.sum().clamp(min=1)


def masked_sum(out, target):
    y, mask = target
    return ((out - y) ** 2).mean(1).mul(mask).sum()


def mean_of_chosen(out, target):
    y, mask = target
    chosen = mask > 0
    return ((out - y) ** 2)[chosen].mean() if bool(chosen.any()) else out.sum() * 0


def mean_of_positives(out, label):
    chosen = label == 1
    errors = out.square().mean(1).masked_fill(~chosen, 0)
    return errors.sum() / chosen.sum().clamp(min=1)


def batch(count: int, seed: int):
    """Inputs, the target, and the mask, of which so many rows count."""
    torch.manual_seed(seed)
    mask = torch.zeros(ROWS)
    mask[torch.randperm(ROWS)[:count]] = 1
    return torch.randn(ROWS, 6), (torch.randn(ROWS, 6), mask)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 6))


def stepped(loss_fn, x, target, **options):
    """The loss of a step, and what is warned of."""
    pipe = fxpipe.compile(net(), ["cpu"] * 2, chunks=4, loss_fn=loss_fn, **options)
    with warnings.catch_warnings(record=True) as caught, pipe:
        warnings.simplefilter("always", BatchWarning)
        loss = pipe.step(x, target=target)
        return loss, loss_fn(pipe.module(x), target), [str(each.message) for each in caught]


@pytest.mark.covering(1)
@pytest.mark.one_in(6)
@pytest.mark.parametrize("count", [2, 4, 8, 15])
@pytest.mark.parametrize("loss_fn", [masked_mean, mean_of_chosen])
def test_a_mean_over_few_rows_is_told_of_and_is_no_sum(loss_fn, count):
    for seed in range(6):
        x, target = batch(count, seed)
        _, _, said = stepped(loss_fn, x, target)
        assert any("loss_weight" in text for text in said), seed


def test_a_weight_that_is_zero_where_there_is_a_loss_is_not_proposed():
    """With a mask of ones, ``(mask <= 1).sum()`` is right for this batch, and for no other."""
    x, (y, _) = batch(4, 0)
    (text,) = stepped(masked_mean, x, (y, torch.ones(ROWS)))[2]
    assert "loss_weight=lambda target: target[1].sum()" in text


@pytest.mark.covering(1)
@pytest.mark.one_in(6)
@pytest.mark.parametrize("count", [1, 2, 4, 8, 15])
@pytest.mark.parametrize("loss_fn", [masked_mean, mean_of_chosen])
def test_the_weight_of_such_a_mean_is_taken(loss_fn, count):
    for seed in range(6):
        x, target = batch(count, seed)
        loss, expected, said = stepped(loss_fn, x, target, loss_weight=lambda t: t[1].sum())
        torch.testing.assert_close(loss, expected)
        assert not said


@pytest.mark.one_in(4)
@pytest.mark.parametrize("count", [1, 2, 4, 8, 15])
def test_a_sum_over_few_rows_is_found_to_be_one(count):
    for seed in range(6):
        x, target = batch(count, seed)
        loss, expected, said = stepped(masked_sum, x, target)
        torch.testing.assert_close(loss, expected)
        assert not said


@pytest.mark.one_in(4)
@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_mean_over_few_rows_by_their_label_is_told_of(count):
    for seed in range(6):
        x, (_, mask) = batch(count, seed)
        _, _, said = stepped(mean_of_positives, x, mask.long())
        assert any("loss_weight" in text for text in said), seed


class ItsOwnLoss(nn.Module):
    """A model that returns the mean over the rows that count."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x, labels):
        return mean_of_positives(self.net(x), labels)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_models_own_mean_over_few_rows_is_told_of(count):
    for seed in range(6):
        x, (_, mask) = batch(count, seed)
        pipe = fxpipe.compile(ItsOwnLoss(), ["cpu"] * 2, chunks=4)
        with pytest.warns(BatchWarning, match="loss_weight"), pipe:
            pipe.step(x, mask.long())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("weight", [[1.0, 9.0], [1.0, 1.0, 1.0, 9.0, 1.0, 1.0]])
def test_a_cross_entropy_with_weights_of_classes_is_told_of_with_the_weight_that_it_needs(weight):
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor(weight))
    pattern = r"lambda target: loss_fn.weight\[target\].sum"
    for seed in range(4):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, len(weight)))
        x, y = torch.randn(ROWS, 6), torch.randint(len(weight), (ROWS,))
        y[torch.rand(ROWS) < 0.6] = 0
        y[seed] = weight.index(9.0)
        pipe = fxpipe.compile(model, ["cpu"] * 2, chunks=4, loss_fn=loss_fn)
        with pytest.warns(BatchWarning, match=pattern), pipe:
            pipe.step(x, target=y)
        options = {"loss_weight": lambda target: loss_fn.weight[target].sum()}
        with fxpipe.compile(model, ["cpu"] * 2, chunks=4, loss_fn=loss_fn, **options) as pipe:
            torch.testing.assert_close(pipe.step(x, target=y), loss_fn(model(x), y))


def test_a_mean_plus_a_sum_is_told_from_a_mean_with_weights():
    def both(out, target):
        return out.square().mean() + out.abs().sum()

    x, target = batch(4, 0)
    assert any("plus a sum" in text for text in stepped(both, x, target)[2])
    for seed in range(6):
        x, target = batch(4, seed)
        assert not any("plus a sum" in text for text in stepped(masked_mean, x, target)[2])
