"""A model that decides something for all rows at once, by values of the batch, is refused: parts
of it decide for themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.meaning.asked import Asked
from fxpipe.meaning.call import meaning_of

ASKED = Asked(sizes=lambda batch: (batch - batch // 2, batch // 2))


class Decides(nn.Module):
    """Takes one of two ways for all rows."""

    def __init__(self, of_all):
        super().__init__()
        self.a, self.b, self.of_all = nn.Linear(8, 8), nn.Linear(8, 8), of_all

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return torch.where(self.of_all(x), self.b(h), h)


BY = {
    "the sign of the mean": (torch.randn, lambda x: x.mean() > 0),
    "the sign of the sum": (torch.randn, lambda x: x.sum() > 0),
    "the median": (torch.randn, lambda x: x.median() > 0),
    "the spread": (torch.randn, lambda x: x.std() > 1),
    "whether any is positive": (torch.randn, lambda x: (x > 0).any()),
    "the largest": (torch.randn, lambda x: x.max() > 0.9),
    "the mean of numbers from 0 to 1": (torch.rand, lambda x: x.mean() > 0.5),
    "the largest of numbers from 0 to 1": (torch.rand, lambda x: x.max() > 0.9),
    "the spread of numbers from 0 to 1": (torch.rand, lambda x: x.std() > 0.3),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", BY)
def test_a_decision_by_values_of_all_rows_is_seen_whatever_the_numbers(name):
    draw, of_all = BY[name]
    for seed in range(3):
        torch.manual_seed(seed)
        with pytest.raises(fxpipe.BatchError, match="depends on which other rows there are"):
            meaning_of(Decides(of_all), (draw(16, 8),), {}, ASKED)


def test_a_decision_by_values_of_each_row_is_none():
    torch.manual_seed(0)
    found = meaning_of(
        Decides(lambda x: x.mean(1, keepdim=True) > 0), (torch.randn(16, 8),), {}, ASKED
    )
    assert found.outputs == {"output": 0}
