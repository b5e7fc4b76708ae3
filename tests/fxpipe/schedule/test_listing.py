from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.schedule import Link, Links, StageCost, named, simulate, validate
from fxpipe.schedule.listing import Rule, list_schedule, rules
from tests.fxpipe.schedule.problems import UNIT, costs, problem


def listed(found, room, **rule):
    given_rule = {"forward_first": False, "deep_first": True, "patience": 0.0, "halves": True}
    return list_schedule(found, Rule(room, **{**given_rule, **rule}))


def test_room_for_as_many_as_1f1b_keeps_and_whole_backwards_give_1f1b():
    schedule = listed(problem([UNIT] * 3, microbatches=5), (3, 2, 1), halves=False)
    assert schedule.lanes == named("1f1b", lanes=3, microbatches=5).lanes


def test_without_a_bound_forwards_first_is_gpipe():
    found = problem([UNIT] * 3, microbatches=4)
    schedule = listed(found, found.room, forward_first=True, halves=False)
    assert schedule.lanes == named("gpipe", lanes=3, microbatches=4).lanes


def test_weight_gradients_fill_what_would_be_idle():
    schedule = listed(problem([UNIT] * 2, microbatches=3), (3, 3))
    assert_expected_inline(
        schedule.text(),
        """\
lane 0 | 0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2  .
lane 1 |  .  1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2""",
    )


def test_a_lane_waits_for_what_is_worth_it():
    """Stage 1 is done with micro-batch 0 when stage 0 has just begun nothing else: the gradient
    comes one second later, and a weight gradient would take ten."""
    found = problem([StageCost(2, 2, 10), StageCost(1, 3, 1)], microbatches=2)
    hasty, patient = (listed(found, found.room, patience=p) for p in (0.0, 1.0))
    at = [[str(a) for a in s.lanes[0]] for s in (hasty, patient)]
    assert at[0] == ["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"]
    assert at[1] == ["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"]


@given(
    costs(4),
    st.sampled_from([(0, 1, 2, 3), (0, 1, 1, 0), (0, 1, 0, 1), (0, 0, 1, 1), (0, 0, 1, 0)]),
    st.integers(1, 6),
    st.integers(0, 3),
    st.sampled_from([0.0, 2.0]),
    st.sampled_from([0.0, 0.5]),
)
@settings(deadline=None, max_examples=30)
def test_every_rule_gives_a_schedule_that_runs_within_the_least_room(
    costs, placement, microbatches, more, latency, released
):
    links = Links(link=Link(latency))
    needed = max(placement.count(lane) for lane in placement)
    found = problem(costs, placement, microbatches, links, needed + more, released)
    for rule in rules(found):
        schedule = list_schedule(found, rule)
        validate(schedule, max_live_in_lane=needed + more, released_by_input=released)
        simulate(schedule, costs, links)
