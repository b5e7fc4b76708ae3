"""Where parameters and buffers live."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.mode import stages_of
from fxpipe.placement import homes_of
from passes import PartitionError
from tests.zoo import MODELS


def test_every_parameter_and_buffer_lives_on_the_device_of_its_stage():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
            self.gain, self.unused = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)
            self.register_buffer("shift", torch.zeros(4))

        def forward(self, x):
            return self.b(self.norm(self.a(x)) * self.gain) + self.shift

    model = Model()
    pipe = fxpipe.compile(
        model, ["cpu", "cpu"], partition=["norm"], example_inputs=(torch.ones(4, 4),), chunks=2
    )
    homes = homes_of(stages_of(pipe.stage_graph), [torch.device("cpu"), torch.device("cuda:0")])
    tensors = (*model.named_parameters(), *model.named_buffers())
    where = {name: str(homes.get(id(tensor))) for name, tensor in tensors}
    assert {name for name, device in where.items() if device == "cpu"} == {"a.weight", "a.bias"}
    assert where["unused.weight"] == where["unused.bias"] == "None", "they stay where they are"
    assert where["gain"] == where["shift"] == where["norm.running_mean"] == "cuda:0"


def test_a_buffer_of_two_devices_is_refused():
    model = MODELS["transformer"][0]()
    with pytest.raises(PartitionError, match="the buffer mask is used by stage 0 on cpu and by"):
        fxpipe.compile(
            model, ["cpu", "cpu:0"], example_inputs=(torch.zeros(2, 6, dtype=torch.long),)
        )
