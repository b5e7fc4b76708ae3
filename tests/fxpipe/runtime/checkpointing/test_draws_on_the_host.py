"""A checkpointed stage draws the same random numbers with Python or NumPy when it is run again."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import fxpipe
from tests.zoo import gradients, same


class ByNumPy(nn.Module):
    def forward(self, x):
        return x * torch.from_numpy(np.random.rand(x.shape[0], 1)).float()


class ByPython(nn.Module):
    def forward(self, x):
        return x * torch.tensor([random.random() for _ in range(x.shape[1])])


class WithABuffer(ByPython):
    """Only torch.export can keep it whole."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x):
        return super().forward(x) * self.factor


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.draw, self.b = nn.Linear(8, 8), ByNumPy(), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(self.draw(self.a(x).tanh())) + x


MODULES = [ByNumPy, ByPython, WithABuffer, Nested]


def trained(model, x, in_a_step, checkpoint):
    model.zero_grad()
    options = {"loss_fn": lambda y, _: y.square().mean()} if in_a_step else {}
    pipe = fxpipe.compile(
        model, ["cpu"] * 2, chunks=3, checkpoint=checkpoint, example_inputs=(x,), **options
    )
    with pipe:
        torch.manual_seed(1)
        if in_a_step:
            pipe.step(x)
        else:
            pipe(x).square().mean().backward()
    return gradients(model)


@pytest.mark.covering(1)
@pytest.mark.one_in(3)
@pytest.mark.parametrize("in_a_step", [False, True])
@pytest.mark.parametrize("module", MODULES)
def test_gradients_are_those_without_a_checkpoint(module, in_a_step):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), module(), nn.Linear(8, 8)), torch.randn(6, 8)
    expected = trained(copy.deepcopy(model), x, in_a_step, "never")
    for checkpoint in ("always", "selective", "offload"):
        np.random.rand(), random.random()  # the state of these generators is of no account
        assert same(trained(copy.deepcopy(model), x, in_a_step, checkpoint), expected), checkpoint
