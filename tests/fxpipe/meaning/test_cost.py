"""What it costs to check a model: few runs, on few rows, that keep nothing for a backward."""

from __future__ import annotations

import random
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import fxpipe
from fxpipe.meaning.asked import Asked
from fxpipe.meaning.call import meaning_of
from fxpipe.meaning.trial import TRIALS
from tests.fxpipe.trace.small import in_a_run

TWO = ["cpu", "cpu"]
ASKED = Asked(sizes=lambda batch: (batch - batch // 2, batch // 2))


class Deep(nn.Module):
    """Notes the rows of each run with values, and how many activations are in memory at its end."""

    runs: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, layers=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x):
        memories = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            memories.append(StorageWeakRef(x.untyped_storage()) if in_a_run(x) else x)
        if in_a_run(x) and not x.is_meta:
            Deep.runs.append((x.shape[0], sum(not each.expired() for each in memories)))
        return x


@pytest.fixture(autouse=True)
def no_runs():
    Deep.runs = []


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_no_run_keeps_the_activations_of_all_layers(tracer):
    fxpipe.compile(Deep(), TWO, chunks=2, example_inputs=(torch.randn(6, 8),), tracer=tracer)
    assert Deep.runs
    assert max(alive for _, alive in Deep.runs) <= 2


def test_the_model_is_checked_in_three_runs_on_few_rows_far_from_each_other_and_near():
    meaning_of(Deep(), (torch.randn(512, 8),), {}, ASKED)
    assert [rows for rows, _ in Deep.runs] == 2 * [4, 1, 3]


ORDERS = {
    "torch": lambda n: (torch.randperm(n), torch.rand(())),
    "numpy": lambda n: (torch.from_numpy(np.random.permutation(n)), np.random.beta(0.4, 0.4)),
    "python": lambda n: (random.sample(range(n), n), random.betavariate(0.4, 0.4)),
}


class Mixes(Deep):
    """Mixes each row with another one, as mixup does."""

    def __init__(self, draw):
        super().__init__(2)
        self.draw = draw

    def forward(self, x):
        order, share = self.draw(len(x))
        return super().forward(share * x + (1 - share) * x[order])


@pytest.mark.parametrize("kind", ORDERS)
def test_a_model_whose_rows_all_differ_in_a_sample_is_not_asked_for_others(kind):
    with pytest.raises(fxpipe.BatchError, match=r"output, \(7, 8\) for 7 rows, depends on which"):
        meaning_of(Mixes(ORDERS[kind]), (torch.randn(64, 8),), {}, ASKED)
    # PyTorch's numbers are replaced from the first run on, others once a sample has drawn them.
    drawn = [] if kind == "torch" else [4, 1, 3]
    samples = [4, 1, 3, *3 * [4], 7, 3, 4, *3 * [7]]  # each with three runs for rounding errors
    columns = 4 * [64]  # as another batch, which no part of a sample fits
    message = [64, 7, *TRIALS * [7, 3, 4]]  # does it run at all, give the same twice, read values?
    assert [rows for rows, _ in Deep.runs] == drawn + samples + columns + message


class Squeezes(nn.Module):
    """Takes a single row for a batch without rows."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)).squeeze())


def test_more_rows_decide_where_a_single_one_gives_something_else():
    model, x = Squeezes(), torch.randn(6, 8)
    with fxpipe.compile(model, TWO, chunks=3, example_inputs=(x,)) as pipe:
        assert torch.equal(pipe(x), torch.cat([model(part) for part in x.chunk(3)]))


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_a_model_that_gives_something_else_for_a_single_row_gets_no_micro_batch_of_one(tracer):
    model, x = Squeezes(), torch.randn(6, 8)
    with fxpipe.compile(model, TWO, chunks=6, example_inputs=(x,), tracer=tracer) as pipe:
        assert torch.equal(pipe(x), torch.cat([model(part) for part in x.chunk(3)]))
        assert "of 1 row" in pipe.report()


class Places(Deep):
    """Gives whole numbers only, of which a few are often alike by chance."""

    def forward(self, x):
        return super().forward(x).argmax(0)[:1]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(8))
def test_whole_numbers_that_are_alike_by_chance_are_asked_for_again(seed):
    torch.manual_seed(seed)
    with pytest.raises(fxpipe.BatchError, match="whatever the batch size"):
        meaning_of(Places(2), (torch.randn(6, 8),), {}, ASKED)
