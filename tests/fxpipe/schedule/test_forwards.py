"""The forwards of a call without a backward, in order and in time."""

from __future__ import annotations

import pytest

from fxpipe.schedule import (
    Link,
    Links,
    Memory,
    ScheduleError,
    StageCost,
    forwards,
    simulate,
    simulate_forwards,
)
from fxpipe.schedule.world import Edge


def test_micro_batches_follow_each_other_in_every_lane():
    assert forwards((0, 1), 3).text() == "lane 0 | 0F0 0F1 0F2  .\nlane 1 |  .  1F0 1F1 1F2"


def test_a_lane_with_several_stages_runs_them_in_the_order_of_clock_cycles():
    order = forwards((0, 1, 0, 1), 2)
    assert [str(action) for action in order.actions(0)] == ["0F0", "0F1", "2F0", "2F1"]
    assert order.placement == (0, 1, 0, 1)


def test_the_time_is_that_of_the_forwards_and_of_copies_that_nothing_hides():
    costs = [StageCost(1.0, 5.0, 5.0)] * 2
    links = Links([Edge(0, 1, 10.0, 10.0)], between={(0, 1): Link(0.0, 20.0)})
    timeline = simulate_forwards(forwards((0, 1), 3), costs, links)
    assert timeline.makespan == 1 + 0.5 + 3
    assert len(timeline.transfers) == 3


def test_what_is_kept_is_kept_to_the_end():
    timeline = simulate_forwards(
        forwards((0, 1), 3), [StageCost(1.0, 1.0, 1.0)] * 2, Links(), Memory([0.0, 4.0], 10.0)
    )
    assert timeline.peak_memory == (10.0, 22.0)


def test_it_is_no_schedule_of_a_training_step():
    with pytest.raises(ScheduleError, match="the backward is missing"):
        simulate(forwards((0,), 1), [StageCost(1.0, 1.0, 1.0)])
