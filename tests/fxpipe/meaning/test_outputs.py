"""What a model returns, its pipeline returns, put together from the micro-batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.meaning.errors import BatchError
from tests.zoo import MLP

X = torch.ones(6, 12)


TWO = ["cpu", "cpu"]


class Outputs(nn.Module):
    """A structure in, a structure out."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, batch, *, scale=1.0, mask=None):
        h = torch.tanh(self.a(batch["x"])) * scale
        if mask is not None:
            h = h * mask
        y = self.b(h)
        return {"y": y, "parts": [h, (y.mean(), None)], "scale": scale, "x": batch["x"]}


def test_any_structure_goes_in_and_comes_out():
    model, x = Outputs(), torch.randn(6, 4)
    with fxpipe.compile(model, TWO, chunks=3) as pipe:
        for kwargs in ({}, {"scale": 2.0}, {"mask": torch.ones(6, 4)}):
            expected, actual = model({"x": x}, **kwargs), pipe({"x": x}, **kwargs)
            assert list(actual) == list(expected)
            assert (type(actual), type(actual["parts"])) == (dict, list)
            assert actual["scale"] == expected["scale"]
            assert actual["parts"][1][1] is None
            torch.testing.assert_close(actual["y"], expected["y"])
            torch.testing.assert_close(actual["parts"][0], expected["parts"][0])
            torch.testing.assert_close(actual["parts"][1][0], expected["parts"][1][0])
            assert torch.equal(actual["x"], x)


def test_a_scalar_is_averaged_weighted_by_the_sizes_of_the_micro_batches():
    class Loss(MLP):
        def forward(self, x):
            return super().forward(x).square().mean()

    model, x = Loss(), torch.randn(7, 12)
    with fxpipe.compile(model, TWO, chunks=3) as pipe:  # of 3, 2 and 2
        torch.testing.assert_close(pipe(x), model(x))
        expected = torch.autograd.grad(model(x), list(model.parameters()))
        actual = torch.autograd.grad(pipe(x), list(model.parameters()))
        torch.testing.assert_close(actual, expected)


def test_an_empty_batch_after_the_first_gives_an_empty_output():
    with fxpipe.compile(MLP(), TWO, chunks=2) as pipe:
        pipe(X)
        assert pipe(X[:0]).shape == (0, 12)


class Box:
    def __init__(self, value):
        self.value = value


class Boxes(MLP):
    def forward(self, x):
        y = super().forward(x)
        return {"box": Box([y, None]), "mean": y.mean()}


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_an_object_with_tensors_is_an_output_like_any_other(tracer):
    model = Boxes()
    with fxpipe.compile(model, TWO, chunks=2, tracer=tracer) as pipe:
        output = pipe(X)
    assert type(output["box"]) is Box and output["box"].value[1] is None
    assert torch.allclose(output["box"].value[0], model(X)["box"].value[0])
    with (
        pytest.raises(BatchError, match=r"dimension 5 of output.box.value\[0\] is"),
        fxpipe.compile(model, TWO, chunks=2, out_dims={"box": 5}, tracer=tracer) as pipe,
    ):
        pipe(X)


def test_the_number_of_rows_is_that_of_all_micro_batches():
    class Counts(MLP):
        def forward(self, x):
            return super().forward(x), x.shape[0]

    with fxpipe.compile(Counts(), TWO, chunks=2) as pipe:
        assert pipe(X)[1] == 6


def test_a_number_that_depends_on_the_batch_is_refused():
    class Roots(MLP):
        def forward(self, x):
            return super().forward(x), x.shape[0] ** 0.5

    with pytest.raises(BatchError, match=r"output\[1\] is 2.6.* and depends on the batch size"):
        fxpipe.compile(Roots(), TWO)(X)


NORMAL = torch.distributions.Normal
DISTRIBUTIONS = {
    "categorical": lambda a, b, v: torch.distributions.Categorical(logits=a, validate_args=v),
    "probabilities": lambda a, b, v: torch.distributions.Categorical(a.softmax(-1), None, v),
    "normal": lambda a, b, v: NORMAL(a, b.exp(), v),
    "independent": lambda a, b, v: torch.distributions.Independent(NORMAL(a, b.exp(), v), 1, v),
    "mixture": lambda a, b, v: torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(logits=a, validate_args=v), NORMAL(b, b.exp(), v), v
    ),
}


class Policy(nn.Module):
    """Gives a distribution, whose shapes follow the batch."""

    def __init__(self, kind, validate):
        super().__init__()
        self.mean, self.spread = nn.Linear(8, 4), nn.Linear(8, 4)
        self.kind, self.validate = kind, validate

    def forward(self, x):
        return DISTRIBUTIONS[self.kind](self.mean(x), self.spread(x), self.validate)


@pytest.mark.covering(1)
@pytest.mark.parametrize("validate", [None, True, False])
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_the_shapes_of_a_distribution_are_those_of_the_mini_batch(kind, validate):
    model = Policy(kind, validate)
    pipe = fxpipe.compile(model, ["cpu"] * 2, chunks=2, example_inputs=(torch.randn(8, 8),))
    for rows in 8, 5:
        x = torch.randn(rows, 8)
        found, expected = pipe(x), model(x)
        assert type(found) is type(expected)
        assert found.batch_shape == expected.batch_shape
        assert found.event_shape == expected.event_shape
        sample = expected.sample()
        assert found.sample().shape == sample.shape
        torch.testing.assert_close(found.log_prob(sample), expected.log_prob(sample))
