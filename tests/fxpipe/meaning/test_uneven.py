"""Rows of many numbers each, all of them alike: what a loss computes across such rows is nearly a
mean over them, and is told from a mean by rows that are less like each other."""

from __future__ import annotations

import itertools
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxpipe
from fxpipe.meaning.check import check
from fxpipe.meaning.trial import Question

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


def step(loss_fn, target=Y, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 3, padding=1))
    with fxpipe.compile(model, ["cpu"] * 2, chunks=4, loss_fn=loss_fn, **options) as pipe:
        return pipe.step(X, target=target), loss_fn(model(X), target)


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


@pytest.mark.covering(1)
@pytest.mark.parametrize("ignored", [255, -1, -100])
@pytest.mark.parametrize(
    "where",
    [slice(4, 8), slice(0, 4), slice(2, 3), (2, slice(3))],
    ids=["the last half", "the first half", "one row", "three pixels"],
)
def test_labels_that_a_loss_leaves_out_are_found_wherever_they_are(ignored, where):
    """The rows of a model that has not been trained have nearly the same loss, and the labels of a
    sample are drawn from all rows: so the check gives the rows losses that differ, and shares of
    the labels that do."""
    target = Y.clone()
    target[where] = ignored
    loss_fn = partial(F.cross_entropy, ignore_index=ignored)
    index = "" if ignored == -100 else f"ignore_index={ignored}"
    with pytest.warns(fxpipe.BatchWarning) as told:
        step(loss_fn, target)
    (text,) = [str(each.message) for each in told]
    assert f"with loss_weight=fxpipe.loss_weight.tokens({index}) it is the whole batch's" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxpipe.BatchWarning)
        weight = fxpipe.loss_weight.tokens(ignore_index=ignored)
        loss, whole = step(loss_fn, target, loss_weight=weight)
    torch.testing.assert_close(loss, whole.detach())


def test_a_weight_that_counts_other_labels_than_the_loss_is_told_which_fits():
    target = Y.clone()
    target[2] = 255
    loss_fn = partial(F.cross_entropy, ignore_index=255)
    with pytest.warns(fxpipe.BatchWarning, match="not the mean that loss_weight says") as told:
        step(loss_fn, target, loss_weight=fxpipe.loss_weight.tokens())
    assert "with loss_weight=fxpipe.loss_weight.tokens(ignore_index=255)" in str(told[0].message)


def weighed_mean(output, target):
    labels, weights = target.values() if isinstance(target, dict) else target
    losses = F.cross_entropy(output, labels, reduction="none").mean((1, 2))
    return (losses * weights).sum() / weights.sum()


@pytest.mark.parametrize(
    "target, code",
    [
        ((Y, torch.rand(8)), "lambda target: target[1].sum()"),
        ({"labels": Y, "weights": torch.rand(8)}, 'lambda target: target["weights"].sum()'),
    ],
    ids=["tuple", "dict"],
)
def test_weights_of_rows_in_a_target_are_told_as_code(target, code):
    with pytest.warns(fxpipe.BatchWarning) as told:
        step(weighed_mean, target)
    assert f"with loss_weight={code} it is the whole batch's" in str(told[0].message)
    loss, whole = step(weighed_mean, target, loss_weight=eval(code))
    torch.testing.assert_close(loss, whole.detach())


def test_labels_cannot_be_counted_in_a_tuple_of_targets():
    says = r"a tuple of 2: .*lambda target: \(target\[0\] != -100\)"
    with pytest.raises(ValueError, match=says):
        step(weighed_mean, (Y, torch.rand(8)), loss_weight=fxpipe.loss_weight.tokens())


class Counting(nn.Module):
    """A loss that knows how many batches there have been, and keeps a mean of its targets."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, output, target):
        self.calls += 1
        with torch.no_grad():
            self.mean.lerp_(target.float().mean(), 0.1)
        return F.cross_entropy(output, target)


def test_the_check_leaves_the_state_of_a_loss_as_it_was():
    loss_fn, expected = Counting(), Counting()
    step(loss_fn)
    for part in Y.chunk(4):
        expected(torch.zeros(2, 2, 32, 32), part)
    assert loss_fn.calls == 4 + 1, "once for each micro-batch, and once by this test"
    expected(torch.zeros(8, 2, 32, 32), Y)
    torch.testing.assert_close(loss_fn.mean, expected.mean)


@pytest.mark.parametrize("ignored", [-100, 7])
def test_a_row_may_be_several_rows_of_the_output(ignored):
    """As where tokens are flattened ahead of the head."""
    torch.manual_seed(0)
    x, target = torch.randn(8, 5, 4), torch.randint(6, (8, 5))
    model = nn.Sequential(nn.Linear(4, 6), nn.Flatten(0, 1), nn.Linear(6, 8))

    def loss_fn(output, target):
        return F.cross_entropy(output, target.flatten(), ignore_index=ignored)

    with warnings.catch_warnings(), fxpipe.compile(model, ["cpu"] * 2, loss_fn=loss_fn) as pipe:
        warnings.simplefilter("error", fxpipe.BatchWarning)
        torch.testing.assert_close(pipe.step(x, target=target), loss_fn(model(x), target).detach())
    target[3, 1:] = ignored
    with (
        fxpipe.compile(model, ["cpu"] * 2, loss_fn=loss_fn) as pipe,
        pytest.warns(fxpipe.BatchWarning, match="rows contribute unequally"),
    ):
        pipe.step(x, target=target)


def test_a_sample_without_a_number_settles_nothing():
    """A sample whose integers are mixed may have rows of padding only, which have no mean: any way
    of putting NaNs together fits, and the samples with a number decide."""
    calls = itertools.count()

    def run(tensors):
        (x,) = tensors
        is_number = next(calls) not in range(3, 9)  # the first of three samples, and its two parts
        return x.max() if is_number else x.max() * float("nan"), None

    question = Question(run, [torch.randn(8, 3)], [0], sizes=[(1, 3)])
    verdict = check(question, is_likely=True)
    assert not verdict.unclear and [problem.path for problem in verdict.problems] == ["output"]
