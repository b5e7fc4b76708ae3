"""What the check makes of what a model raises, and of what it says in the report."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.meaning.asked import Asked
from fxpipe.meaning.call import meaning_of

TWO = ["cpu", "cpu"]
ASKED = Asked(sizes=lambda batch: (1,) if batch == 1 else (batch - batch // 2, batch // 2))


class OneRowAtATime(nn.Module):
    """Raises an error of a kind where it is given more rows than the example has."""

    def __init__(self, error, rows=1):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.error, self.rows = error, rows

    def forward(self, x):
        if x.shape[0] > self.rows:
            raise self.error
        return self.b(torch.tanh(self.a(x)))


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x) if self.training else x


def test_what_the_model_refuses_is_an_answer():
    found = meaning_of(OneRowAtATime(ValueError("one row")), (torch.randn(1, 4),), {}, ASKED)
    assert found.one_row_only


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("of memory"), MemoryError("of memory")])
def test_a_lack_of_memory_is_none(error):
    """It says nothing of what the model takes."""
    with pytest.raises(type(error), match="of memory"):
        meaning_of(OneRowAtATime(error), (torch.randn(1, 4),), {}, ASKED)


def test_an_error_in_the_compiler_is_none_either(monkeypatch):
    monkeypatch.setattr("fxpipe.trace.isolation.copy_context", lambda: None)
    with pytest.raises(AttributeError, match="run"):
        meaning_of(nn.Linear(4, 4), (torch.randn(6, 4),), {}, ASKED)


@pytest.mark.parametrize("training", [True, False])
def test_a_model_that_takes_only_one_row_runs_as_one_micro_batch(training):
    model, x = OneRowAtATime(ValueError("one row")).train(training), torch.randn(1, 4)
    with fxpipe.compile(model, TWO, chunks=2, example_inputs=(x,)) as pipe:
        assert torch.equal(pipe(x), model(x))
        assert pipe.chunks == 1
        assert "takes no other number of rows" in pipe.report()


def test_a_batch_of_one_row_does_not_hide_the_models_own_error():
    model = OneRowAtATime(ValueError("not enough values to unpack"), rows=0)
    with (
        fxpipe.compile(model, TWO, chunks=2) as pipe,
        pytest.raises(ValueError, match="not enough values to unpack"),
    ):
        pipe(torch.randn(1, 4))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4), nn.Dropout()),
            "(1 and 1",
        ),
        (nn.Sequential(nn.Linear(4, 4), Noise(), nn.Linear(4, 4)), "by itself, and"),
    ],
)
def test_the_report_says_that_random_numbers_are_those_of_micro_batches(model, said):
    x = torch.randn(6, 4)
    line = "random numbers are drawn for each micro-batch by itself"
    with fxpipe.compile(model, TWO, chunks=2, example_inputs=(x,)) as pipe:
        (found,) = (each for each in pipe.report().splitlines() if line in each)
        assert said in found
        model.eval()
        pipe(x)
        assert line not in pipe.report()
