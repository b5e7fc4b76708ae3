"""Recomputations and forwards that are placed in the idle time of lanes."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.schedule import (
    Kind,
    Link,
    Links,
    Memory,
    Schedule,
    StageCost,
    named,
    peaks,
    search,
    simulate,
    validate,
)
from fxpipe.schedule.listing import list_schedule, rules
from fxpipe.schedule.placing import filled, placed
from tests.fxpipe.schedule.problems import best, problem

# The lanes of the picture in fxpipe/schedule/placing.py: stage 0 is recomputed, stage 1 is not.
COSTS = [StageCost(1, 2, recompute=1, checkpointed=2), StageCost(1, 2)]
GPIPE = Schedule.from_text("0F0 0F1 0B0 0B1 \n 1F0 1F1 1B0 1B1")


def kept(checkpointed, inputs=1.0):
    """Each stage keeps 10 of a micro-batch, and ``inputs`` if it is checkpointed."""
    return Memory([10.0] * len(checkpointed), checkpointed=checkpointed, inputs=inputs)


def starts(timeline):
    return {str(span): span.start for span in timeline.spans}


# ------------------------------------------------------------------------------------ by hand


def test_a_lane_that_waits_recomputes_a_further_micro_batch():
    """Lane 0 has time from 3 on, and the gradient of 1B0 comes at 5. So 0B1 begins at 7, when its
    gradient arrives, and not at 8, after a recomputation from 7 on."""
    found = problem(COSTS, memory=kept([2, 0]), room=22)
    assert starts(simulate(GPIPE, COSTS))["0R1"] == 7
    schedule = placed(found, GPIPE)
    assert_expected_inline(
        schedule.text(),
        """\
lane 0 | 0F0 0F1 0R0 0R1 0B0 0B1
lane 1 |  .  1F0 1F1 1B0 1B1  .""",
    )
    assert starts(simulate(schedule, COSTS)) == {
        "0F0": 0, "0F1": 1, "0R0": 2, "0R1": 3, "0B0": 5, "0B1": 7,
        "1F0": 1, "1F1": 2, "1B0": 3, "1B1": 5,
    }  # fmt: skip
    assert peaks(schedule, kept([2, 0])).lanes == (22, 20)


def test_it_does_not_where_its_activations_have_no_room():
    """Two inputs and the activations of one micro-batch are 12, those of two 22."""
    found = problem(COSTS, memory=kept([2, 0]), room=21)
    assert placed(found, GPIPE).lanes == GPIPE.lanes


def test_a_forward_is_done_ahead_in_the_room_that_checkpoints_free():
    """1F1B's first lane begins two micro-batches ahead of the first backward. It has room for the
    inputs of a third, which it does while it waits for the gradient of 1B0."""
    costs = [StageCost(1, 2, recompute=1, checkpointed=3), StageCost(1, 2)]
    one_f_one_b = named("1f1b", lanes=2, microbatches=3)
    found = problem(costs, microbatches=3, memory=kept([3, 0]), room=20)
    assert_expected_inline(
        placed(found, one_f_one_b).text(),
        """\
