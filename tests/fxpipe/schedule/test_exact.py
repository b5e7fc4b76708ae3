import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.schedule import Link, Links, Memory, StageCost, simulate, validate
from fxpipe.schedule.exact import shorter
from tests.fxpipe.schedule.problems import UNIT, all_schedules, costs, problem

NEVER, MANY = float("inf"), 100_000


def best(found):
    """The least makespan of all the schedules that there are."""
    links = found.world.links
    return min(
        simulate(schedule, found.world.costs, links).makespan
        for schedule in all_schedules(found)
        if found.fits(found.kept(schedule)) and runs(schedule)
    )


def runs(schedule):
    try:
        validate(schedule)
    except ValueError:
        return False
    return True


def check(found):
    schedule, is_all = shorter(found, NEVER, MANY)
    assert is_all
    assert found.fits(found.kept(schedule))
    least = best(found)
    assert simulate(schedule, found.world.costs, found.world.links).makespan == pytest.approx(least)
    assert shorter(found, least, MANY) == (None, True)


@given(costs(2), st.sampled_from([NEVER, 2, 1]), st.sampled_from([0.0, 0.5]))
@settings(deadline=None, max_examples=15)
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
@settings(deadline=None, max_examples=5)
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
