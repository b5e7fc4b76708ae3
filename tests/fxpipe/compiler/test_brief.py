"""The trace of what a model raises on the inputs of a call."""

from __future__ import annotations

import traceback

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxpipe
from fxpipe.compiler.brief import brief
from fxpipe.ir.source import is_ours
from tests.zoo import MLP

WRONG = torch.randn(8, 5)


def prepared(pipe):
    pipe.prepare(WRONG)


def measured(pipe):
    pipe.measure(WRONG, target=torch.randn(8, 12))


def stepped(pipe):
    pipe.step(WRONG, target=torch.randn(8, 12))


def called(pipe):
    pipe(WRONG)


@pytest.mark.parametrize("use", [called, stepped, measured, prepared])
def test_it_has_the_lines_of_the_user_of_the_model_and_of_the_layer(use):
    pipe = fxpipe.compile(MLP(), ["cpu"] * 2, chunks=2, loss_fn=F.mse_loss)
    with pipe, pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        use(pipe)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[1].name == use.__name__ and frames[-1].filename.endswith("linear.py")
    assert any(frame.filename.endswith("zoo.py") and frame.name == "forward" for frame in frames)
    assert sum(is_ours(frame.filename) for frame in frames) <= 2
    assert len("".join(traceback.format_exception(caught.value)).splitlines()) < 40
    assert "MLP itself fails on these inputs" in caught.value.__notes__[0]


def test_a_model_of_layers_of_pytorch_alone_has_these():
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
    with (
        fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe,
        pytest.raises(RuntimeError) as caught,
    ):
        pipe(WRONG)
    names = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-2].endswith("container.py") and names[-1].endswith("linear.py")


def test_the_cause_of_an_error_stays():
    class Explained(MLP):
        def forward(self, x):
            try:
                return super().forward(x)
            except RuntimeError as error:
                raise ValueError("rows of 12 numbers are needed") from error

    pipe = fxpipe.compile(Explained(), ["cpu"] * 2, chunks=2)
    with pipe, pytest.raises(ValueError, match="rows of 12") as caught:
        pipe(WRONG)
    assert "shapes cannot be multiplied" in str(caught.value.__cause__)


def test_the_trace_of_another_error_is_left_as_it_is():
    def raises():
        raise ValueError("ours")

    with pytest.raises(ValueError) as caught:
        brief(raises)()
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][
        -1
    ] == "raises"
