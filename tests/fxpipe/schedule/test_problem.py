from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.schedule import Edge, Link, Links, StageCost, named, simulate
from tests.fxpipe.schedule.problems import UNIT, costs, problem


def test_what_comes_before_and_after():
    links = Links([Edge(0, 1), Edge(1, 2), Edge(0, 2)], Link(latency=10))
    found = problem([StageCost(1, 2, 3), StageCost(4, 5, 6), StageCost(7, 8, 9)], links=links)
    assert found.before_forward == (0, 11, 25)
    # A copy, then the first half at stage 0 and its second; before it, the same at stage 1, where
    # the second half is hidden behind what follows the first.
    assert found.after_gradient == (0, 10 + 2 + 3, 10 + 5 + 15)
    assert found.after_forward == (10 + 4 + 10 + 7 + 38, 10 + 7 + 38, 8 + 30)


def test_the_bound_is_the_busiest_lane_after_its_first_input():
    found = problem([UNIT, UNIT, UNIT], microbatches=5)
    assert found.work == (15, 15, 15)
    assert found.bound == 2 + 15


def test_the_bound_is_a_microbatchs_way_where_that_is_longer():
    found = problem([StageCost(1, 1), StageCost(1, 1)], microbatches=1, links=Links(link=Link(5)))
    assert found.bound == 4 + 10


def test_whole_backwards_count_where_they_are_cheaper():
    found = problem([StageCost(1, 2, 2, backward=3)], microbatches=2)
    assert found.work == (8,)


@given(
    st.sampled_from(["gpipe", "1f1b", "looped_bfs", "zb_h1", "zbv", "interleaved_1f1b"]),
    st.integers(1, 6),
    costs(4),
    st.sampled_from([0, 1]),
)
@settings(deadline=None)
def test_no_named_schedule_beats_the_bound(name, microbatches, costs, latency):
    lanes = 2 if name in ("zbv", "interleaved_1f1b") else 4
    schedule, links = (
        named(name, lanes=lanes, microbatches=microbatches, stages=4),
        Links(link=Link(latency)),
    )
    bound = problem(costs, schedule.placement, microbatches, links).bound
    assert simulate(schedule, costs, links).makespan >= bound


def test_what_a_lane_needs_at_least():
    assert problem([UNIT] * 3, (0, 1, 0), room=2).misfit() is None
    assert problem([UNIT] * 3, (0, 1, 0), room=1).misfit() == (
        "lane 0 may keep 1 B of activations, and one micro-batch needs 2 B at its stages 0, 2: "
        "raise max_bytes, or make micro-batches smaller"
    )
