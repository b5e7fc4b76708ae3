"""Outputs without a batch dimension: means are averaged over the micro-batches, sums added up."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.meaning.errors import BatchError, BatchWarning
from tests.zoo import MLP, gradients

TWO = ["cpu", "cpu"]


class Classifier(nn.Module):
    """Gives what is usual: a loss, and numbers for the log."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(16, 4)

    def forward(self, x, labels, count=None):
        logits = self.head(self.body(x))
        summed = F.cross_entropy(logits, labels, reduction="sum")
        similar = F.normalize(logits, dim=1) @ F.normalize(logits, dim=1).T
        return {
            "loss": summed / (x.shape[0] if count is None else count),
            "sum": summed,
            "positive": (labels > 0).sum(),
            "penalty": self.head.weight.square().sum(),
            "contrast": torch.logsumexp(similar, 1).mean(),
        }


def batch(rows=7):
    return torch.randn(rows, 6), torch.arange(rows) % 4


@pytest.mark.covering(1)
@pytest.mark.parametrize("tracer", ["symbolic", "export"])
@pytest.mark.parametrize("rows", [2, 7, 16])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_each_is_put_together_as_what_it_is(dropout, rows, tracer):
    model, inputs = Classifier(dropout), batch(rows)
    with fxpipe.compile(model, TWO, chunks=2, tracer=tracer) as pipe:
        pipe(*inputs)
        model.eval()  # of which there are exact values
        output, expected = pipe(*inputs), model(*inputs)
        for name in ("loss", "sum", "positive", "penalty"):
            torch.testing.assert_close(output[name], expected[name])
        parts = [model(*part)["contrast"] for part in zip(*(t.chunk(2) for t in inputs))]  # noqa: B905
        if rows != 7:
            torch.testing.assert_close(output["contrast"], sum(parts) / 2)


def test_a_loss_may_be_divided_by_a_number_that_is_given():
    """As by trainers that accumulate gradients, over so many rows, or tokens, in all."""
    model, inputs = Classifier(), batch()
    twin, count = copy.deepcopy(model), torch.tensor(20.0)
    with fxpipe.compile(model, TWO, chunks=3) as pipe:
        loss = pipe(*inputs, count=count)["loss"]
        expected = twin(*inputs, count=count)["loss"]
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(gradients(model), gradients(twin))


def test_what_is_said_is_refused_if_it_is_not_so_and_done_if_that_is_accepted():
    class Plain(nn.Linear):
        def forward(self, x):
            squares = super().forward(x).square()
            return {"sum": squares.sum(), "mean": squares.mean()}

    model, x = Plain(4, 4), torch.randn(6, 4)
    expected = model(x)
    with fxpipe.compile(model, TWO[:1], chunks=3) as pipe:
        torch.testing.assert_close(pipe(x), expected)
    said = {"sum": None, "mean": "sum"}  # the other way round: three micro-batches of equal size
    with (
        fxpipe.compile(model, TWO[:1], chunks=3, out_dims=said) as pipe,
        pytest.raises(BatchError, match=r"output.sum has no batch .*, but it is a sum over the"),
    ):
        pipe(x)
    with (
        fxpipe.compile(model, TWO[:1], chunks=3, out_dims=said, check="warn") as pipe,
        pytest.warns(fxpipe.BatchWarning, match="out_dims says that output.sum has no batch"),
    ):
        output = pipe(x)
    torch.testing.assert_close(output["sum"], expected["sum"] / 3)
    torch.testing.assert_close(output["mean"], expected["mean"] * 3)


def test_a_tensor_without_a_batch_is_added_up_if_it_is_a_sum():
    class Counts(nn.Linear):
        def forward(self, x):
            return super().forward(x).softmax(1).sum(0)

    model, x = Counts(4, 3), torch.randn(6, 4)
    for out_dims in ("sum", None):
        with fxpipe.compile(model, TWO[:1], chunks=3, out_dims=out_dims) as pipe:
            torch.testing.assert_close(pipe(x), model(x))


