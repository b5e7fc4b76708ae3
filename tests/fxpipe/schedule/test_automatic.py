import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.schedule import (
    NAMES,
    Edge,
    Kind,
    Link,
    Links,
    Memory,
    StageCost,
    auto,
    chain,
    joined,
    live,
    named,
    search,
    simulate,
    validate,
)
from tests.fxpipe.schedule.problems import UNIT, costs, problem


def best_named(costs, lanes, microbatches, links=None, fits=lambda schedule: True):
    found = []
    for name in NAMES:
        try:
            schedule = named(name, lanes=lanes, microbatches=microbatches, stages=len(costs))
        except ValueError:
            continue
        if fits(schedule):
            found.append(simulate(schedule, costs, links).makespan)
    return min(found)


# --------------------------------------------------------------------------------- how good it is


@given(costs(4), st.sampled_from([2, 4]), st.integers(1, 6), st.sampled_from([0.0, 1.0]))
@settings(deadline=None, max_examples=20)
def test_it_is_never_worse_than_the_best_named_schedule(costs, lanes, microbatches, latency):
    links = Links(link=Link(latency))
    found = search(costs, lanes, microbatches, links=links, effort=20)
    validate(found.schedule)
    assert found.timeline.makespan == simulate(found.schedule, costs, links).makespan
    assert found.bound <= found.timeline.makespan * (1 + 1e-9)
    assert found.timeline.makespan <= best_named(costs, lanes, microbatches, links) * (1 + 1e-9)


def test_nor_than_one_whose_halves_are_joined_as_a_pipeline_runs_it():
    """Where a whole backward takes less than its halves, as at stage 2."""
    costs = [
        StageCost(1.0, 1.0, 1.0),
        StageCost(2.0, 0.0, 2.0),
        StageCost(3.0, 0.0, 3.0, backward=1.5),
        StageCost(1.0, 1.0, 2.0),
    ]
    order = joined(named("zbv", lanes=2, microbatches=2), chain(4))
    found = search(costs, 2, 2, placement=order.placement, effort=20)
    assert found.timeline.makespan <= simulate(order, costs).makespan


@given(costs(4), st.integers(1, 5), st.integers(2, 6))
@settings(deadline=None, max_examples=20)
def test_nor_within_a_memory_bound(costs, microbatches, room):
    memory = Memory([1] * 4)

    def fits(schedule):
        return max(live(schedule).lanes) <= room

    found = search(costs, 2, microbatches, memory=memory, max_bytes=room, effort=20)
    assert fits(found.schedule)
    try:
        least = best_named(costs, 2, microbatches, fits=fits)
    except ValueError:  # none keeps the bound
        return
    assert found.timeline.makespan <= least * (1 + 1e-9)


def test_uneven_stages_gain_much():
    costs = [StageCost(1, 1, 1), StageCost(2, 2, 2), StageCost(1, 1, 1), StageCost(2, 2, 2)]
    found = search(costs, 2, 8, placement=(0, 1, 0, 1))
    assert found.is_optimal
    assert found.timeline.makespan == found.bound == 1 + 8 * 12  # the busier lane never waits


def test_8_lanes_32_microbatches_idle_less_than_1_percent_within_their_own_spans():
    found = search([UNIT] * 8, 8, 32)
    assert found.is_optimal
    assert found.timeline.makespan == 3 * 32 + 7
    assert found.timeline.bubble_in_span < 0.01


def test_so_they_do_in_a_v_with_no_more_memory_than_1f1b():
    memory = Memory([0.5] * 16)
    found = search([UNIT] * 16, 8, 32, memory=memory, max_bytes=8)
    assert found.schedule.placement == named("zbv", lanes=8, microbatches=32).placement
    assert found.timeline.bubble_in_span < 0.01
    assert max(found.timeline.peak_memory) <= 8


def test_of_equal_ones_it_takes_what_keeps_least():
    found = search([UNIT] * 8, 8, 32)
    assert max(live(found.schedule).lanes) <= 15  # ZB-H2 keeps as many


def test_where_there_are_few_actions_it_shows_that_none_is_shorter():
    costs = [StageCost(3, 1, 1), StageCost(1, 2, 3), StageCost(2, 2, 1), StageCost(1, 3, 2)]
    hasty, found = search(costs, 4, 6, effort=0), search(costs, 4, 6)
    assert not hasty.is_optimal
    assert found.is_optimal
    assert hasty.bound < found.bound == found.timeline.makespan <= hasty.timeline.makespan


# ------------------------------------------------------------------------------------- checkpoints


def test_a_bound_counts_of_checkpointed_micro_batches_what_the_timeline_counts():
    """Six inputs and one micro-batch that is computed again, 16 bytes, leave room for all of GPipe:
    so the bound costs no time."""
    memory = Memory([10, 10], checkpointed=6, inputs=1)
    costs = [StageCost(1, 2)] * 2
    found = search(costs, 2, 6, memory=memory, max_bytes=16)
    assert found.timeline.makespan == search(costs, 2, 6).timeline.makespan
    assert max(found.timeline.peak_memory) <= 16


