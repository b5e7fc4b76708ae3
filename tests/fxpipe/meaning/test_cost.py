"""What it costs to check a model: few runs, on few rows, that keep nothing for a backward."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import fxpipe

TWO = ["cpu", "cpu"]


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
            memories.append(StorageWeakRef(x.untyped_storage()) if type(x) is torch.Tensor else x)
        if type(x) is torch.Tensor and not x.is_meta:
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
