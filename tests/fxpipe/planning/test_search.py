"""The search by prediction finds what trying everything finds."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import DeviceSpec
from fxpipe.planning.question import CostSettings, costed
from fxpipe.planning.search import (
    Choice,
    Setting,
    SettingSearch,
    numbers_of_microbatches,
    settings_of,
)
from fxpipe.schedule import AUTO, NAMES
from passes.cost.analytic import ADAM
from tests.fxpipe.planning.plans import FREE_LINKS, on_meta
from tests.zoo import MLP, UNet

SLOW = DeviceSpec("slow", 1e10, None, 1e9, None, 1e8, 1e-4, 1e-5)
"""A device whose links and launches are dear."""


class Towers(nn.Module):
    """Two chains of layers that do not depend on each other."""

    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        self.right = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def forward(self, x):
        return self.left(x) + self.right(x)


MODELS = {
    "mlp": (lambda: MLP(depth=9), (16, 12)),
    "wide": (lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))), (12, 512)),
    "tall": (lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))), (1024, 512)),
    "long": (lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(8))), (512, 16)),
    "unet": (lambda: UNet(4, 3), (8, 3, 32, 32)),
    "towers": (Towers, (8, 64)),
}


def search_of(name, spec=FREE_LINKS, lanes=2, checkpoint="never"):
    make, shape = MODELS[name]
    model, inputs = on_meta(make(), torch.zeros(*shape))
    prices, rows = costed(
        model,
        (inputs, {}),
        CostSettings("analytic", spec, ADAM),
        in_dims=None,
        tracer="auto",
        chunks=None,
        chain=fxpipe.default_chain(),
    )
    return SettingSearch(prices, "auto", (spec,) * lanes, checkpoint), rows


def every_plan(search, rows, stages=(None,)):
    """The seconds of a plan for each named schedule and each number of micro-batches that cuts the
    rows evenly, by :func:`fxpipe.plan`'s own question; those that do not fit are left out."""
    numbers = [n for n in range(1, 8 * len(search.specs) + 1) if rows % n == 0]
    found = {}
    for name, number, chunks in itertools.product(NAMES, stages, numbers):
        try:
            plan = search.question(Setting(name, number, chunks)).answer()
        except ValueError:
            continue
        if plan.fits:
            found[name, chunks] = plan.seconds
    return found


@pytest.mark.covering(1)
@pytest.mark.one_in(3)
@pytest.mark.parametrize("spec", [FREE_LINKS, SLOW], ids=["free", "slow"])
@pytest.mark.parametrize("name", MODELS)
def test_no_named_schedule_with_any_number_of_micro_batches_is_faster(name, spec):
    search, rows = search_of(name, spec)
    trials = search.fastest(settings_of(2, numbers_of_microbatches(2, rows)))
    every = every_plan(search_of(name, spec)[0], rows)
    best = trials[0]
    assert best.seconds == min(every.values()) == every[best.setting.schedule, best.setting.chunks]
    with_own = search.fastest(settings_of(2, numbers_of_microbatches(2, rows)), has_own=True)
    assert with_own[0].seconds <= best.seconds * (1 + 1e-9)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("part", [0.9, 0.7])
def test_no_named_schedule_that_fits_is_faster_under_a_limit_of_memory(part):
    free, _ = search_of("long")
    settings = settings_of(2, [2, 4])
    most = max(max(trial.plan.memory) for trial in free.fastest(settings) if trial.plan)
    limited = FREE_LINKS.with_memory(part * most)
    found = search_of("long", limited, checkpoint="auto")[0].fastest(settings)
    alone = search_of("long", limited, checkpoint="auto")[0]
    every = [trial for trial in map(alone.trial, settings) if trial.plan is not None]
    assert every
    assert found[0].seconds == min(trial.seconds for trial in every)
    assert max(found[0].plan.memory) <= part * most * (1 + 1e-9)


@pytest.mark.covering(1)
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("lanes", "spec"), [(2, FREE_LINKS), (3, SLOW)], ids=["2 with free links", "3 with slow links"]
)
@pytest.mark.parametrize("name", MODELS)
def test_no_plan_is_faster_than_a_bound_says(name, lanes, spec):
    search, rows = search_of(name, spec, lanes)
    for setting in settings_of(lanes, numbers_of_microbatches(lanes, rows), [*NAMES, AUTO]):
        bounds = list(search._bounds_of(setting))
        assert bounds == [bound for bound in bounds if bound > 0]
        trial = search.trial(setting)
        assert max(bounds) <= trial.seconds * (1 + 1e-9)


