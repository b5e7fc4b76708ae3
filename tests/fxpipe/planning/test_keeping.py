"""``checkpoint="auto"``: the mode of each stage, and where nothing fits otherwise its number of
segments, are chosen together with the cut."""

from __future__ import annotations

import itertools
import re
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.planning.keeping import KEEPS_ALL
from fxpipe.planning.lanes import PlannedLanes
from fxpipe.planning.question import CostSettings, PlanQuestion, costed
from fxpipe.runtime.ambient import compiling
from fxpipe.schedule import Schedule
from passes.common.modes import MODES, OFFLOAD, is_never
from passes.common.segments import counts
from tests.fxpipe.planning.plans import FREE_LINKS, on_meta


class Block(nn.Module):
    """A layer whose activations are many times its parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return torch.tanh(self.layer(x))


def plan(memory, checkpoint="auto", lanes=2, host=None, **options):
    """The plan for twelve blocks, the first of which are wider. ``host``: how many bytes per second
    go to the host's memory, if there is one."""
    widths = [48] * 4 + [32] * 8
    layers = []
    for width, following in itertools.pairwise([*widths, widths[-1]]):
        layers += [Block(width), nn.Linear(width, following, bias=False)]
    model, x = on_meta(nn.Sequential(*layers), torch.zeros(2048, 48))
    device = replace(FREE_LINKS, host_bytes_per_s=host, memory=memory)
    given = {"chunks": 8, "schedule": "1f1b", **options}
    return fxpipe.plan(model, [device] * lanes, example_inputs=x, checkpoint=checkpoint, **given)


def best_of_all(memory, known=MODES, **options):
    """The seconds of the fastest plan, of those with any of these modes; inf if none fits."""
    found = [float("inf")]
    for modes in itertools.product(known, repeat=2):
        with suppress(fxpipe.DoesNotFit):
            found.append(plan(memory, modes, **options).seconds)
    return min(found)


def test_without_a_limit_everything_is_kept():
    assert plan(None).checkpoint == "never"


LIMITS = [
    (part, schedule) for part in (0.9, 0.75, 0.6, 0.5, 0.4, 0.3) for schedule in ("gpipe", "1f1b")
]


@pytest.mark.long  # the one below for segments compares with fewer possibilities
@pytest.mark.parametrize(("part", "schedule"), LIMITS)
def test_it_fits_whenever_any_modes_do_and_is_as_fast_as_the_best_of_them(part, schedule):
    limit = part * max(plan(None, "never", schedule=schedule).memory)
    best = best_of_all(limit, schedule=schedule)
    if best == float("inf"):
        with pytest.raises(fxpipe.DoesNotFit):
            plan(limit, schedule=schedule, checkpoint_segments=1)
        return
    for segments in 1, None:
        found = plan(limit, schedule=schedule, checkpoint_segments=segments)
        assert found.fits
        assert found.seconds <= best * (1 + 1e-9)


@pytest.mark.parametrize(
    ("schedule", "count"),
    [
        ("1f1b", 6),
        pytest.param("1f1b", 12, marks=pytest.mark.long),
        pytest.param("gpipe", 12, marks=pytest.mark.long),
    ],
)
def test_with_more_memory_a_step_takes_no_longer(schedule, count):
    most = max(plan(None, "never", schedule=schedule).memory)
    parts = [0.45 + 0.6 / count * i for i in range(count)]
    seconds = []
    for part in parts:
        with suppress(fxpipe.DoesNotFit):
            seconds.append(plan(part * most, schedule=schedule).seconds)
    assert len(set(seconds)) >= 3, "memory matters here"
    assert seconds == sorted(seconds, reverse=True)


def test_a_stage_takes_more_layers_where_it_would_wait_while_it_recomputes():
    # The first stage has 10 of the 24 nodes where its recomputing counts in full, and 12 where it
    # does not count: a step is fastest with 11, for which there is room under either limit.
    most = max(even(None, "never", schedule="1f1b", blocks=12).memory)
    tight, wide = (even(part * most, schedule="1f1b", blocks=12) for part in (0.65, 0.7))
    assert tight.checkpoint == wide.checkpoint == ("always", "never")
    assert wide.seconds <= tight.seconds * (1 + 1e-9)


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
    found = plan(limit, partition=kept.partition, checkpoint_segments=1)
    assert found.partition == kept.partition
    assert found.fits
    assert found.checkpoint == ("always", "never")


@pytest.mark.parametrize(
    ("part", "options"),
    [
        (0.9, {"lanes": 4}),  # no lane waits for what the first one recomputes
        pytest.param(0.5, {"lanes": 3}, marks=pytest.mark.long),
        pytest.param(0.55, {"schedule": "gpipe"}, marks=pytest.mark.long),
    ],
)
def test_modes_that_are_given_are_as_fast_as_where_they_are_chosen(part, options):
    limit = part * max(plan(None, "never", **options).memory)
    chosen = plan(limit, **options)
    assert not is_never(chosen.checkpoint)
    segments = chosen.checkpoint_segments
    given = plan(limit, chosen.checkpoint, checkpoint_segments=segments, **options)
    assert given.fits and given.seconds <= chosen.seconds * (1 + 1e-9)


