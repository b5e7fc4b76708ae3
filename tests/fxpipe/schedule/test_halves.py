"""Halves of a backward that follow each other are one, where nothing is gained by two."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from fxpipe.schedule import Schedule, ScheduleError, StageCost, chain, joined, named, simulate


def text(schedule: Schedule, edges: list[tuple[int, int]] | None = None) -> str:
    own = chain(schedule.stages) if edges is None else edges
    return "\n".join(line.rstrip() for line in joined(schedule, own).text().splitlines())


def test_the_first_lane_of_zb_h1_has_nobody_who_waits_for_it():
    assert_expected_inline(
        text(named("zb_h1", lanes=2, microbatches=3)),
        """\
lane 0 | 0F0 0F1  .  0B0 0F2 0B1  .   .  0B2  .
lane 1 |  .  1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2""",
    )


def test_in_a_v_the_stage_after_the_turn_has_its_lane_to_itself():
    assert_expected_inline(
        text(named("zbv", lanes=2, microbatches=2)),
        """\
lane 0 | 0F0 0F1  .  3F0 3I0 3W0 3F1 3I1 3W1 0B0 0B1
lane 1 |  .  1F0 2F0 1F1 2F1 2B0 1I0 1W0 2B1 1I1 1W1""",
    )


def test_a_skip_to_another_lane_is_waited_for():
    schedule = Schedule.from_text("0F0 0B0 \n 1F0 2F0 2I0 2W0 1B0")
    assert "2B0" in text(schedule)
    assert "2I0 2W0" in text(schedule, [(0, 1), (1, 2), (0, 2)])


def test_halves_apart_stay_apart_and_those_that_overlap_with_others_too():
    apart = Schedule.from_text("0F0 0F1 0I0 0I1 0W0 0W1")
    overlapping = Schedule.from_text("0F0 0F1 (0F2;0I0)OVERLAP_F_B 0W0 0I1 0W1 0I2 0W2")
    assert joined(apart, []) == apart
    assert text(overlapping).endswith("OVERLAP_F_B 0W0 0B1 0B2")


def test_nothing_comes_later_by_it():
    schedule, costs = named("zbv", lanes=4, microbatches=12), [StageCost(1.0, 1.0, 1.0)] * 8
    found = simulate(joined(schedule, chain(8)), costs)
    assert found.makespan == simulate(schedule, costs).makespan


@pytest.mark.parametrize(
    "text, message",
    [
        ("0F0 0I0 0W0 0B0", "a whole backward 0B0, at position 3 .*, and also 0I0, at position 1"),
        ("0F0 0I0 0W0 0F1 0W1 0I1", r"deadlock: .* at position 4 \(0W1\)"),
    ],
)
def test_what_cannot_run_is_refused_as_it_was_written(text, message):
    with pytest.raises(ScheduleError, match=message):
        joined(Schedule.from_text(text), [])
