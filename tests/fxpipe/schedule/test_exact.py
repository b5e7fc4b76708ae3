from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fxpipe.schedule import Link, Links, Memory, StageCost, simulate
from fxpipe.schedule.exact import shorter
from tests.fxpipe.schedule.problems import UNIT, best, costs, problem

NEVER, MANY = float("inf"), 100_000


def check(found):
    schedule, is_all = shorter(found, NEVER, MANY)
    assert is_all
    assert found.fits(found.kept(schedule))
    least = best(found)
    assert simulate(schedule, found.world.costs, found.world.links).makespan == pytest.approx(least)
    assert shorter(found, least, MANY) == (None, True)


@given(costs(2), st.sampled_from([NEVER, 2, 1]), st.sampled_from([0.0, 0.5]))
@settings(deadline=None, max_examples=8)
def test_two_lanes_against_all_schedules(costs, room, latency):
    """Of micro-batches in any order, too: that they may be taken in order is no restriction.

    No action is shorter than a copy, so copies do not wait for each other.
    """
    check(problem(costs, room=room, links=Links(link=Link(latency))))


@given(costs(3), st.sampled_from([(0, 1, 0), (0, 1, 1), (0, 0, 1)]))
@settings(deadline=None, max_examples=15)
def test_several_stages_a_lane_against_all_schedules(costs, placement):
    check(problem(costs, placement, microbatches=1))


@given(st.lists(st.tuples(*[st.integers(1, 4)] * 2), min_size=3, max_size=3))
@settings(deadline=None, max_examples=3)
def test_a_forward_is_put_off_that_would_take_the_room_of_another(costs):
    """Both micro-batches in stage 0 would leave no room for any in stage 2, on the same lane."""
    check(problem([StageCost(*cost) for cost in costs], (0, 1, 0), room=2))


@given(costs(2), st.sampled_from([3, 4, 5]), st.integers(0, 2))
@settings(deadline=None, max_examples=15)
def test_checkpointed_micro_batches_against_all_schedules(costs, room, inputs):
    """A backward takes room, too, for what it computes again: its second half may be put off so far
    that the first half of another has to wait."""
    memory = Memory([2, 2], checkpointed=2, inputs=min(inputs, room - 2))
    found = problem(costs, room=room, memory=memory)
    assert found.misfit() is None
    check(found)


@given(
    st.lists(st.tuples(*[st.integers(1, 4)] * 3), min_size=2, max_size=2),
    st.sampled_from([(2, 2), (2, 0), (0, 2)]),
    st.sampled_from([NEVER, 12, 17, 22, 100]),
    st.sampled_from([0.0, 0.5, 1.0]),
)
@settings(deadline=None, max_examples=20)
def test_recomputations_anywhere_ahead_of_their_backward_against_all_schedules(
    seconds, again, room, latency
):
    """Without a bound they are right ahead of it."""
    costs = [
        StageCost(forward, back, recompute=more, checkpointed=count)
        for (forward, back, more), count in zip(seconds, again, strict=True)
    ]
    memory = Memory([5, 10], checkpointed=again, inputs=1)
    links = Links(link=Link(latency))
    found = problem(costs, room=room, links=links, memory=memory)
    assume(found.misfit() is None)
    check(found)


@given(costs(2), st.sampled_from([NEVER, 12, 22, 100]))
@settings(deadline=None, max_examples=8)
def test_so_they_are_with_backwards_in_two_halves(costs, room):
    again = replace(costs[0], recompute=2.0, checkpointed=2)
    memory = Memory([10, 10], checkpointed=[2, 0], inputs=1)
    check(problem([again, StageCost(1, 2)], room=max(room, 20), memory=memory))


def test_that_none_is_shorter_is_not_said_where_only_some_micro_batches_are_recomputed():
    """They take longer than the others, which had better go first in some cases."""
    again = StageCost(1, 1, 1, recompute=1, checkpointed=1)
    for room in (NEVER, 100):
        found = problem([again] * 2, room=room, memory=Memory([2, 2], checkpointed=1))
        assert not shorter(found, NEVER, MANY)[1]


def test_that_none_is_shorter_is_not_said_where_the_last_micro_batch_had_better_go_first():
    """Only micro-batch 0 is checkpointed. While it is computed again, 1 has no room to be kept."""
    found = problem([UNIT] * 2, room=3, memory=Memory([2, 2], checkpointed=1))
    schedule, is_all = shorter(found, NEVER, MANY)
    assert found.fits(found.kept(schedule))
    assert not is_all


def test_nothing_is_found_where_nothing_is_shorter():
    found = problem([UNIT] * 3, microbatches=3)
    assert shorter(found, found.bound, MANY) == (None, True)


def test_it_gives_up():
    found = problem([UNIT] * 4, microbatches=8)
    assert shorter(found, found.bound * 1.01, 10) == (None, False)