def test_the_best_of_all_cuts_is_not_searched_for_again_where_it_fits(monkeypatch):
    parts, cut_up = [], PlannedLanes.cut_up

    def noted(lanes, gm, partition, part, *args, **options):
        parts.append(part)
        return cut_up(lanes, gm, partition, part, *args, **options)

    monkeypatch.setattr(PlannedLanes, "cut_up", noted)
    free = plan(None, "always")
    most = max(plan(None, "never").memory)
    parts.clear()
    found = plan(most, "always")  # there is room even for what keeps all
    assert (found.partition, found.seconds) == (free.partition, free.seconds)
    assert set(parts) == {None}, "a part of the memory is given for cuts under limits only"
    plan(0.9 * max(free.memory), "always", checkpoint_segments="auto")
    assert 1 in parts


def test_the_modes_are_in_the_plans_text():
    limit = 0.7 * max(plan(None, "never").memory)
    assert "checkpoint: always, never" in str(plan(limit))


# ---------------------------------------------------------------------- in the memory of the host


def test_over_a_fast_link_activations_go_to_the_host_and_nothing_is_computed_twice():
    free = plan(None, "never", schedule="gpipe")
    limit = 0.6 * max(free.memory)
    found, again = (plan(limit, schedule="gpipe", host=host) for host in (1e15, None))
    assert any(mode.startswith(OFFLOAD) for mode in found.checkpoint)
    assert not any(mode.startswith(OFFLOAD) for mode in again.checkpoint)
    assert found.fits and found.seconds < again.seconds
    assert "activations that wait in the host's memory: " in str(found)
    assert not again.timeline.host_memory
    assert found.seconds <= free.seconds * 1.02


def test_over_a_slow_link_nothing_moves():
    limit = 0.6 * max(plan(None, "never").memory)
    assert plan(limit, host=1.0).seconds == plan(limit).seconds


@pytest.mark.long
@pytest.mark.parametrize(("part", "seconds"), [(0.8, 0.5), (0.6, 1.5), (0.45, 4.0)])
def test_with_a_host_it_is_as_fast_as_the_best_of_all_modes(part, seconds):
    """``seconds``: what the activations of a stage take to the host, in forwards of the stage."""
    free = plan(None, "never", schedule="gpipe")
    stage = free.stages[0]
    host = stage.activation_bytes / (seconds * stage.seconds / 3)
    limit = part * max(free.memory)
    best = best_of_all(limit, (*MODES, OFFLOAD), schedule="gpipe", host=host)
    found = plan(limit, schedule="gpipe", host=host)
    assert found.fits and found.seconds <= best * (1 + 1e-9)


# ---------------------------------------------------------------------------------- in segments


def even(memory, checkpoint="auto", schedule="1f1b", blocks=16, **options):
    """The plan for blocks that are alike, whose segments receive little."""
    model, x = on_meta(nn.Sequential(*(Block(32) for _ in range(blocks))), torch.zeros(4096, 32))
    device = FREE_LINKS if memory is None else FREE_LINKS.with_memory(memory)
    given = {"chunks": 4, "schedule": schedule, "example_inputs": x, **options}
    return fxpipe.plan(model, [device] * 2, checkpoint=checkpoint, **given)


def part_of_all(part, **options):
    """A part of the bytes that a device needs if everything is kept."""
    return part * max(even(None, "never", **options).memory)


WAYS = [
    ("never", 1),
    ("always 1/2", 1),
    ("except_last", 1),
    ("except_last", 2),
    *(("always", n) for n in (1, 2, 4)),
]


@pytest.mark.parametrize(
    ("blocks", "part", "known"),
    [
        (10, 0.6, WAYS[2::2]),
        pytest.param(10, 0.6, WAYS[::2], marks=pytest.mark.long),
        *(pytest.param(16, part, WAYS, marks=pytest.mark.long) for part in (0.6, 0.55, 0.5)),
    ],
)
def test_it_fits_whenever_any_segments_do_and_is_as_fast_as_the_best_of_them(
    blocks, part, known, monkeypatch
):
    """Of the ways that are tried here none fits in one segment, so that nothing is chosen ahead of
    those in several."""
    monkeypatch.setattr(PlanQuestion, "ways_out", lambda self, batch: "")  # takes long
    limit, seconds = part_of_all(part, blocks=blocks), []
    for ways in itertools.product(known, repeat=2):
        modes, numbers = zip(*ways, strict=True)
        with suppress(fxpipe.DoesNotFit):
            given = 1 if is_never(modes) else numbers
            found = even(limit, modes, blocks=blocks, checkpoint_segments=given)
            seconds.append(found.seconds)
            assert max(counts(given, modes, 2)) > 1
    if not seconds:
        with pytest.raises(fxpipe.DoesNotFit):
            even(limit, blocks=blocks)
        return
    found = even(limit, blocks=blocks)
    assert found.fits and max(counts(found.checkpoint_segments, found.checkpoint, 2)) > 1
    assert found.seconds <= min(seconds) * (1 + 1e-9)


