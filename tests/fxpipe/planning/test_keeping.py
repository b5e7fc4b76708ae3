"""``checkpoint="auto"``: the mode of each stage is chosen together with the cut."""

from __future__ import annotations

import itertools
from contextlib import suppress

import pytest
import torch
from torch import nn

import fxpipe
from passes.common.modes import MODES
from tests.fxpipe.planning.plans import FREE_LINKS, on_meta


class Block(nn.Module):
    """A layer whose activations are many times its parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return torch.tanh(self.layer(x))


def plan(memory, checkpoint="auto", lanes=2, **options):
    """The plan for twelve blocks, the first of which are wider."""
    widths = [48] * 4 + [32] * 8
    layers = []
    for width, following in itertools.pairwise([*widths, widths[-1]]):
        layers += [Block(width), nn.Linear(width, following, bias=False)]
    model, x = on_meta(nn.Sequential(*layers), torch.zeros(2048, 48))
    device = FREE_LINKS if memory is None else FREE_LINKS.with_memory(memory)
    given = {"chunks": 8, "schedule": "1f1b", **options}
    return fxpipe.plan(model, [device] * lanes, example_inputs=x, checkpoint=checkpoint, **given)


def best_of_all(memory, **options):
    """The seconds of the fastest plan, of those with any modes; inf if none fits."""
    found = [float("inf")]
    for modes in itertools.product(MODES, repeat=2):
        with suppress(fxpipe.DoesNotFit):
            found.append(plan(memory, modes, **options).seconds)
    return min(found)


def test_without_a_limit_everything_is_kept():
    assert plan(None).checkpoint == "never"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("part", [0.9, 0.75, 0.6, 0.5, 0.4, 0.3])
def test_it_fits_whenever_any_modes_do_and_is_as_fast_as_the_best_of_them(part, schedule):
    limit = part * max(plan(None, "never", schedule=schedule).memory)
    best = best_of_all(limit, schedule=schedule)
    if best == float("inf"):
        with pytest.raises(fxpipe.DoesNotFit):
            plan(limit, schedule=schedule)
        return
    found = plan(limit, schedule=schedule)
    assert found.fits
    assert found.seconds <= best * (1 + 1e-9)


def test_a_stage_that_has_room_keeps_more_and_takes_more_layers():
    whole = plan(None, "never")
    limit = 0.7 * max(whole.memory)
    found, all_again = plan(limit), plan(limit, "always")
    assert found.checkpoint == ("always", "never"), "1F1B has more under way at the first stage"
    assert len(found.stages[1].nodes) > len(all_again.stages[1].nodes)
    assert found.seconds < all_again.seconds


def test_of_a_given_cut_each_stage_gets_the_mode_for_which_it_has_room():
    kept = plan(None, "never")
    limit = 0.8 * max(kept.memory)
    assert kept.memory[1] < limit < kept.memory[0]
    found = plan(limit, partition=kept.partition)
    assert found.partition == kept.partition
    assert found.fits
    assert found.checkpoint == ("always", "never")


def test_the_modes_are_in_the_plans_text():
    limit = 0.7 * max(plan(None, "never").memory)
    assert "checkpoint: always, never" in str(plan(limit))
