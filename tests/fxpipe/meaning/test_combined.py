"""What is said of losses that are neither a mean over the rows nor a sum."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.meaning.errors import BatchWarning

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def contrastive(output, target):
    return F.cross_entropy(output @ target.t(), torch.arange(len(output)))


def mean_plus_sum(output, target):
    return F.mse_loss(output, target) + 0.1 * output.square().sum()


def mean_minus_sum(output, target):
    return F.mse_loss(output, target) - 0.1 * output.square().sum()


def root(output, target):
    return F.mse_loss(output, target).sqrt()


def mean_of_weights(output, target):
    weights = target.abs().sum(1).exp()
    return (weights * output.square().sum(1)).sum() / weights.sum()


def said_of(loss_fn):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with (
        fxpipe.compile(model, ["cpu"] * 2, chunks=4, loss_fn=loss_fn) as pipe,
        pytest.warns(BatchWarning, match="the loss is neither a mean") as told,
    ):
        pipe.step(X, target=X)
    (text,) = [str(each.message) for each in told]
    return text


def test_reports_say_that_a_loss_is_no_mean_with_the_call_that_mends_it():
    def masked(output, target):
        mask = (target[:, :1] > 0).float()
        return ((output - target).square() * mask).sum() / mask.sum()

    with fxpipe.compile(nn.Linear(4, 4), ["cpu"], chunks=4, loss_fn=masked) as pipe:
        with pytest.warns(BatchWarning, match="the loss is neither a mean") as told:
            pipe.step(X, target=X.abs() * torch.tensor([1.0, -1] * 4).unsqueeze(1))
        (warning,) = [str(each.message) for each in told]
        assert "loss_weight=" in warning
        assert f"meaning: {warning}" in str(pipe.report())
        assert warning.removeprefix("the") in " ".join(str(pipe.explain()).split())


def test_reports_say_that_a_loss_has_turned_out_to_be_no_mean_later():
    def loss_fn(output, target):
        return contrastive(output, target) if loss_fn.is_contrastive else F.mse_loss(output, target)

    loss_fn.is_contrastive = False
    with fxpipe.compile(nn.Linear(4, 4), ["cpu"], chunks=4, loss_fn=loss_fn) as pipe:
        pipe.step(X, target=X)
        assert "neither a mean" not in str(pipe.explain())
        loss_fn.is_contrastive = True
        with pytest.warns(BatchWarning, match="the loss is neither a mean"):
            pipe.step(X, target=X)
        assert "neither a mean" in str(pipe.report())
        assert "neither a mean" in str(pipe.explain())


def test_no_weight_is_advised_for_a_loss_over_pairs_of_rows():
    text = said_of(contrastive)
    assert (
        "with loss_weight=" not in text
    )  # no weights of micro-batches make it right by themselves
    assert "means over different things" not in text
    assert "to get it, call loss_fn(pipe(x), target) and its backward" in text


@pytest.mark.parametrize("loss_fn", [mean_plus_sum, mean_minus_sum])
def test_the_sum_in_a_loss_is_to_be_divided_by_the_number_of_rows(loss_fn):
    text = said_of(loss_fn)
    assert "divide that sum by the number of rows" in text
    assert "with loss_weight=" not in text  # no weights of micro-batches make it right


def test_a_sum_plus_a_number_is_said_to_be_one_and_what_is_advised_works():
    penalty = nn.Parameter(torch.tensor(3.0))

    def penalized(output, target):
        return F.mse_loss(output, target, reduction="sum") + penalty.square()

    text = said_of(penalized)
    assert "a sum over the rows plus a number that is the same whatever rows there are" in text

    def advised(output, target):
        part = len(target) / len(X)
        return F.mse_loss(output, target, reduction="sum") + penalty.square() * part

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with (
        fxpipe.compile(model, ["cpu"] * 2, chunks=4, loss_fn=advised, loss_weight="sum") as pipe,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        loss = pipe.step(X, target=X)
    torch.testing.assert_close(loss, penalized(model(X), X).detach())


@pytest.mark.parametrize("loss_fn", [root, mean_of_weights])
def test_a_weight_is_advised_where_one_may_help(loss_fn):
    text = said_of(loss_fn)
    assert "loss_weight=" in text
    assert "divide that sum" not in text


def test_the_sum_in_a_loss_that_a_model_returns_is_said_as_well():
    class Own(nn.Linear):
        def forward(self, x):
            h = super().forward(x)
            return mean_plus_sum(h, x)

    with (
        fxpipe.compile(Own(4, 4), ["cpu"], chunks=4) as pipe,
        pytest.warns(BatchWarning, match="divide that sum by the number of rows"),
    ):
        pipe.step(X)


def test_a_mean_plus_a_sum_can_be_followed_by_a_mean():
    def loss_fn(output, target):
        return F.mse_loss(output, target) + 0.1 * output.square().sum() / len(output)

    with fxpipe.compile(nn.Linear(4, 4), ["cpu"], chunks=4, loss_fn=loss_fn) as pipe:
        model = pipe.module
        torch.testing.assert_close(pipe.step(X, target=X), loss_fn(model(X), X).detach())


@pytest.mark.parametrize(("given", "kind"), [("sum", "sum"), ("rows", "mean")])
def test_a_loss_that_is_not_what_loss_weight_says_is_compared_with_that(given, kind):
    with (
        fxpipe.compile(
            nn.Linear(4, 4), ["cpu"], chunks=4, loss_fn=contrastive, loss_weight=given
        ) as pipe,
        pytest.warns(BatchWarning) as told,
    ):
        pipe.step(X, target=X)
    (text,) = [str(each.message) for each in told]
    said = f"the loss is not the {kind} over the rows that loss_weight='{given}' says: it is "
    assert text.startswith(said)
    assert f"as the {kind} of those of 3 and 4 of them" in text


RECIPE = (
    "If it adds up means over different things, such as rows and tokens, put the counts of the "
    "whole batch into the target, as tensors without dimensions, divide sums by them, and give "
    'loss_weight="sum"'
)
LABELS = torch.tensor([0, -100, 1, 2, -100, 3, 3, 0])


def two_means(output, target):
    return F.mse_loss(output, target["x"]) + F.cross_entropy(output, target["labels"])


def two_sums(output, target):
    labelled = F.cross_entropy(output, target["labels"], reduction="sum") / target["count"]
    return F.mse_loss(output, target["x"], reduction="sum") / target["size"] + labelled


def test_a_loss_of_two_means_is_to_be_written_as_sums_over_counts_of_the_whole_batch():
    model, target = nn.Linear(4, 4), {"x": X, "labels": LABELS}
    with (
        fxpipe.compile(model, ["cpu"], chunks=4, loss_fn=two_means) as pipe,
        pytest.warns(BatchWarning, match="neither a mean") as told,
    ):
        pipe.step(X, target=target)
    (text,) = [str(each.message) for each in told]
    assert RECIPE in text
    target |= {"count": (LABELS != -100).sum(), "size": torch.tensor(float(X.numel()))}
    with (
        fxpipe.compile(model, ["cpu"], chunks=4, loss_fn=two_sums, loss_weight="sum") as pipe,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        loss = pipe.step(X, target=target)
    torch.testing.assert_close(loss, two_means(model(X), target).detach())


@pytest.mark.parametrize(
    "returned", [lambda loss: {"loss": loss, "more": loss}, lambda loss: (loss, loss)]
)
def test_a_loss_function_that_returns_more_than_the_loss_is_told_what_to_do(returned):
    def loss_fn(output, target):
        return returned(two_means(output, target))

    with (
        fxpipe.compile(nn.Linear(4, 4), ["cpu"], chunks=4, loss_fn=loss_fn) as pipe,
        pytest.raises(ValueError, match="and nothing beside it: compute what else"),
    ):
        pipe.step(X, target={"x": X, "labels": LABELS})


@pytest.mark.parametrize("loss_fn", [mean_plus_sum, mean_minus_sum])
def test_the_advice_for_a_mean_plus_a_sum_makes_it_that_of_the_whole_batch(loss_fn):
    def as_a_sum(output, target):
        mean = F.mse_loss(output, target)
        return loss_fn(output, target) - mean + mean * len(target) / len(X)

    model = nn.Linear(4, 4)
    with fxpipe.compile(
        model, ["cpu"], chunks=4, loss_fn=as_a_sum, loss_weight="sum", check=False
    ) as pipe:
        torch.testing.assert_close(pipe.step(X, target=X), loss_fn(model(X), X).detach())