def test_inputs_that_are_larger_than_activations_count_as_what_they_are():
    memory = Memory([1, 1], checkpointed=4, inputs=3)
    found = search([StageCost(1, 2)] * 2, 2, 4, memory=memory, max_bytes=4)
    assert found.timeline.peak_memory == (4, 4), "one micro-batch at a time"


@given(
    costs(4),
    st.lists(st.integers(1, 4), min_size=4, max_size=4),
    st.lists(st.integers(0, 4), min_size=4, max_size=4),
    st.integers(1, 5),
    st.integers(0, 5) | st.lists(st.integers(0, 5), min_size=4, max_size=4),
    st.integers(0, 9),
    st.sampled_from([0.0, 0.5]),
)
@settings(deadline=None, max_examples=20)
def test_what_is_found_keeps_within_the_room_or_there_is_none(
    costs, sizes, inputs, microbatches, checkpointed, more, released
):
    memory = Memory(sizes, 7, released, checkpointed, inputs)
    alone = problem(costs, (0, 1, 1, 0), microbatches, memory=memory)
    least = 7 + max(alone.largest(own) for own in alone.own)
    options = {"placement": (0, 1, 1, 0), "memory": memory, "effort": 20}
    found = search(costs, 2, microbatches, max_bytes=least + more, **options)
    validate(found.schedule)
    assert max(found.timeline.peak_memory) <= least + more
    with pytest.raises(ValueError, match="one micro-batch needs"):
        search(costs, 2, microbatches, max_bytes=least - 0.5, **options)


# ---------------------------------------------------------------------------------- what it gives


def test_the_same_arguments_give_the_same_schedule():
    costs = [StageCost(1 + i % 3, 1 + i % 2, 0.7) for i in range(6)]
    links = Links(link=Link(0.3))
    assert auto(costs, 3, 6, links=links) == search(costs, 3, 6, links=links).schedule


def test_it_is_named_auto():
    found = search([UNIT] * 2, 2, 2)
    assert found.schedule.name == found.timeline.name == "auto"


def test_halves_that_follow_each_other_are_one_whole():
    schedule = auto([UNIT], 1, 3)
    assert {action.kind for action in schedule.actions(0)} == {Kind.FORWARD, Kind.BACKWARD}


def test_stages_that_can_put_nothing_off_have_whole_backwards():
    schedule = auto([StageCost(1, 2), StageCost(1, 2), StageCost(1, 2)], 3, 4)
    kinds = {action.kind for lane in range(3) for action in schedule.actions(lane)}
    assert kinds == {Kind.FORWARD, Kind.BACKWARD}


def test_halves_are_not_taken_where_they_cost_too_much():
    costs = [StageCost(1, 5, 5, backward=2)] * 3
    schedule = auto(costs, 3, 4)
    kinds = {action.kind for lane in range(3) for action in schedule.actions(lane)}
    assert kinds == {Kind.FORWARD, Kind.BACKWARD}


def test_a_placement_is_kept():
    assert auto([UNIT] * 4, 2, 4, placement=(0, 1, 1, 0)).placement == (0, 1, 1, 0)
    assert auto([UNIT] * 3, 2, 4, placement=(0, 0, 1)).placement == (0, 0, 1)


def test_skips_are_counted():
    edges = [Edge(0, 1), Edge(1, 2), Edge(0, 2, bytes=5)]
    links = Links(edges, Link(bandwidth=1))
    found = search([UNIT] * 3, 3, 6, links=links)
    assert found.timeline.makespan <= best_named([UNIT] * 3, 3, 6, links)
    assert any(copy.bytes == 5 for copy in found.timeline.transfers)


# -------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "lanes, microbatches, options, message",
    [
        (0, 1, {}, "lanes is 0: give 1 or more"),
        (2, 0, {}, "microbatches is 0: give 1 or more"),
        (2, 1, {"effort": -1}, "effort is -1: give 0 or more"),
        (3, 1, {}, "costs are of 2 stages: give 3 or more, one for each lane"),
        (2, 1, {"placement": (0, 0)}, r"placement is \[0, 0\]: give the lane of each of 2 stages"),
        (2, 1, {"max_bytes": 3}, r"max_bytes needs memory=Memory\(activations=...\)"),
        (
            2,
            1,
            {"memory": Memory([4, 4], fixed=1), "max_bytes": 4},
            "lane 0 may keep 3 B of activations, and one micro-batch needs 4 B at its stages 0",
        ),
    ],
)
def test_numbers_that_do_not_fit(lanes, microbatches, options, message):
    with pytest.raises(ValueError, match=message):
        search([UNIT] * 2, lanes, microbatches, **options)
