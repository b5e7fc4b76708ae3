"""What a pipeline tells of its compilations: when, why, for what, and how long each took."""

from __future__ import annotations

import re
import warnings
from datetime import datetime

import pytest
import torch
from torch import nn

import fxpipe

TWO = ["cpu", "cpu"]


class Listed(nn.Module):
    """A model whose Python code makes a list of as many elements as a row has columns."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(1, 2), nn.Linear(2, 1)

    def forward(self, x, flag=False):
        y = self.b(self.a(x.unsqueeze(-1))).squeeze(-1)
        return y * len([flag] * x.shape[1])


def test_each_compilation_says_which_guard_made_it_necessary():
    model = Listed()
    with fxpipe.compile(model, TWO, chunks=2, dynamic=True) as pipe:
        assert not pipe.compilations and str(pipe.compilations) == "0 compilations of Listed"
        before = datetime.now()
        pipe(torch.randn(4, 3))
        pipe(torch.randn(6, 3))
        model.eval()
        pipe(torch.randn(4, 3))
        pipe(torch.randn(4, 5))
        pipe.recompile()
        pipe(torch.randn(4, 5))
        first, second, third, fourth = pipe.compilations
        assert (first.number, first.front_end) == (1, "export")
        assert first.why == ("the first call",)
        assert second.why == ("mode of the model: train → eval",)
        (why,) = third.why  # neither program has served the call, for the same reason
        assert why.startswith("shape of x: (4, 3) → (4, 5) (dimension 1 has to be 3: ")
        assert "all programs had been dropped" in fourth.why[0]
        assert fourth.guards is pipe.guards
        for each in pipe.compilations:
            assert before <= each.at <= datetime.now() and each.seconds > 0


def test_they_are_printed_a_few_lines_each():
    with fxpipe.compile(Listed(), TWO, chunks=2, dynamic=True) as pipe:
        for width in 3, 4:
            pipe(torch.randn(4, width))
        said = str(pipe.compilations)
    assert max(map(len, said.splitlines())) <= 100
    said = re.sub(r"\d\d:\d\d:\d\d, [\d.]+ m?s", "TIME", re.sub(r"\S*/", "", said))
    assert said.startswith(
        "2 compilations of Listed\n"
        "1. TIME, export: the first call\n"
        "   compiled for x: float32 [*, 3], train, no autocast"
    )
    assert "2. TIME, export: shape of x: (4, 3) → (4, 4) (dimension 1 has to be 3:" in said


def test_of_the_attributes_of_the_model_only_their_number_is_printed():
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.scales = [1.0, 2.0]
            self.c, self.b, self.a = 1.0, 2.0, 3.0

        def forward(self, x):
            return super().forward(x) * self.a * self.b * self.c

    with fxpipe.compile(nn.Sequential(Scaled(), nn.Tanh()), TWO, chunks=2) as pipe:
        pipe(torch.randn(4, 3))
        found = pipe.guards.attributes
        assert (
            list(found) == sorted(found) and found.items() >= {"0.a": "3.0", "0.c": "1.0"}.items()
        )
        said = str(pipe.compilations)
        assert f"no autocast, {len(found)} attributes of the model" in said.replace("\n  ", "")
        assert "0.a" not in said and "0.a = 3.0" in str(pipe.guards)


def test_a_call_that_is_served_or_refused_is_no_compilation():
    with fxpipe.compile(Listed(), TWO, chunks=2, dynamic=True) as pipe:
        pipe(torch.randn(4, 3))
        pipe(torch.randn(8, 3))
        with pytest.raises(IndexError):
            pipe(torch.randn(4))
        assert len(pipe.compilations) == 1


def test_at_the_eighth_for_a_shape_the_dimension_is_named_and_what_to_do():
    with fxpipe.compile(Listed(), TWO, chunks=2, dynamic=True) as pipe:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for width in range(2, 9):
                pipe(torch.randn(4, width))
        with pytest.warns(UserWarning) as told:
            pipe(torch.randn(4, 9))
        (message,) = {str(each.message) for each in told}
        assert message.startswith(
            "Listed has been compiled 8 times, since dimension 1 of x, 9 in this call, differs "
            "between the calls (2, 3, 4, 5, 6, 7, 8), and the trace has its size as a constant ("
        )
        assert "return y * len([flag] * x.shape[1])): pad x to a few sizes, or" in message
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipe(torch.randn(4, 10))
