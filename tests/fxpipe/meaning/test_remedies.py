"""The function that a warning names, as the ``loss_weight`` that makes a loss the whole batch's: it
has to be right for other rows, too."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.meaning.check import Trial
from fxpipe.meaning.weights import remedy

TWO = ["cpu", "cpu"]


class Forecaster(nn.Module):
    """Returns the mean over what has been observed; ``static`` has categories of each row."""

    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(n, 16) for n in (12, 5))
        self.a, self.b, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 12)

    def forward(self, x, static, target, observed):
        known = sum(embed(static[:, i]) for i, embed in enumerate(self.embeddings))
        output = self.head(torch.relu(self.b(torch.relu(self.a(x) + known))))
        return ((output - target).square() * observed).sum() / observed.sum()


def forecasts():
    """Of these a sample has as many categories, in proportion, as it has values observed."""
    torch.manual_seed(0)
    x, static, target = torch.randn(32, 8), torch.randint(0, 5, (32, 2)), torch.randn(32, 12)
    observed = (torch.rand(32, 12) > 0.3).float()
    return Forecaster(), (x, static, target, observed)


def told(call):
    """The warning of a call about what micro-batches mean."""
    with pytest.warns(fxpipe.BatchWarning) as caught:
        call()
    return str(caught[0].message)


def test_a_count_that_agrees_by_chance_is_not_named():
    model, batch = forecasts()
    with fxpipe.compile(model, TWO, chunks=4) as pipe:
        text = told(lambda: pipe.step(*batch))
    assert "with loss_weight=lambda observed, **_: observed.sum() it is the model's" in text


def test_a_count_that_agrees_by_chance_is_found_wrong_where_it_is_given():
    model, batch = forecasts()
    weight = fxpipe.loss_weight.tokens("static", ignore_index=4)
    with fxpipe.compile(model, TWO, chunks=4, loss_weight=weight) as pipe:
        text = told(lambda: pipe.step(*batch))
    assert "output is not the mean that loss_weight says" in text
    assert "with loss_weight=lambda observed, **_: observed.sum() it is the model's" in text


def test_what_the_warning_names_is_right():
    model, batch = forecasts()
    weight = lambda observed, **_: observed.sum()  # noqa: E731
    with (
        fxpipe.compile(model, TWO, chunks=4, loss_weight=weight) as pipe,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", fxpipe.BatchWarning)
        torch.testing.assert_close(pipe.step(*batch), model(*batch).detach())


def trial(mask, kinds, sizes=(1, 2)):
    """A sample in which the loss of a row is its number, and that of several a masked mean."""
    mask, kinds = torch.tensor(mask), torch.tensor(kinds)
    losses = torch.arange(len(mask)).float()
    rows = torch.split(torch.arange(len(mask)), list(sizes))
    parts = [{"output": (losses * mask)[i].sum() / mask[i].sum()} for i in rows]
    whole = {"output": (losses * mask).sum() / mask.sum()}
    return Trial(sizes, "given", [mask, kinds], whole, parts)


def named(*trials):
    def weigh(function):
        return lambda tensors: function(mask=tensors[0], kinds=tensors[1])

    return remedy(trials, "output", [("kinds", 1), ("mask", 0)], weigh, [0, 0])


def test_of_a_mask_and_a_count_that_both_fit_the_mask_is_named():
    both = trial([1.0, 1.0, 0.0], [3, 3, 7])
    assert named(both) == "lambda mask, **_: mask.sum()"


def test_a_remedy_has_to_fit_every_sample():
    fits, other = trial([1, 0, 1], [7, 3, 7]), trial([1, 0, 1], [3, 7, 7])
    for each in fits, other:
        each.tensors[0] = torch.tensor([-1, 1, 1])
    assert named(fits) == 'fxpipe.loss_weight.tokens("kinds", ignore_index=3)'
    assert named(fits, other) == ""


def test_numbers_that_are_negative_in_another_sample_are_no_weights():
    first, second = trial([1.0, 0.0, 1.0], [0, 0, 0]), trial([1.0, 0.0, 1.0], [0, 0, 0])
    assert named(first, second) == "lambda mask, **_: mask.sum()"
    second.tensors[0] = torch.tensor([-1.0, 1.0, 1.0])
    assert named(first, second) == ""
