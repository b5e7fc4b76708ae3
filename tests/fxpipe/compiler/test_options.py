"""What cannot be is refused by compile, before anything is traced."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fxpipe
from tests.zoo import MLP

CPUS = ["cpu", "cpu"]


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([], "devices is empty: give one device for each lane"),
        ("cpu", r"devices is 'cpu': give a list with one device for each lane"),
        (2, "devices is 2: give a list"),
        (["cpu", "gpu"], r"devices\[1\] is 'gpu', which is no device"),
        ([None], r"devices\[0\] is None, which is no device: give a string, such as"),
        (["cpu", "meta"], r"devices\[1\] is meta, where nothing has values: fxpipe.plan says"),
        (["cuda:99"], r"devices\[0\] is cuda:99, but PyTorch sees \d+ devices of that type here"),
    ],
)
def test_devices_that_cannot_be(devices, message):
    with pytest.raises(ValueError, match=message):
        fxpipe.compile(MLP(), devices)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunks": 0}, 'chunks is 0: give "auto", or the number of micro-batches, 1 or more'),
        ({"chunks": 2.5}, "chunks is 2.5"),
        ({"schedule": "auto", "stages": 0}, "stages is 0: give the number of stages, 1 or more"),
        ({"checkpoint": "sometimes"}, "checkpoint is 'sometimes': give 'never', 'selective'"),
        ({"checkpoint_segments": 2}, "checkpoint_segments is 2, but checkpoint is 'never'"),
        (
            {"checkpoint": "auto", "checkpoint_segments": [1, 0]},
            r"checkpoint_segments is \[1, 0\]: give the number of segments .*, or 'auto'",
        ),
        (
            {"checkpoint": "auto", "checkpoint_segments": [1, 2, 3]},
            "checkpoint_segments has 3 numbers, and there are 2 stages: give one number for each",
        ),
        ({"schedule": "2f2b"}, "schedule is '2f2b': give one of gpipe, .*, or auto"),
        ({"schedule": "zbv", "stages": 3}, "zbv has 2 stages on each lane: 2 lanes take 4"),
        ({"schedule": "auto", "stages": 3}, "stages is 3: give as many for each of the 2 devices"),
        ({"loss_fn": 3}, "loss_fn is an int: give a function of the output and the target"),
        ({"loss_fn": nn.MSELoss}, r"loss_fn is the class MSELoss: give an instance, MSELoss\(\)"),
        ({"cache": 3}, "cache is 3: give the path of a folder"),
        ({"passes": 3}, "passes is a int: give a chain, such as fxpipe.default_chain"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        fxpipe.compile(MLP(), CPUS, **options)


def test_any_integer_is_a_number():
    given = {name: np.int64(2) for name in ("chunks", "checkpoint_segments", "stages")}
    partition = {f"layers.{i}": np.int64(i > 2) for i in range(5)}
    x = torch.randn(4, 12)
    options = {"checkpoint": "always", "partition": partition, "loss_fn": lambda o, _: o.sum()}
    with fxpipe.compile(MLP(), CPUS, example_inputs=(x,), **options, **given) as pipe:
        assert "np.int64" not in pipe.code, "what runs has plain ones"
        assert pipe(x).shape == x.shape
        assert pipe.measure(x, rounds=np.int64(1)).makespan > 0
    plan = fxpipe.plan(MLP(), ["h100"] * 2, example_inputs=(x,), chunks=np.int64(4))
    assert plan.chunks == 4


@pytest.mark.parametrize(
    ("schedule", "stages", "expected"),
    [
        ("1f1b", None, (0, 1)),
        ("interleaved_1f1b", None, (0, 1, 0, 1)),
        ("interleaved_1f1b", 6, (0, 1, 0, 1, 0, 1)),
        ("zbv", None, (0, 1, 1, 0)),
    ],
)
def test_a_schedule_says_which_stages_a_lane_has(schedule, stages, expected):
    pipe = fxpipe.compile(
        MLP(depth=9), CPUS, schedule=schedule, stages=stages, example_inputs=(torch.randn(4, 12),)
    )
    assert tuple(stage.lane for stage in pipe.stages) == expected
