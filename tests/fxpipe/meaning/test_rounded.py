"""What is no more than rounding errors says nothing about a model."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.meaning.rounded import Rounded
from tests.kernels import by_shape

TWO = ["cpu", "cpu"]


@pytest.fixture
def kernels_that_round_by_shape():
    if os.environ.get("FXPIPE_TEST_KERNELS") == "by_shape":
        yield
        return
    with by_shape():
        yield


class Cancels(nn.Module):
    """Two products that are equal, but for the last bits; and what is made of both."""

    def __init__(self, then):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.then = then

    def forward(self, x):
        h = torch.tanh(self.b(x))
        weights = self.a.weight.t().expand(h.shape[0], 8, 8)
        return self.then(self.a(h), torch.bmm(h[:, None], weights)[:, 0])


def difference(one, other):
    return one - other


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_an_output_of_which_only_rounding_errors_are_left_is_accepted_row_by_row(
    tracer, kernels_that_round_by_shape
):
    torch.manual_seed(0)
    model, x = Cancels(difference), torch.randn(6, 8)
    with fxpipe.compile(model, TWO, chunks=6, example_inputs=(x,), tracer=tracer) as pipe:
        found = pipe(x)
        assert "of 1 row" not in pipe.report()
    loop = torch.cat([model(part) for part in x.chunk(6)])
    assert 0 < loop.abs().max() < 1e-6
    assert torch.equal(found, loop) if tracer == "symbolic" else found.abs().max() < 1e-6


SMALL_BUT_REAL = {
    "the mean of the batch": lambda one, other: one - other + 1e-3 * one.mean(0),
    "a single row": lambda one, other: one - other + (1e-3 * one if len(one) == 1 else 0),
    "a row's neighbour": lambda one, other: one - other + 1e-3 * one.roll(1, 0),
}


@pytest.mark.parametrize("then", SMALL_BUT_REAL.values(), ids=SMALL_BUT_REAL)
def test_more_than_rounding_errors_is_seen_beside_them(then, kernels_that_round_by_shape):
    torch.manual_seed(0)
    with (
        fxpipe.compile(Cancels(then), TWO, chunks=6) as pipe,
        pytest.raises((fxpipe.BatchError, fxpipe.TraceError)),
    ):
        pipe(torch.randn(6, 8))


@pytest.mark.parametrize(
    "function",
    [lambda x: x @ x, torch.tanh, lambda x: x.mean(0)],
    ids=["a product", "tanh", "mean"],
)
def test_what_kernels_round_by_shape_gets_other_last_bits(function):
    x = torch.rand(32, 32)
    with Rounded(0):
        found = function(x)
    assert not torch.equal(found, function(x))
    torch.testing.assert_close(found, function(x), rtol=2e-7, atol=0)


def test_whole_numbers_keep_their_bits_as_kernels_give_them_exactly():
    x = torch.arange(64.0).view(8, 8)
    with Rounded(0):
        assert torch.equal(x @ x, (x.double() @ x.double()).float())
        assert torch.equal(torch.zeros(9).exp(), torch.ones(9))
