"""The function that a warning names, as the ``loss_weight`` that makes a loss the whole batch's: it
has to be right for other rows, too."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.meaning.trial import Trial
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


def with_isnan(output, target):
    return (output - target).abs()[~target.isnan()].mean()


def with_nanmean(output, target):
    return (output - target).abs().nanmean()


def with_sentinel(output, target):
    is_known = target > -999
    return ((output - target).abs() * is_known).sum() / is_known.sum()


def with_equal_sentinel(output, target):
    return (output - target).abs()[target != -1000].mean()


def of_first(output, target):
    return with_isnan(output, target[0])


def with_mask(output, target):
    y, mask = target.values() if isinstance(target, dict) else target
    return ((output - y).abs() * mask).sum() / mask.sum()


def with_padding(output, target):
    y, is_padding = target
    return (output - y).abs().clamp(min=0.001)[~is_padding].mean()


def within_lengths(output, target):
    mask = torch.arange(output.shape[1]) < target["len"][:, None]
    return with_mask(output, (target["y"], mask))


torch.manual_seed(0)
Y = torch.randn(32, 12)
MASK = torch.arange(12) < torch.randint(3, 13, (32, 1))
MISSING, FILLED = Y.masked_fill(~MASK, torch.nan), Y.masked_fill(~MASK, -1000.0)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "loss_fn, target, code",
    [
        (with_isnan, MISSING, "fxpipe.loss_weight.observed()"),
        (with_nanmean, MISSING, "fxpipe.loss_weight.observed()"),
        (lambda o, t: with_isnan(o, t["y"]), {"y": MISSING}, 'fxpipe.loss_weight.observed("y")'),
        (of_first, (MISSING, Y), "lambda target: (~target[0].isnan()).sum()"),
        (with_sentinel, FILLED, "lambda target: (target > -999).sum()"),
        (with_equal_sentinel, FILLED, "lambda target: (target != -1000).sum()"),
        (with_mask, (Y, MASK), "lambda target: target[1].sum()"),
        (with_mask, (Y, MASK.long()), "lambda target: target[1].sum()"),
        (with_mask, {"y": Y, "mask": MASK.float()}, 'lambda target: target["mask"].sum()'),
        (with_padding, (Y, ~MASK), "lambda target: (target[1] == 0).sum()"),
        (within_lengths, {"y": Y, "len": MASK.sum(1)}, 'lambda target: target["len"].sum()'),
    ],
)
def test_the_function_that_is_named_counts_what_the_loss_is_a_mean_of(loss_fn, target, code):
    torch.manual_seed(1)
    model, x = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 12)), torch.randn(32, 8)
    with fxpipe.compile(model, TWO, chunks=4, loss_fn=loss_fn) as pipe:
        text = told(lambda: pipe.step(x, target=target))
        assert f"with loss_weight={code} it is the whole batch's" in text
    weight = eval(code)
    with (
        fxpipe.compile(model, TWO, chunks=4, loss_fn=loss_fn, loss_weight=weight) as pipe,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", fxpipe.BatchWarning)
        loss = pipe.step(x, target=target)
    torch.testing.assert_close(loss, loss_fn(model(x), target).detach())


class Compares(nn.Module):
    """Returns its loss, with a mask that it makes itself."""

    def __init__(self, loss_fn):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 12))
        self.loss_fn = loss_fn

    def forward(self, x, y):
        return self.loss_fn(self.layers(x), y)


@pytest.mark.parametrize(
    "loss_fn, y, code",
    [
        (with_isnan, MISSING, 'fxpipe.loss_weight.observed("y")'),
        (with_sentinel, FILLED, "lambda y, **_: (y > -999).sum()"),
    ],
)
def test_so_it_does_for_a_model_that_returns_its_loss(loss_fn, y, code):
    model, x = Compares(loss_fn), torch.randn(32, 8)
    with fxpipe.compile(model, TWO, chunks=4) as pipe:
        text = told(lambda: pipe.step(x, y))
        assert f"with loss_weight={code} it is the model's" in text
    with (
        fxpipe.compile(model, TWO, chunks=4, loss_weight=eval(code)) as pipe,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", fxpipe.BatchWarning)
        torch.testing.assert_close(pipe.step(x, y), model(x, y).detach())


class Batched(nn.Module):
    """Takes one dict, and returns its loss."""

    def __init__(self, loss_fn):
        super().__init__()
        self.compares = Compares(loss_fn)

    def forward(self, batch):
        return self.compares(batch["x"], batch["labels"]["y"])


@pytest.mark.parametrize(
    "loss_fn, y, code",
    [
        (with_isnan, MISSING, 'fxpipe.loss_weight.observed("batch.labels.y")'),
        (with_sentinel, FILLED, 'lambda batch, **_: (batch["labels"]["y"] > -999).sum()'),
    ],
)
def test_so_it_does_for_labels_within_a_dict_of_arguments(loss_fn, y, code):
    model, batch = Batched(loss_fn), {"x": torch.randn(32, 8), "labels": {"y": y}}
    with fxpipe.compile(model, TWO, chunks=4) as pipe:
        text = told(lambda: pipe.step(batch))
        assert f"with loss_weight={code} it is the model's" in text
    with fxpipe.compile(model, TWO, chunks=4, loss_weight=eval(code)) as pipe:
        torch.testing.assert_close(pipe.step(batch), model(batch).detach())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("left_out", [-100, -1, 2, 255])
def test_so_it_does_for_weights_of_classes_and_a_label_that_is_left_out(left_out: int):
    torch.manual_seed(1)
    labels = torch.randint(4, (32,)).masked_fill(torch.arange(32) % 5 < 2, left_out)
    loss_fn = nn.CrossEntropyLoss(torch.tensor([0.3, 1, 1.5, 2]), ignore_index=left_out)
    code = f"lambda target: loss_fn.weight[target[target != {left_out}]].sum()"
    model, x = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)), torch.randn(32, 8)
    with fxpipe.compile(model, TWO, chunks=4, loss_fn=loss_fn) as pipe:
        text = told(lambda: pipe.step(x, target=labels))
        assert f"with loss_weight={code} it is the whole batch's" in text
    weight = eval(code, {"loss_fn": loss_fn})
    with fxpipe.compile(model, TWO, chunks=4, loss_fn=loss_fn, loss_weight=weight) as pipe:
        loss = pipe.step(x, target=labels)
    torch.testing.assert_close(loss, loss_fn(model(x), labels).detach())


@pytest.mark.parametrize("at_least", [0, 1])
def test_a_weight_of_nothing_for_rows_whose_loss_is_something_is_told(at_least):
    """A detector's loss has a term for pictures with nothing on them. As a weight neither the
    number of objects is right, which leaves these out, nor at least one."""

    def loss_fn(output, target):
        summed = F.binary_cross_entropy_with_logits(output, target, reduction="sum")
        return summed / target.sum().clamp(min=1)

    x, y = torch.randn(8, 4), (torch.rand(8, 20) > 0.8).float()
    y[5:7] = 0
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 20))
    pipe = fxpipe.compile(
        model,
        ["cpu"] * 2,
        chunks=4,
        loss_fn=loss_fn,
        loss_weight=lambda target: target.sum().clamp(min=at_least),
    )
    with pipe, pytest.warns(fxpipe.BatchWarning, match="not the mean that loss_weight says"):
        pipe.step(x, target=y)


def test_rows_without_weight_may_have_a_loss_that_is_no_number_or_that_all_rows_have():
    def loss_fn(output, target):
        return F.cross_entropy(output, target, ignore_index=0) + 3.0

    x, y = torch.randn(8, 4), torch.tensor([1, 2, 0, 0, 1, 0, 2, 1])
    with fxpipe.compile(
        nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)),
        ["cpu"] * 2,
        chunks=4,
        loss_fn=loss_fn,
        loss_weight=fxpipe.loss_weight.tokens(ignore_index=0),
    ) as pipe:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss = pipe.step(x, target=y)
        torch.testing.assert_close(loss, loss_fn(pipe.module(x), y))