def test_what_is_left_out_is_not_planned():
    search, _ = search_of("wide", SLOW)
    trials = search.fastest(settings_of(2, [1, 2, 4, 6, 12]))
    left_out = [trial for trial in trials if trial.is_left_out]
    assert left_out
    assert all(trial.plan is None and trial.seconds >= trials[0].seconds for trial in left_out)
    choice = Choice.of(trials, 12)
    assert (choice.planned + choice.left_out, choice.unfit) == (len(trials), 0)
    assert f"{choice.left_out} left out, which lower bounds show to be no faster" in choice.lines[2]


def test_dear_launches_lead_to_fewer_micro_batches():
    dear, free = (
        search_of("tall", replace(FREE_LINKS, launch_s=launch))[0] for launch in (1e-3, 0.0)
    )
    few, many = (
        each.fastest(settings_of(2, [1, 2, 4, 8, 16], ["gpipe"]))[0] for each in (dear, free)
    )
    assert few.setting.chunks < many.setting.chunks


def test_large_weights_lead_to_fewer_micro_batches():
    (wide, _), (tall, _) = search_of("wide"), search_of("tall")
    few, many = (each.fastest(settings_of(2, [1, 2, 4], ["gpipe"]))[0] for each in (wide, tall))
    assert (few.setting.chunks, many.setting.chunks) == (1, 4), "each reads all of them anew"


def test_micro_batches_of_one_size_are_tried():
    assert numbers_of_microbatches(2, 12) == [1, 2, 3, 4, 6, 12]
    assert numbers_of_microbatches(2, 64) == [1, 2, 4, 8, 16], "eight for each lane at most"
    assert numbers_of_microbatches(2, 1) == [1]
    assert numbers_of_microbatches(2, None) == [1], "what cannot be cut is one micro-batch"
    assert numbers_of_microbatches(4, 37) == [1, 4, 8, 16, 32], "37 is prime"
    assert numbers_of_microbatches(4, 3) == [1, 3]


def test_settings_that_do_not_go_together_are_no_settings():
    found = settings_of(4, [4, 8], stages=[None, 4])
    assert Setting("dualpipe_v", None, 8) in found
    assert not any(each.schedule == "dualpipe_v" and each.chunks < 8 for each in found)
    assert not any(each.schedule == "zbv" and each.stages == 4 for each in found)
    with pytest.raises(ValueError, match="dualpipe_v on 4 lanes needs 8 micro-batches"):
        settings_of(4, [4], ["dualpipe_v"])
    with pytest.raises(ValueError, match="schedule is '2f2b'"):
        settings_of(4, [4], ["gpipe", "2f2b"])


def test_a_model_with_fewer_nodes_than_stages_is_planned_with_fewer():
    model, inputs = on_meta(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.zeros(4, 8))
    settings = CostSettings("analytic", FREE_LINKS, ADAM)
    prices, _ = costed(
        model,
        (inputs, {}),
        settings,
        in_dims=None,
        tracer="auto",
        chunks=None,
        chain=fxpipe.default_chain(),
    )
    trials = SettingSearch(prices, "auto", (FREE_LINKS,) * 2, "never").fastest(
        settings_of(2, [2, 4])
    )
    assert len(trials[0].plan.stages) == 2
    of_zbv = [trial for trial in trials if trial.setting.schedule == "zbv"]
    assert of_zbv
    assert all(math.isinf(trial.seconds) and "stages" in trial.why for trial in of_zbv)


def test_a_choice_says_what_others_would_take():
    search, rows = search_of("tall")
    trials = search.fastest(settings_of(2, numbers_of_microbatches(2, rows)))
    choice = Choice.of(trials, rows)
    first, others, counts = choice.lines
    assert first.startswith(f"chosen by prediction, for a mini-batch of 1024 rows: {choice}")
    assert f"{choice.chunks} micro-batches on {choice.stages} stages" in first
    assert all(f"{said} " in others for said, _ in choice.others)
    assert all(seconds >= choice.seconds for _, seconds in choice.others)
    assert {said.split()[0] for said, _ in choice.others} - {choice.name}
    assert counts.startswith(f"{choice.planned} settings have been planned")
