"""The calls that an explanation prints can be made as they stand there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.inspect.calls import PrintedCalls

TWO = ["cpu", "cpu"]


class Pairs(nn.Module):
    """A model with two inputs."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, src, tgt):
        return self.b(self.a(src) + tgt)


class WithLoss(Pairs):
    """A model that returns its loss."""

    def forward(self, src, tgt):
        return F.mse_loss(super().forward(src, tgt), tgt)


class ByName(Pairs):
    """A model that takes an input by its name only."""

    def forward(self, src, *, tgt):
        return super().forward(src, tgt)


class Several(Pairs):
    """A model with a variable number of inputs."""

    def forward(self, *inputs):
        return super().forward(*inputs)


def mse(output, target):
    return F.mse_loss(output, target)


X = torch.ones(4, 4)


def calls(model, args=(X, X), kwargs=None, **options):
    with fxpipe.compile(
        model, TWO, example_inputs=args, example_kwargs=kwargs, chunks=2, **options
    ) as pipe:
        runner = pipe._runner
        return PrintedCalls(runner.compiler.model, runner.options, runner.last()[0])


def test_the_inputs_have_the_names_that_the_model_gives_them():
    assert calls(Pairs(), loss_fn=mse).of("step") == "pipe.step(src, tgt, target=target)"
    found = calls(ByName(), (X,), {"tgt": X}, loss_fn=mse)
    assert found.of("measure") == "pipe.measure(src, tgt=tgt, target=target)"
    assert '(src,), example_kwargs={"tgt": tgt}, measure=3' in found.tune(3)
    assert calls(Several(), loss_fn=mse).of("step") == "pipe.step(*inputs, target=target)"
    assert "(*inputs,), measure=3" in calls(Several(), loss_fn=mse).tune(3)


def test_there_is_no_target_for_a_model_that_returns_its_loss():
    found = calls(WithLoss())
    assert found.has_loss and found.of("measure") == "pipe.measure(src, tgt)"
    assert found.tune(1) == 'fxpipe.tune(model, ["cpu", "cpu"], (src, tgt), measure=1)'


def test_there_is_no_target_where_nothing_is_trained():
    assert calls(Pairs(), training=False).of("measure") == "pipe.measure(src, tgt)"


def test_tune_is_given_what_it_does_not_choose():
    weight = fxpipe.loss_weight.tokens(ignore_index=0)
    found = calls(Pairs(), loss_fn=mse, loss_weight=weight, check=False, memory="2GiB")
    assert found.tune(3).endswith(
        "measure=3, loss_fn=loss_fn, loss_weight=fxpipe.loss_weight.tokens(ignore_index=0), "
        'check=False, memory="2GiB", target=target)'
    )


@pytest.mark.parametrize(
    ("model", "options"),
    [(Pairs(), {"loss_fn": mse}), (WithLoss(), {}), (Several(), {"loss_fn": mse}), (Pairs(), {})],
    ids=["loss_fn", "the model's loss", "any number of inputs", "no loss yet"],
)
def test_the_calls_can_be_made(model, options):
    said = calls(model, **options)
    names = {"model": model, "fxpipe": fxpipe, "src": X, "tgt": X, "inputs": (X, X)}
    names |= {"loss_fn": mse, "target": X}
    found = eval(said.tune(1)[:-1] + ", chunks=[2], schedules=['gpipe'], progress=False)", names)
    assert found.best.measured
    with fxpipe.compile(
        model, TWO, chunks=2, **(options if said.has_loss else {"loss_fn": mse})
    ) as pipe:
        assert eval(said.of("measure"), names, {"pipe": pipe}).makespan > 0
        assert torch.isfinite(eval(said.of("step"), names, {"pipe": pipe}))
