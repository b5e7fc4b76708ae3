"""Outputs of which ``out_dims`` says how they are put together are compared like any other."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.meaning.errors import BatchError, BatchWarning

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


class Gives(nn.Module):
    """What a function makes of a linear layer's output."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x))


class Towers(nn.Module):
    """Scores of every row of one input with every row of the other."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, a, b):
        return self.one(a) @ self.two(b).t()


def given(model, *args, **options):
    with fxpipe.compile(model, ["cpu"], chunks=4, **options) as pipe:
        return pipe(*args)


def centred(h):
    return h - h.mean(0)


CASES = {
    "joined and mixed": (Gives(centred), (X,), 0, "is joined along dimension 0, but it depends on"),
    "scores of all pairs": (Towers(), (X, X), 0, r"its shape is \(7, 7\) for 7 rows, and \(3, 3\)"),
    "no mean": (Gives(lambda h: [h, h.amax(0)]), (X,), [0, None], "is averaged, but it is someth"),
    "a sum": (Gives(lambda h: [h, h.sum(0)]), (X,), [0, None], "but it is a sum over the rows"),
    "a mean": (Gives(lambda h: [h, h.mean(0)]), (X,), [0, "sum"], "but it is a mean over the rows"),
    "no loss by sums": (Gives(lambda h: h.square().mean().sqrt()), (X,), "sum", "is added up, but"),
    "largest places": (Gives(lambda h: [h, h.argmax(0)]), (X,), [0, None], "is the same for all"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES)
def test_what_differs_is_refused_or_warned_of_or_accepted(case):
    model, args, out_dims, text = CASES[case]
    with pytest.raises(BatchError, match=f"(?s)out_dims says that output.*{text}") as error:
        given(model, *args, out_dims=out_dims)
    assert 'check="warn"' in str(error.value) or "leave it out of out_dims" in str(error.value)
    if case != "largest places":  # of which the runtime takes none
        with pytest.warns(BatchWarning, match=f"(?s)out_dims says that output.*{text}"):
            given(model, *args, out_dims=out_dims, check="warn")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            given(model, *args, out_dims=out_dims, check=False)


@pytest.mark.parametrize(
    ("function", "out_dims"),
    [
        (lambda h: h, 0),
        (lambda h: h.t(), -1),
        (lambda h: {"h": h, "mean": h.mean(0)}, {"mean": None}),
        (lambda h: (h, h.sum(0)), (0, "sum")),
        (lambda h: (h, h.shape[0], 1.5), 0),
        (lambda h: (h, h.shape[1]), (0, None)),
    ],
)
def test_what_is_as_it_is_said_is_right(function, out_dims):
    with warnings.catch_warnings():
        warnings.simplefilter("error", BatchWarning)
        model = Gives(function)
        torch.testing.assert_close(given(model, X, out_dims=out_dims), model(X))


def test_numbers_are_compared_whatever_out_dims_says():
    model = Gives(lambda h: (h, h.shape[0] ** 0.5))
    for out_dims in (0, (0, None), (0, "sum")):
        with pytest.raises(BatchError, match=r"output\[1\] is 2.6.* depends on the batch size"):
            given(model, X, out_dims=out_dims)


def test_the_dimensions_of_inputs_are_found_by_outputs_that_are_said():
    model, x = Gives(lambda h: h.cumsum(1)), X.view(2, 4, 4)
    with fxpipe.compile(model, ["cpu"], chunks=2, out_dims=0) as pipe:
        torch.testing.assert_close(pipe(x), model(x))
    along_time = Gives(lambda h: h.cumsum(0))
    with fxpipe.compile(along_time, ["cpu"], chunks=2, out_dims=1) as pipe:
        torch.testing.assert_close(pipe(x), along_time(x))


def test_the_advice_for_scores_of_all_pairs_can_be_followed():
    with pytest.raises(BatchError, match=r'give out_dims with one .* and check="warn"'):
        given(Towers(), X, X, in_dims=0)
    with pytest.warns(BatchWarning, match="joined along dimension 0"):
        assert given(Towers(), X, X, in_dims=0, out_dims=0, check="warn").shape == (8, 2)


def test_a_loss_that_is_no_mean_is_warned_of_as_where_nothing_is_said():
    with pytest.warns(BatchWarning, match="which is what a pipeline gives"):
        given(Gives(lambda h: h.square().mean().sqrt()), X, out_dims=None)
    model = Gives(lambda h: (h, h.square().mean().sqrt()))
    with pytest.warns(BatchWarning, match=r"output\[1\] has no batch .* which is what a pipeline"):
        given(model, X, out_dims=(0, None))
