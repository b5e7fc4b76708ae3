"""Models that read values of their inputs as numbers: what they are told."""

from __future__ import annotations

import linecache
import re

import pytest
import torch
from torch import nn

import fxpipe

TWO = ["cpu", "cpu"]
IDS = torch.arange(16 * 12).reshape(16, 12) % 10
LENGTHS = torch.arange(16) % 11 + 1
"""The longest row is in one of the micro-batches only."""


class Padded(nn.Module):
    """Sets to zero what is behind the end of each row."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(10, 4), nn.Linear(4, 4)

    def cut(self, x, lengths):
        return x

    def forward(self, ids, lengths, longest=None):
        x = self.cut(self.layer(self.embed(ids)), lengths)[:, :longest]
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        return x * mask[..., None]


class BySlice(Padded):
    def cut(self, x, lengths):
        return x[:, : lengths.max()]


class ByItem(Padded):
    def cut(self, x, lengths):
        longest = lengths.max().item()
        return x[:, :longest]


class TwiceInALine(Padded):
    def cut(self, x, lengths):
        return x[:, : min(lengths.max().item(), lengths.max().item() + 1)]


class Pooled(BySlice):
    def forward(self, ids, lengths):
        return super().forward(ids, lengths).mean(1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [BySlice, ByItem, TwiceInALine, Pooled])
def test_a_size_that_goes_by_values_is_told_with_the_input_the_line_and_the_values(kind):
    with pytest.raises(fxpipe.BatchError) as error:
        fxpipe.compile(kind(), TWO, chunks=4)(IDS, LENGTHS)
    said = re.match(
        r"output depends on a number that the model reads from the values of lengths \(at (.*?):"
        r"(\d+): (.*?)\): for (\d) rows made from those of the example it is (\d+), and (\d+) and "
        r"(\d+) for \d and \d of them",
        str(error.value),
    )
    file, number, line, _, whole, *parts = said.groups()
    assert file == __file__ and linecache.getline(file, int(number)).strip() == line
    assert "lengths.max()" in line
    assert whole in parts and len(set(parts)) == 2, "the longest row is in one of the parts"
    assert "depend on the batch size" not in str(error.value)


class Scaled(Padded):
    def cut(self, x, lengths):
        return x / lengths.amax()


@pytest.mark.parametrize("kind", [Pooled, Scaled])
def test_a_value_that_most_rows_share_is_seen_to_mix_them(kind):
    """In most samples of a few rows, each part would have one of the longest rows, by chance."""
    lengths = torch.full((16,), 11)
    lengths[-4:] = 3
    with pytest.raises(fxpipe.BatchError, match="output"):
        fxpipe.compile(kind(), TWO, chunks=4)(IDS, lengths)


@pytest.mark.parametrize(
    "call",
    [
        lambda kind, longest: fxpipe.compile(kind, TWO, chunks=4)(IDS[:, :longest], LENGTHS),
        lambda kind, longest: fxpipe.compile(kind, TWO, chunks=4)(IDS, LENGTHS, longest),
    ],
)
def test_both_ways_out_work(call):
    model, longest = Padded(), int(LENGTHS.max())
    torch.testing.assert_close(call(model, longest), model(IDS, LENGTHS, longest))


class Mixed(nn.Module):
    """Mixes rows, and reads a value that does not differ between parts."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, factor):
        y = self.layer(x) * factor.item()
        return y - y.mean(0)


def test_a_value_that_is_the_same_for_all_parts_is_not_blamed():
    with pytest.raises(fxpipe.BatchError, match="depends on which other rows there are"):
        fxpipe.compile(Mixed(), TWO, chunks=2)(torch.randn(8, 4), torch.tensor(2.0))


class Cut(Padded):
    """Cuts all rows to the longest one, or to a length that is given."""

    def forward(self, ids, lengths, longest=None):
        longest = lengths.max() if longest is None else longest
        return self.layer(self.embed(ids)[:, :longest])


def test_an_output_whose_size_goes_by_values_of_a_later_call_is_told_with_a_way_out():
    model, shorter = Cut(), torch.full((16,), 7)
    with fxpipe.compile(model, TWO, chunks=4, tracer="export") as pipe:
        pipe(IDS, torch.full((16,), 11))
        with pytest.raises(
            RuntimeError,
            match=r"of shape \(4, 7, 4\) in place of \(4, 11, 4\): how large it is depends on the "
            "values of the inputs.*give the size to the model as an argument, an int",
        ):
            pipe(IDS, shorter)
        torch.testing.assert_close(pipe(IDS, shorter, 7), model(IDS, shorter))
