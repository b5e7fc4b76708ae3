"""The error of a device that has too little memory says what was predicted, and what would fit."""

from __future__ import annotations

import re

import pytest
import torch
import torch.fx
from torch import nn

import fxpipe
from tests.zoo import gradients, same

FULL = []


def full(gradient):
    if FULL:
        raise torch.OutOfMemoryError("out of memory")
    return gradient


def hungry(x):
    """Runs out of memory in its backward, if it is told to."""
    y = x * 2
    if y.requires_grad:
        y.register_hook(full)
    return y


torch.fx.wrap("hungry")


class Hungry(nn.Module):
    def forward(self, x):
        return hungry(x)


@pytest.fixture
def pipe():
    layers = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())]
    model = nn.Sequential(*layers[:6], Hungry(), *layers[6:])
    made = fxpipe.compile(model, ["cpu"] * 2, chunks=4, schedule="gpipe", loss_fn=nn.MSELoss())
    yield made
    FULL.clear()
    made.close()


def test_the_error_says_what_was_predicted_and_what_needs_less(pipe):
    x, y = torch.randn(256, 16), torch.randn(256, 16)
    wanted = pipe.step(x, target=y)
    grads = gradients(pipe)
    FULL.append(True)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory") as error:
        pipe.step(x, target=y)
    FULL.clear()
    (note,) = (note for note in error.value.__notes__ if "predicted" in note)
    assert re.match(
        r"in fxpipe: a training step of 4 micro-batches was predicted to need [\d.]+ KiB on lane 0 "
        r"\(cpu\), [\d.]+ KiB on lane 1 \(cpu\); for a tenth less, it would fit with ",
        note,
    )
    (settings,) = re.findall(r'with (schedule="1f1b")', note)
    assert settings

    pipe.zero_grad()
    assert same(pipe.step(x, target=y), wanted)
    assert same(gradients(pipe), grads)