def test_an_input_is_no_sum():
    with (
        fxpipe.compile(Classifier(), TWO, in_dims="sum") as pipe,
        pytest.raises(BatchError, match="in_dims"),
    ):
        pipe(*batch())


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_step_adds_up_a_loss_function_that_is_a_sum(reduction):
    model, x, y = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)), torch.randn(7, 6), batch()[1]
    twin, loss_fn = copy.deepcopy(model), nn.CrossEntropyLoss(reduction=reduction)
    with fxpipe.compile(model, TWO, chunks=3, loss_fn=loss_fn) as pipe:
        loss = pipe.step(x, target=y)
        expected = loss_fn(twin(x), y)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(gradients(model), gradients(twin))


def test_a_loss_function_over_tokens_is_warned_of():
    model, x, y = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)), torch.randn(6, 6), batch(6)[1]
    y = torch.where(torch.arange(6) < 4, y, -100)
    with (
        fxpipe.compile(model, TWO, chunks=3, loss_fn=nn.CrossEntropyLoss()) as pipe,
        pytest.warns(fxpipe.BatchWarning, match="the loss is neither a mean over the rows nor a"),
    ):
        pipe.step(x, target=y)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_a_step_adds_up_a_models_loss_that_is_a_sum(schedule):
    model, inputs = Classifier(), batch()
    twin, count = copy.deepcopy(model), torch.tensor(20.0)
    with fxpipe.compile(model, TWO, chunks=3, schedule=schedule) as pipe:
        for given in ({"count": count}, {}):
            loss = pipe.step(*inputs, **given)
            expected = twin(*inputs, **given)["loss"]
            expected.backward()
            torch.testing.assert_close(loss, expected.detach())
            torch.testing.assert_close(gradients(model), gradients(twin))
            assert len(pipe.losses) == 3


def test_the_loss_may_be_a_part_of_an_object():
    class Result:
        def __init__(self, loss):
            self.loss = loss

    class Boxed(Classifier):
        def forward(self, x, labels):
            return Result(super().forward(x, labels)["sum"])

    model, inputs = Boxed(), batch()
    with fxpipe.compile(model, TWO, chunks=3) as pipe:
        torch.testing.assert_close(pipe.step(*inputs), model(*inputs).loss.detach())


class Counting:
    """A loss whose second term grows with the number of its calls."""

    calls = 0

    def __call__(self, out, target):
        self.calls += 1
        return (out - target).square().mean() + self.calls / 100 * out.square().mean()


def drawing(out, target):
    return ((out - target) * (torch.rand_like(out) > 0.5)).square().mean()


@pytest.mark.parametrize("loss_fn", [Counting(), drawing], ids=["counting", "drawing"])
def test_a_loss_that_is_another_one_each_time_is_said_to_be_that(loss_fn):
    torch.manual_seed(0)
    x = torch.randn(12, 6)
    pipe = fxpipe.compile(nn.Linear(6, 6), ["cpu"], chunks=3, loss_fn=loss_fn)
    with pytest.warns(BatchWarning, match="another number each time"), pipe:
        pipe.step(x, target=x)
    options = {"loss_fn": loss_fn, "loss_weight": "rows"}
    pipe = fxpipe.compile(nn.Linear(6, 6), ["cpu"], chunks=3, **options)
    with warnings.catch_warnings(), pipe:
        warnings.simplefilter("error", BatchWarning)
        pipe.step(x, target=x)


# ----------------------------------------------------- losses that are infinite for some rows


class Frames(nn.Sequential):
    """Gives the log-probabilities of 40 symbols for each frame."""

    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 40), nn.LogSoftmax(-1))


def ctc(output, target, reduction="mean"):
    frames = torch.full((len(output),), output.shape[1])
    own = output.transpose(0, 1)
    return F.ctc_loss(own, target["symbols"], frames, target["lengths"], reduction=reduction)


