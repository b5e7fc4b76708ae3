"""The joint search for a cut and the ways of its stages."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.demo import UNet
from fxpipe.planning.joint import JointSearch
from fxpipe.planning.question import CostSettings, PlanQuestion, costed
from passes.cost.analytic import ADAM
from passes.partition.automatic import Auto
from tests.fxpipe.planning.plans import FREE_LINKS, on_meta

LAYERS = 16


def question(memory=None, partition="auto"):
    """The question how to cut layers that need the same for four devices."""
    layers = (nn.Linear(32, 32) for _ in range(LAYERS))
    model, x = on_meta(nn.Sequential(*layers), torch.ones(8, 32))
    spec = FREE_LINKS.with_memory(memory)
    prices, _ = costed(
        model,
        (x, {}),
        CostSettings("analytic", spec, ADAM),
        in_dims=None,
        tracer="auto",
        chunks=None,
        chain=fxpipe.default_chain(),
    )
    return PlanQuestion(prices, partition, (spec,) * 4, "1f1b", None, 4, "never")


def found_for(counts, memory, partition="auto"):
    """The joint search under a limit of memory, and what it takes the cut for that gives so many
    layers to each device."""
    asked = question(memory, partition)
    search, lanes = asked._search, asked._lanes
    starts = [str(n) for n in itertools.accumulate(counts[:-1])]
    return search, search.on(lanes.cut_up(asked.prices.of(asked.chunks), starts, 1), 1)


EVEN = max(question().nearest().memory)
"""What the fullest device needs if all have four layers."""


@pytest.mark.parametrize("counts", [(6, 4, 4, 2), (2, 4, 4, 6), (3, 7, 3, 3), (1, 5, 5, 5)])
def test_nodes_leave_a_device_that_lacks_memory_along_those_on_the_way_to_one_with_room(counts):
    search, found = found_for(counts, EVEN)
    assert found.short
    nearer = search.fitting(found)
    assert not nearer.short
    assert max(Counter(nearer.cut.stage).values()) == LAYERS // 4


def test_a_cut_that_fits_stays():
    search, found = found_for((5, 4, 4, 3), 1.5 * EVEN)
    assert not found.short and search.fitting(found) is found


def test_where_nothing_fits_a_cut_is_found_that_lacks_less():
    search, found = found_for((6, 4, 4, 2), 0.9 * EVEN)
    nearer = search.fitting(found)
    assert 0 < nearer.short < found.short


@pytest.mark.parametrize("part, fits", [(1.05, True), (0.9, False)])
def test_advice_says_that_a_model_fits_where_only_a_shift_makes_it_fit(monkeypatch, part, fits):
    asked = question(part * EVEN)
    _, uneven = found_for((6, 4, 4, 2), part * EVEN)
    monkeypatch.setattr(JointSearch, "free", uneven)
    monkeypatch.setattr(JointSearch, "found", lambda *_: iter(()))
    assert asked.can_fit() == fits


def test_what_the_user_pins_stays_where_it_is():
    search, found = found_for((6, 4, 4, 2), EVEN, Auto(pins={"5": 0}))
    assert search.fitting(found) is found


def test_a_plan_is_found_where_the_search_for_cuts_finds_none_that_fits(monkeypatch):
    monkeypatch.setattr(JointSearch, "found", lambda *_: iter(()))
    sizes = [(32, 256), (256, 32)] * 4 + [(32, 32)] * 8
    model, x = on_meta(nn.Sequential(*(nn.Linear(*size) for size in sizes)), torch.ones(8, 32))
    given = {"chunks": 4, "schedule": "1f1b", "costs": {f"{i}": 1.0 for i in range(len(sizes))}}
    free = fxpipe.plan(model, [FREE_LINKS] * 2, example_inputs=x, **given)
    assert free.memory[0] > 2 * free.memory[1], "layers that take as long need more memory there"
    limit = 0.7 * free.memory[0]
    found = fxpipe.plan(model, [FREE_LINKS] * 2, example_inputs=x, memory=limit, **given)
    assert found.fits
    assert len(found.stages[0].nodes) < len(free.stages[0].nodes)


def test_a_model_of_few_large_parts_is_as_fast_as_a_cut_made_by_hand():
    """What a stage needs while it runs differs by megabytes from cut to cut, so that the search
    expects cuts to fit that do not, and others not to fit that do."""
    torch.manual_seed(0)
    model, image = UNet(), torch.randn(16, 3, 64, 64)

    def planned(**options):
        return fxpipe.plan(
            model,
            ["cpu"] * 4,
            example_inputs=(image,),
            example_target=image,
            loss_fn=F.mse_loss,
            chunks=8,
            schedule="zb_h1",
            optimizer="adamw",
            memory="10MiB",
            **options,
        )

    modes = ["never", "never", "always", "never"]
    by_hand = planned(partition=["up.2", "relu_5", "relu_6"], checkpoint=modes)
    assert by_hand.fits
    found = planned(checkpoint="auto")
    assert found.fits and found.seconds <= by_hand.seconds
    assert "no other cut that was expected to fit" in str(found) or "among the cuts" in str(found)