lane 0 | 0F0 0F1 0R0 0F2 0B0 0B1  .  0B2
lane 1 |  .  1F0 1B0 1F1 1B1 1F2 1B2  .""",
    )


def test_without_a_bound_recomputations_stay_right_ahead_of_their_backward():
    """Nobody knows how much memory there is to spare."""
    for found in (problem(COSTS), problem(COSTS, memory=kept([2, 0]))):
        assert found.movable == (0, 0)
    assert problem(COSTS, memory=kept([2, 0]), room=22).movable == (2, 0)


def test_a_schedule_says_only_what_does_not_happen_anyway():
    found = problem(COSTS, memory=kept([2, 0]), room=22)
    every = filled(found, GPIPE)
    assert " ".join(map(str, every.actions(0))) == "0F0 0F1 0R0 0B0 0R1 0B1"
    own = Schedule.from_text("0F0 0R0 0F1 0R1 0B0 0B1 \n 1F0 1F1 1B0 1B1")
    assert placed(found, own).lanes == own.lanes
    one, line = problem(COSTS[:1], memory=kept([2]), room=22), "0F0 0R0 0B0 0F1 0R1 0B1"
    said = placed(one, Schedule.from_text(line)).actions(0)
    assert " ".join(map(str, said)) == "0F0 0B0 0F1 0B1"


# ------------------------------------------------------------------------------------ in general


@st.composite
def recomputing(draw):
    """A problem of which some stages are recomputed, and whose lanes have a bound."""
    stages, microbatches = draw(st.sampled_from([(2, 2), (2, 3), (2, 5), (3, 3), (4, 3)]))
    placements = {2: [(0, 1)], 3: [(0, 1, 2), (0, 1, 0)], 4: [(0, 1, 1, 0), (0, 1, 0, 1)]}
    placement = draw(st.sampled_from(placements[stages]))
    again = draw(st.lists(st.integers(0, microbatches), min_size=stages, max_size=stages))
    sizes = st.integers(1, 4)
    costs = [
        StageCost(draw(sizes), draw(sizes), draw(st.integers(0, 4)), None, draw(sizes), count)
        for count in again
    ]
    links = Links(link=Link(draw(st.sampled_from([0.0, 0.5, 2.0]))))
    memory = Memory(
        [draw(sizes) * 4.0 for _ in costs],
        released_by_input=draw(st.sampled_from([0.0, 0.5])),
        checkpointed=again,
        inputs=1.0,
        loss=draw(st.sampled_from([0.0, 3.0])),
    )
    alone = problem(costs, placement, microbatches, links, memory=memory)
    least = max(alone.largest(own) for own in alone.own)
    room = least + draw(st.sampled_from([0, 1, 5, 12, 100]))
    return problem(costs, placement, microbatches, links, room, memory=memory)


def options(found):
    return {
        "placement": found.world.placement,
        "links": found.world.links,
        "memory": found.memory,
        "max_bytes": found.room,
        "effort": 20,
    }


@given(recomputing())
@settings(deadline=None, max_examples=40)
def test_what_is_placed_runs_keeps_within_the_room_and_has_the_same_actions(found):
    for rule in rules(found):
        schedule = list_schedule(found, rule)
        if schedule is None:
            continue
        other = placed(found, schedule)
        validate(other)
        assert found.fits(found.kept(other))
        for lane in range(found.lanes):
            own = [a for a in other.actions(lane) if a.kind is not Kind.RECOMPUTE]
            assert sorted(own) == sorted(schedule.actions(lane))


@given(recomputing())
@settings(deadline=None, max_examples=20)
def test_recomputations_that_are_right_ahead_of_their_backward_change_no_prediction(found):
    for rule in rules(found):
        schedule = list_schedule(found, rule)
        if schedule is not None:
            every = filled(found, schedule)
            assert found.kept(every) == pytest.approx(found.kept(schedule))
            before, after = (
                simulate(each, found.world.costs, found.world.links) for each in (schedule, every)
            )
            assert starts(before) == starts(after)


@given(
    st.lists(st.tuples(*[st.integers(1, 4)] * 3), min_size=2, max_size=2),
    st.sampled_from([(2, 2), (2, 0), (0, 2)]),
    st.sampled_from([12, 22, 40]),
    st.sampled_from([0.0, 0.5]),
)
@settings(deadline=None, max_examples=15)
def test_of_few_actions_the_search_finds_the_best_of_all_orders(seconds, again, room, latency):
    """Of recomputations at any place ahead of their backward, too."""
    costs = [
        StageCost(forward, back, recompute=more, checkpointed=count)
        for (forward, back, more), count in zip(seconds, again, strict=True)
    ]
    memory, links = kept(again), Links(link=Link(latency))
    small = problem(costs, room=room, links=links, memory=memory)
    found = search(costs, 2, 2, **options(small))
    assert found.is_optimal
    assert found.timeline.makespan == pytest.approx(best(small))


@given(recomputing())
@settings(deadline=None, max_examples=15)
def test_a_step_is_never_longer_than_with_recomputations_where_they_come_anyway(found):
    costs, lanes, count = found.world.costs, found.lanes, found.microbatches
    result = search(costs, lanes, count, **options(found))
    without = search(costs, lanes, count, **options(found), moves_recomputations=False)
    assert result.timeline.makespan <= without.timeline.makespan * (1 + 1e-9)
    for each in (result, without):
        validate(each.schedule)
        assert max(each.timeline.peak_memory) <= found.room[0] * (1 + 1e-9)
        assert each.bound <= each.timeline.makespan * (1 + 1e-9)
        again = simulate(each.schedule, costs, found.world.links)
        assert again.makespan == each.timeline.makespan
    assert not any(
        action.kind is Kind.RECOMPUTE
        for lane in range(lanes)
        for action in without.schedule.actions(lane)
    )