def of_texts(frames, symbols):
    """Frames, and texts of distinct symbols; in texts with repeated ones, which need more frames,
    there may be more than the frames have room for, and then the loss is infinite."""
    target = {
        "symbols": torch.arange(1, symbols + 1).repeat(8, 1),
        "lengths": torch.full((8,), symbols),
    }
    return torch.randn(8, frames, 8), target


@pytest.mark.covering(1)
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("symbols", [8, 14, 16])
def test_a_mean_is_no_sum_though_it_is_infinite_for_other_texts(symbols, check):
    model, (x, target) = Frames(), of_texts(16, symbols)
    twin = copy.deepcopy(model)
    with fxpipe.compile(model, TWO, chunks=4, loss_fn=ctc, check=check) as pipe:
        loss = pipe.step(x, target=target)
        assert "loss_fn is taken for a mean over the rows" in str(pipe.explain())
    expected = ctc(twin(x), target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradients(model), gradients(twin))


def test_a_sum_is_one_though_it_is_infinite_for_other_texts():
    def summed(output, target):
        return ctc(output, target, "sum")

    model, (x, target) = Frames(), of_texts(16, 14)
    with fxpipe.compile(model, TWO, chunks=4, loss_fn=summed) as pipe:
        torch.testing.assert_close(pipe.step(x, target=target), summed(model(x), target).detach())


def test_a_loss_whose_target_numbers_the_rows_of_the_mini_batch_is_to_be_computed_of_all_outputs():
    def contrastive(output, numbers):
        return F.cross_entropy(output @ output.T, numbers)

    x, numbers = torch.randn(8, 12), torch.arange(8)
    with fxpipe.compile(MLP(), TWO, chunks=4, loss_fn=contrastive) as pipe:
        with pytest.raises(BatchError, match="Where the target numbers the rows") as error:
            pipe.step(x, target=numbers)
        assert "out of bounds. Give" in str(error.value), "a sentence ends with one full stop"
        loss = contrastive(pipe(x), numbers)  # as the message says
        torch.testing.assert_close(loss, contrastive(pipe.module(x), numbers))


def test_a_tensor_of_the_target_that_may_have_no_rows_is_named_where_the_loss_is_no_mean():
    def weighted(output, target):  # ["scale"] has a number for each of as many columns as rows
        return F.mse_loss(output[:, 0], target["y"]) * target["scale"].mean() ** 3

    target = {"y": torch.randn(8), "scale": torch.rand(8)}
    with (
        fxpipe.compile(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), TWO, chunks=4, loss_fn=weighted
        ) as pipe,
        pytest.warns(BatchWarning, match=r"target\['y'\] and target\['scale'\] are cut into"),
    ):
        pipe.step(torch.randn(8, 4), target=target)


def test_a_loss_that_is_infinite_for_all_rows_has_to_be_said_to_be_a_mean_or_a_sum():
    model, (x, target) = Frames(), of_texts(8, 14)
    with (
        fxpipe.compile(model, TWO, chunks=4, loss_fn=ctc) as pipe,
        pytest.raises(BatchError, match="could not be found out: it is inf for rows like those of"),
    ):
        pipe.step(x, target=target)
    with fxpipe.compile(model, TWO, chunks=4, loss_fn=ctc, loss_weight="rows") as pipe:
        assert pipe.step(x, target=target).isinf()


def test_a_loss_that_is_a_mean_in_some_samples_and_a_sum_in_others_is_neither():
    """Which of them it is goes by an input that all rows share, and that samples change."""

    class Either(Classifier):
        def forward(self, x, labels, shared):
            losses = F.cross_entropy(self.head(self.body(x)), labels, reduction="none")
            return torch.where(shared[0] > 0.5, losses.sum(), losses.mean())

    given = torch.tensor([0.5, 0.1, 0.9])
    with (
        fxpipe.compile(Either(), TWO, chunks=2) as pipe,
        pytest.warns(fxpipe.BatchWarning, match="output is neither a mean over the rows nor a sum"),
    ):
        pipe(*batch(6), given)