def test_segments_of_given_modes_are_chosen_where_they_are_asked_for():
    always = even(None, "always", partition=even(None).partition)
    limit = 0.95 * max(always.memory)
    given = {"checkpoint": "always", "partition": always.partition}
    assert not even(limit, **given).fits
    found = even(limit, **given, checkpoint_segments="auto")
    assert found.fits
    assert found.checkpoint == "always" and found.partition == always.partition
    assert found.checkpoint_segments == (2, 1), "1F1B has more under way at the first stage"
    free = even(None, **given, checkpoint_segments="auto")
    assert free.checkpoint_segments == 1 and free.seconds == always.seconds


def test_numbers_that_are_given_are_not_changed_and_are_for_the_stages_that_are_recomputed():
    limit = part_of_all(0.6)
    found = even(limit, checkpoint_segments=2)
    assert found.checkpoint == ("always", "never") and found.checkpoint_segments == 2
    assert "checkpoint: always in 2 segments, never" in str(found)
    other = even(limit, checkpoint_segments=[1, 2])
    assert other.checkpoint == "always" and other.checkpoint_segments == (1, 2)
    assert other.seconds > found.seconds


def linears(number, device):
    """The lanes of a plan for linear layers on two such devices, and the cut in the middle."""
    layers = (nn.Linear(8, 8) for _ in range(number))
    model, x = on_meta(nn.Sequential(*layers), torch.zeros(64, 8))
    with compiling():
        prices, _ = costed(
            model,
            (x, {}),
            CostSettings("analytic", device, 2),
            in_dims=None,
            tracer="auto",
            chunks=2,
            chain=fxpipe.default_chain(),
        )
    lanes = PlannedLanes((device,) * 2, (0, 1), "1f1b", 2, "auto", prices.chain, None)
    return lanes, lanes.cut_up(prices.of(2), [str(number // 2)], None)


@pytest.mark.parametrize("host", [1e3, 1e9, 1e15])
def test_no_way_of_a_stage_takes_less_time_than_the_one_that_keeps_all(host):
    lanes, cut = linears(8, replace(FREE_LINKS, host_bytes_per_s=host))
    ways = [lanes.ways(cut, stage) for stage in range(2)]
    assert {mode for mode, _ in ways[0]} >= {*MODES, OFFLOAD}

    def seconds(*ways):
        return lanes.step(cut, ways).timeline.makespan

    for other in ways[1]:
        least = seconds(KEEPS_ALL, other)
        assert all(seconds(way, other) >= least * (1 - 1e-9) for way in ways[0])
    for other in ways[0]:
        least = seconds(other, KEEPS_ALL)
        assert all(seconds(other, way) >= least * (1 - 1e-9) for way in ways[1])


def test_a_stage_with_fewer_places_to_cut_than_a_way_has_segments_goes_the_nearest_way():
    lanes, cut = linears(4, FREE_LINKS)  # two nodes in each stage
    assert lanes.nearest(cut, 0, ("always", 8)) == ("always", 2)
    assert lanes.nearest(cut, 0, ("always 1/2", 2)) == ("always 1/2", 2)
    assert lanes.nearest(cut, 0, ("always 3/4", 4)) == ("never", 1)
    assert lanes.nearest(cut, 0, ("offload", 1)) == ("never", 1), "there is no link to a host"


def test_a_stage_of_one_node_has_one_segment():
    model, x = on_meta(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.zeros(64, 8))
    cut = {"0": 0, "1": 1}
    options = {"chunks": 2, "checkpoint": "always", "partition": cut}
    found = fxpipe.plan(
        model,
        [FREE_LINKS.with_memory(1)] * 2,
        example_inputs=x,
        **options,
        checkpoint_segments="auto",
    )
    assert not found.fits and found.checkpoint_segments == 1


def test_a_stage_has_one_segment_if_the_schedule_says_when_it_is_recomputed():
    own = Schedule.from_text(
        "0F0 0F1 0R0 0B0 0F2 0R1 0B1 0F3 0R2 0B2 0R3 0B3 \n 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"
    )
    named = even(None, "always", partition=even(None).partition)
    limit = 0.95 * max(named.memory)
    options = {"partition": named.partition, "chunks": None, "checkpoint_segments": "auto"}
    assert not even(limit, "always", own, **options).fits
    late = Schedule.from_text(re.sub(r" 0R\d", "", own.text()))
    assert even(limit, "always", late, **options).fits


def test_what_the_advice_tries_are_not_the_modes_and_segments_that_have_been_tried():
    with pytest.raises(fxpipe.DoesNotFit) as error:
        even(part_of_all(0.4))
    assert "it would fit with" in str(error.value) and "checkpoint" not in str(error.value)
