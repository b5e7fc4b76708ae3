"""What cannot be planned is refused in one sentence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import DeviceSpec
from tests.fxpipe.planning.plans import on_meta
from tests.zoo import Chain


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([], "devices is \\[\\]: give a list of DeviceSpec"),
        ("p40", "devices is 'p40': give a list"),
        (["p41"], "no device 'p41' is known"),
        (4, "devices is 4: give a list"),
    ],
)
def test_devices_that_make_no_sense_are_refused(devices, message):
    with pytest.raises(ValueError, match=message):
        fxpipe.plan(Chain(3), devices, example_inputs=(torch.zeros(2, 3),))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"example_inputs": torch.zeros(2, 3)}, TypeError, r"write example_inputs=\(x,\)"),
        (
            {"model": torch.relu},
            TypeError,
            "plan takes a model, an nn.Module, and is given a builtin",
        ),
        ({"checkpoint": "now"}, ValueError, "checkpoint is 'now': give 'never', 'selective'"),
        ({"optimizer_states": -1}, ValueError, "optimizer_states is -1: give a number, 0 or more"),
        ({"optimizer_states": "adam"}, ValueError, "optimizer_states is 'adam': give a number"),
        ({"costs": {1: 1.0}}, ValueError, "costs names 1: give names of nodes or modules, as str"),
        ({"costs": None}, ValueError, 'costs is None: give "analytic", "measured"'),
        ({"costs": {"a": float("nan")}}, ValueError, "costs gives nan for 'a': give seconds, 0"),
        ({"costs": {"a": "1 s"}}, ValueError, "costs gives '1 s' for 'a': give seconds, 0 or"),
        ({"model": nn.Identity()}, ValueError, "but the model computes nothing"),
        ({"schedule": "2f2b"}, ValueError, "schedule is '2f2b': give one of gpipe, 1f1b"),
        ({"devices": ["h100"] * 9}, ValueError, "9 stages asked for, but the model can be cut in"),
    ],
)
def test_what_makes_no_sense_is_refused(options, error, message):
    given = {"model": Chain(3), "devices": ["p40"], "example_inputs": (torch.zeros(2, 3),)}
    given |= options
    with pytest.raises(error, match=message):
        fxpipe.plan(given.pop("model"), given.pop("devices"), **given)


def test_a_model_without_values_is_not_measured():
    model, x = on_meta(Chain(3), torch.zeros(2, 3))
    with pytest.raises(ValueError, match='costs="measured" runs the model, which is on "meta"'):
        fxpipe.plan(model, ["p40"], example_inputs=x, costs="measured")


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"flops_per_s": 0}, "flops_per_s is 0: give a rate above zero"),
        ({"half_flops_per_s": -1}, "half_flops_per_s is -1: give a rate above zero"),
        ({"link_bytes_per_s": "fast"}, "link_bytes_per_s is 'fast': give a rate above zero"),
        ({"launch_s": -1}, "launch_s is -1: give seconds, 0 or more"),
        ({"link_latency_s": float("nan")}, "link_latency_s is nan: give seconds, 0 or more"),
        ({"memory": 0}, "memory is 0: give bytes, above zero, or None for no limit"),
        ({"memory": "16 GiB"}, "memory is '16 GiB': give bytes, above zero, or None"),
    ],
)
def test_a_device_that_cannot_be_is_refused(limits, message):
    with pytest.raises(ValueError, match=message):
        DeviceSpec(**limits)
