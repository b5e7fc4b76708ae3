"""The memory of lanes, as users say it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.planning.limits import bytes_of, free_memory, limits_of
from tests.zoo import Chain


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("20GiB", 20 * 2**30),
        ("400 MiB", 400 * 2**20),
        ("1.5kib", 1536),
        ("16GB", 16 * 10**9),
        ("7 B", 7),
        (1000, 1000),
        (2.5e9, 2.5e9),
        ("h100", 80 * 2**30),
    ],
)
def test_sizes_are_numbers_text_or_devices(given, expected):
    assert bytes_of(given) == expected


@pytest.mark.parametrize("given", ["much", "20 G", "0MiB", 0, -1, True, "cpu core", None, [1]])
def test_what_is_no_size_is_refused(given):
    with pytest.raises(ValueError, match=r"memory is .*: give bytes above zero, text such as"):
        bytes_of(given)


def test_one_figure_is_for_all_lanes_and_a_list_has_one_for_each():
    assert limits_of("1KiB", 2) == (1024, 1024)
    assert limits_of(["1KiB", None, 5], 3) == (1024, None, 5)
    assert limits_of(None, 2) == (None, None)
    with pytest.raises(ValueError, match="give one figure for all of the 3 lanes, or a list"):
        limits_of([1, 2], 3)


def test_a_cpu_has_no_limit_of_its_own():
    assert free_memory((torch.device("cpu"),) * 2, nn.Linear(3, 3)) == (None, None)


def test_an_accelerator_has_what_is_free_and_what_the_model_takes_already(monkeypatch):
    """Of 1000 bytes 400 are free; PyTorch has reserved 350, of which 50 are not in use. So 250 are
    of other programs, and 300 in use here: 144 of them by the model and its gradients."""
    here = torch.device("cuda", 0)
    monkeypatch.setattr("torch.accelerator.get_memory_info", lambda device: (400, 1000))
    monkeypatch.setattr("torch.accelerator.memory_reserved", lambda device: 350)
    monkeypatch.setattr("torch.accelerator.memory_allocated", lambda device: 300)
    model = nn.Linear(5, 3, bias=False)
    monkeypatch.setattr("fxpipe.planning.limits._held", lambda model, device: 144)
    assert free_memory((here,), model) == (400 + 50 + 144,)
    assert free_memory((here, torch.device("cpu"), here), model) == (297, None, 297)


def test_what_a_model_holds_on_a_device_counts_shared_memory_once():
    from fxpipe.planning.limits import _held

    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    model[0].weight.grad = torch.zeros(4, 4)
    assert _held(model, torch.device("cpu")) == 2 * 64
    assert _held(model, torch.device("meta")) == 0


def test_a_plan_takes_memory_in_place_of_what_devices_have():
    options = {"example_inputs": (torch.zeros(8, 3),), "chunks": 2}
    plan = fxpipe.plan(Chain(4), ["h100"] * 2, memory=["1MiB", "2MiB"], **options)
    assert [device.memory for device in plan.devices] == [2**20, 2**21]
    with pytest.raises(fxpipe.DoesNotFit):
        fxpipe.plan(Chain(4), ["h100"] * 2, memory=10, **options)
