"""What travels between devices takes the time of their links, and moves the cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import DeviceSpec
from tests.fxpipe.planning.plans import FREE_LINKS, even, on_meta
from tests.zoo import Chain


def test_nothing_travels_between_stages_of_one_device():
    slow = DeviceSpec(link_bytes_per_s=1e3, link_latency_s=1.0)
    options = {"schedule": "interleaved_1f1b", "stages": 2, "partition": ["4"]}
    plan = even(devices=[slow], **options)
    assert [stage.link_s for stage in plan.stages] == [0, 0]
    assert plan.seconds == pytest.approx(8)


def test_links_of_the_devices_take_their_time():
    slow = DeviceSpec(link_bytes_per_s=512 * 32 * 4 / 8, link_latency_s=0.0)  # 1 s a micro-batch
    plan = even(devices=[slow] * 2, chunks=8, partition=["4"])
    # There and back it is what the stages, which take half a second, wait for.
    assert plan.seconds == pytest.approx(0.5 + 8 * 1 + 8 * 1 + 0.5)
    copies = [t for t in plan.timeline.transfers if t.target == 1]
    assert [t.end - t.start for t in copies] == pytest.approx([1.0] * 8)


def test_links_are_summed_hop_by_hop():
    model, x = on_meta(Chain(4, {0: (3,)}), torch.zeros(8, 3))
    plan = fxpipe.plan(
        model, [FREE_LINKS] * 4, example_inputs=x, partition=["b", "c", "d"], chunks=4
    )
    size = 8 * 3 * 4
    assert plan.links == {(0, 1): size, (1, 2): size, (1, 3): size, (2, 3): size}


def test_a_slow_link_moves_the_cut():
    class Narrowing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(64, 512), nn.Linear(512, 512), nn.Linear(512, 4)

        def forward(self, x):
            return self.c(self.b(self.a(x)))

    model, x = on_meta(Narrowing(), torch.zeros(64, 64))
    even = {"a": 1.0, "b": 1.0, "c": 1.0}
    slow = DeviceSpec(link_bytes_per_s=64 * 512 * 4 / 5, link_latency_s=0.0)
    plans = [
        fxpipe.plan(model, [device] * 2, example_inputs=x, costs=even, chunks=1)
        for device in (FREE_LINKS, slow)
    ]
    assert [stage.seconds for stage in plans[0].stages] in ([1.0, 2.0], [2.0, 1.0])
    assert max(stage.seconds for stage in plans[1].stages) == pytest.approx(10), (
        "both ways, 5 s each"
    )
