"""What goes into models and comes out of them in other structures and dtypes, or has rows elsewhere
than in front: each is right, to the bits of the loop over micro-batches, or refused."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributions as dist
from torch import nn

import fxpipe
from fxpipe.ir.structure import leaves, map_tensors
from tests.fxpipe.meaning.test_ways import MIXES, Net, rows

TWO = ["cpu", "cpu"]
N, D = 6, 8


class Pair(NamedTuple):
    y: Any
    z: Any


@dataclass
class Result:
    y: Any
    n: Any = None


class Experts(nn.Module):
    """Sends each row to one expert."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, 3)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, x):
        chosen, y = self.gate(x).argmax(1), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            own = (chosen == i).nonzero().flatten()
            y = y.index_add(0, own, expert(x[own]))
        return y


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Columns(nn.Module):
    """Its batch is the last dimension."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, D), nn.Linear(D, 4)

    def forward(self, x):
        return self.b(self.a(x.permute(2, 1, 0)).softmax(1)).permute(2, 1, 0)


RIGHT = {
    "a named tuple": (lambda h: Pair(h, h.sum(1)), ()),
    "a dataclass": (lambda h: Result(h, {"k": [h.mean(1)]}), ()),
    "an ordered dict": (lambda h: OrderedDict(b=h, a=h * 2), ()),
    "what max returns": (lambda h: h.max(1), ()),
    "one tensor twice": (lambda h: (h, h), ()),
    "an input": (lambda h, x: (h, x), (rows(),)),
    "complex numbers": (lambda h: torch.fft.fft(h), ()),
    "flags": (lambda h: h > 0, ()),
    "half precision": (lambda h: h.half(), ()),
    "rows of steps as one dimension": (lambda h: h[:, None].expand(-1, 3, -1).flatten(0, 1), ()),
    "each row twice": (lambda h: h.repeat_interleave(2, 0), ()),
    "guidance": (lambda h: torch.subtract(*torch.cat([h, h * 2]).chunk(2)), ()),
    "dicts in dicts": (lambda h, d: h + d["a"]["b"], ({"a": {"b": rows(), "none": None}},)),
    "a list with one tensor for each column": (lambda h: list(h.unbind(1)), ()),
    "a straight-through estimate": (lambda h: (h.round() - h).detach() + h, ()),
    "a gradient that is reversed": (lambda h: Reversed.apply(h), ()),
    "a function of one row": (lambda h: torch.vmap(lambda row: row / row.norm())(h), ()),
    "a normal distribution in a dict": (
        lambda h: {"pi": dist.Normal(h, h.exp()), "v": [h.sum(1)]},
        (),
    ),
    "a categorical one in a dataclass": (lambda h: Result(dist.Categorical(logits=h), h), ()),
    "probabilities": (lambda h: dist.Categorical(probs=h.softmax(-1)), ()),
    "a Bernoulli distribution": (lambda h: dist.Bernoulli(logits=h), ()),
    "a transformed one": (
        lambda h: dist.TransformedDistribution(dist.Normal(h, h.exp()), [dist.TanhTransform()]),
        (),
    ),
    "an independent one": (lambda h: dist.Independent(dist.Normal(h, h.exp()), 1), ()),
    "a mixture": (
        lambda h: dist.MixtureSameFamily(dist.Categorical(logits=h), dist.Normal(h, h.exp())),
        (),
    ),
    "a multivariate one": (lambda h: dist.MultivariateNormal(h, torch.eye(D)), ()),
    "one of low rank": (
        lambda h: dist.LowRankMultivariateNormal(h, h[..., None], h.exp()),
        (),
    ),
    "a Dirichlet one": (lambda h: dist.Dirichlet(h.exp()), ()),
}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def tensors(value):
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def half_of(value, first):
    return map_tensors(lambda t: t[: N // 2] if first else t[N // 2 :], value)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", RIGHT)
def test_it_is_that_of_the_loop_over_micro_batches(name):
    then, more = RIGHT[name]
    model, x = Net(then), rows()
    with fxpipe.compile(model, TWO, chunks=2) as pipe:
        for _ in range(2):
            output = pipe(x, *more)
            whole = model(x, *more)
            assert type(output) is type(whole)
            parts = [model(*half_of((x, *more), first)) for first in (True, False)]
            for ours, expected, *halves in zip(*map(tensors, (output, whole, *parts)), strict=True):
                assert ours.shape == expected.shape
                joined = halves[0] if halves[0].shape == expected.shape else torch.cat(halves)
                assert torch.equal(ours, joined)


def test_rows_that_are_sent_to_experts():
    model, x = Experts(), rows()
    with fxpipe.compile(model, TWO, chunks=2) as pipe:
        assert torch.equal(pipe(x), torch.cat([model(part) for part in x.chunk(2)]))


@pytest.mark.parametrize("mask", [None, torch.rand(N, D), torch.tensor(2.0)])
def test_an_argument_that_is_named_may_be_a_batch_or_a_number_or_none(mask):
    def then(h, mask):
        return h if mask is None else h * mask

    class Named(Net):
        def forward(self, x, *, mask=None):
            return super().forward(x, mask)

    model, x = Named(then), rows()
    with fxpipe.compile(model, TWO, chunks=2) as pipe:
        torch.testing.assert_close(pipe(x, mask=mask), model(x, mask=mask))


def test_a_batch_along_the_last_dimension_has_to_be_said():
    model, x = Columns(), torch.randn(4, 3, N)
    with fxpipe.compile(model, TWO, chunks=2) as pipe, pytest.raises(fxpipe.BatchError, match="in"):
        pipe(x)
    with fxpipe.compile(model, TWO, chunks=2, in_dims=2) as pipe:
        assert torch.equal(pipe(x), torch.cat([model(part) for part in x.chunk(2, 2)], 2))


def test_dimensions_of_two_inputs_may_differ():
    model, x, t = Net(lambda h, t: h * t.sum((0, 1))[:, None]), rows(), torch.randn(2, 3, N)
    with fxpipe.compile(model, TWO, chunks=2, in_dims=(0, 2)) as pipe:
        parts = zip(x.chunk(2), t.chunk(2, 2), strict=True)
        assert torch.equal(pipe(x, t), torch.cat([model(*part) for part in parts]))


REFUSED = {
    "a transform along the batch": (lambda h: torch.fft.fft(h, dim=0), (), MIXES),
    "the first half": (lambda h: h[: len(h) // 2], (), MIXES),
    "every second row": (lambda h: h[::2], (), MIXES),
    "all rows, and all rows again": (lambda h: torch.cat([h, h * 2]), (), MIXES),
    "all pairs in one dimension": (lambda h: (h @ h.t()).flatten(), (), "mixes rows"),
    "a scale for the whole batch": (
        lambda h: (h / h.abs().max() * 127).round() * h.abs().max() / 127,
        (),
        MIXES,
    ),
    "a function of one column": (
        lambda h: torch.vmap(lambda c: c / c.norm(), in_dims=1, out_dims=1)(h),
        (),
        MIXES,
    ),
    "a list with one number for each row": (
        lambda h, scales: h * torch.tensor(scales)[:, None],
        ([1.0, 2, 3, 4, 5, 6],),
        "does not take a part of the batch",
    ),
    "a word for each row": (
        lambda h, words: torch.stack([r * len(w) for r, w in zip(h, words, strict=False)]),
        (["a", "bb", "ccc", "d", "ee", "f"],),
        "chunks=1",
    ),
    "a list with a tensor for each row": (
        lambda h: [h[i] for i in range(h.shape[0])],
        (),
        "has one element for each row",
    ),
    "a key for each row": (
        lambda h: {f"row {i}": h[i] for i in range(h.shape[0])},
        (),
        "whatever the batch size",
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name):
    then, more, says = REFUSED[name]
    with (
        fxpipe.compile(Net(then), TWO, chunks=2) as pipe,
        pytest.raises(fxpipe.BatchError, match=says) as error,
    ):
        pipe(rows(), *more)
    assert "chunks=1" in str(error.value)


def test_a_size_that_follows_from_values_of_all_rows_is_refused():
    model = Net(lambda h, n: h[:, : int(n.max())])
    with (
        fxpipe.compile(model, TWO, chunks=2) as pipe,
        pytest.raises((fxpipe.BatchError, fxpipe.TraceError)),
    ):
        pipe(rows(), torch.tensor([1, 2, 3, 5, 2, 1]))


@pytest.mark.parametrize("is_set", [False, True])
def test_flags_of_which_any_or_all_matter_are_shared_though_they_are_alike_in_the_example(is_set):
    def then(h, flags):
        return torch.where(flags.all() if is_set else flags.any(), h * 2, h)

    model, x = Net(then), rows()
    flags = torch.full((N,), is_set)
    with fxpipe.compile(model, TWO, chunks=2, example_inputs=(x, flags)) as pipe:
        assert "all micro-batches share more[0]" in pipe.report()
        flags = flags.clone()
        flags[-1] = not is_set
        torch.testing.assert_close(pipe(x, flags), model(x, flags))


class OfFlaggedRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 4)

    def forward(self, x, flags):
        h = self.a(x)
        return torch.where(flags.bool()[:, None], self.b(h), h)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.uint16, torch.float32])
def test_each_row_may_have_a_flag(dtype):
    model, x = OfFlaggedRows(), torch.randn(8, 6)
    flags = torch.tensor([1, 1, 0, 1, 1, 1, 0, 1]).to(dtype)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=4) as pipe:
        torch.testing.assert_close(pipe(x, flags), model(x, flags))
