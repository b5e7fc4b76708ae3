"""What is small beside a loss, or does not show in few rows, is found by the check all the same."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.meaning.single_numbers import with_small_terms
from fxpipe.meaning.trial import Trial

TWO = ["cpu", "cpu"]
ROWS = 16


def told(run) -> list[str]:
    """What a call warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in caught if each.category is fxpipe.BatchWarning]


class Experts(nn.Module):
    """A mixture of experts whose router is trained by a small part of the loss alone."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.inner, self.gate = nn.Linear(6, 16), nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.inner(x)
        chances = self.gate(h).softmax(-1)
        chosen = F.one_hot(chances.argmax(-1), 4).float()
        mixed = sum(chosen[:, i : i + 1] * each(h) for i, each in enumerate(self.experts))
        balance = 4 * (chosen.mean(0) * chances.mean(0)).sum()
        loss = F.cross_entropy(self.head(h + mixed), labels) + self.share * balance
        return {"loss": loss}


@pytest.mark.one_in(2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.01, 0.001])
def test_a_small_part_of_a_loss_that_mixes_rows_is_told_of(share, seed):
    torch.manual_seed(seed)
    with fxpipe.compile(Experts(share), TWO, chunks=4) as pipe:
        x, labels = torch.randn(ROWS, 6), torch.randint(3, (ROWS,))
        assert any("output.loss" in text for text in told(lambda: pipe.step(x, labels)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(4))
def test_rounding_is_no_small_part(seed):
    torch.manual_seed(seed)
    layers = [each for _ in range(6) for each in (nn.Linear(48, 48), nn.LayerNorm(48), nn.GELU())]
    model = nn.Sequential(nn.Linear(6, 48), *layers, nn.Linear(48, 3))
    with fxpipe.compile(model, TWO, chunks=4, loss_fn=F.cross_entropy) as pipe:
        x, target = torch.randn(ROWS, 6), torch.randint(3, (ROWS,))
        assert told(lambda: pipe.step(x, target=target)) == []


def of_the_hardest(output: Tensor, target: Tensor) -> Tensor:
    """The mean of the largest errors, of 16 at least."""
    errors = (output - target).square().flatten()
    count = max(16, len(errors) // 4)
    return errors.topk(min(count, len(errors))).values.mean()


def test_a_loss_that_goes_by_the_number_of_rows_is_checked_with_as_many_as_there_are():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    with fxpipe.compile(model, TWO, chunks=4, loss_fn=of_the_hardest) as pipe:
        (text,) = told(lambda: pipe.step(torch.randn(8, 6), target=torch.randn(8, 4)))
    assert "neither a mean over the rows nor a sum" in text


@pytest.mark.parametrize("chunks", [4, 5, 16])
def test_a_mean_over_the_rows_is_one_however_many_rows_a_micro_batch_has(chunks):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    with fxpipe.compile(model, TWO, chunks=chunks, loss_fn=F.cross_entropy) as pipe:
        x, target = 5 * torch.randn(ROWS, 6), torch.randint(4, (ROWS,))
        assert told(lambda: pipe.step(x, target=target)) == []


class Uncertain(nn.Module):
    """Kendall et al., "Multi-Task Learning Using Uncertainty to Weigh Losses", 2018, with sums."""

    def __init__(self) -> None:
        super().__init__()
        self.logs = nn.Parameter(torch.zeros(2))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        one = F.mse_loss(output[:, :1], target[:, :1], reduction="sum")
        other = F.l1_loss(output[:, 1:], target[:, 1:], reduction="sum")
        return ((-self.logs).exp() * torch.stack([one, other]) + self.logs).sum()


def test_a_term_of_parameters_that_are_zero_so_far_is_told_of():
    torch.manual_seed(0)
    loss_fn = Uncertain()
    with fxpipe.compile(nn.Linear(6, 4), TWO[:1], chunks=4, loss_fn=loss_fn) as pipe:
        (text,) = told(lambda: pipe.step(torch.randn(8, 6), target=torch.randn(8, 4)))
    assert "neither a mean over the rows nor a sum" in text
    assert loss_fn.logs.tolist() == [0, 0], "the check has put them back"


class Words(nn.Module):
    """A model of words that returns its loss, whose padding is word 0."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, ids: Tensor) -> Tensor:
        output = self.head(self.words(ids[:, :-1])).flatten(0, 1)
        return F.cross_entropy(output, ids[:, 1:].flatten(), ignore_index=0)


def test_padding_that_first_comes_later_is_noticed_whatever_the_input_is_called():
    torch.manual_seed(0)
    with fxpipe.compile(Words(), TWO, chunks=4) as pipe:
        for _ in range(3):
            assert told(lambda: pipe.step(torch.randint(2, 12, (8, 6)))) == []
        ids = torch.randint(2, 12, (8, 6))
        ids[3:5, 2:] = 0
        (text,) = told(lambda: pipe.step(ids))
    assert "neither a mean over the rows" in text


def test_a_number_may_be_joined_of_parts_without_elements():
    """Of the rows of a sample, say, one alone is taken."""
    whole, empty = torch.tensor([0.5]), torch.empty(0)
    trial = Trial((1, 3), "mixed", [], {"output": whole}, [{"output": empty}, {"output": whole}])
    assert with_small_terms(trial, "output", (0,), list) == (0,)
