from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.schedule import (
    Action,
    Edge,
    Kind,
    Link,
    Links,
    Memory,
    Schedule,
    ScheduleError,
    StageCost,
    Transfer,
    WhileRunning,
    Workspace,
    named,
    simulate,
    validate,
)

UNIT = StageCost(1, 1, 1)


def starts(timeline):
    return {str(span): span.start for span in timeline.spans}


def equal(name, lanes, microbatches, stages=None):
    schedule = named(name, lanes=lanes, microbatches=microbatches, stages=stages)
    return simulate(schedule, [UNIT] * schedule.stages)


# ------------------------------------------------------------------------------------ by hand


def test_an_action_starts_when_its_lane_is_free_and_its_inputs_are_there():
    schedule = Schedule.from_text("0F0 0F1 0B0 0B1 \n 1F0 1B0 1F1 1B1")
    timeline = simulate(schedule, [StageCost(2, 1, 1), StageCost(3, 2, 2)])
    assert starts(timeline) == {
        "0F0": 0, "0F1": 2, "1F0": 2, "1B0": 5, "1F1": 9, "0B0": 9, "1B1": 12, "0B1": 16,
    }  # fmt: skip
    assert timeline.makespan == 18
    assert timeline.busy == (8, 14)
    assert timeline.own_spans == (18, 14)
    assert timeline.bubble == 1 - 22 / 36
    assert timeline.bubble_in_span == 1 - 22 / 32
    assert timeline.period == 18


def test_a_whole_backward_may_cost_less_than_its_halves():
    costs = [StageCost(1, 2, 2, backward=3)]
    assert simulate(Schedule.from_text("0F0 0B0"), costs).makespan == 4
    assert simulate(Schedule.from_text("0F0 0I0 0W0"), costs).makespan == 5


def test_what_is_given_once_is_waited_for_by_the_first_forward_and_goes_back_after_all_backwards():
    schedule = named("1f1b", lanes=2, microbatches=3)
    given = Links(once=[Edge(0, 1, 50, 20)], link=Link(bandwidth=10))
    timeline = simulate(schedule, [UNIT] * 2, given)
    there, back = timeline.transfers
    assert (there.source, there.target, there.start, there.end) == (0, 1, 0, 5)
    assert starts(timeline)["1F0"] == 5
    end = max(span.end for span in timeline.of_lane(1))
    assert (back.source, back.target, back.start, back.end) == (1, 0, end, end + 2)
    assert str(back) == "copy, once"
    same_lane = Schedule.from_text("0F0 1F0 1B0 0B0")
    assert not simulate(same_lane, [UNIT] * 2, given).transfers


def test_a_gradient_leaves_after_the_first_half():
    schedule = Schedule.from_text("0F0 0B0 \n 1F0 1I0 1W0")
    assert starts(simulate(schedule, [UNIT] * 2))["0B0"] == 3


def test_copies_delay_the_consumer_and_no_lane():
    schedule = Schedule.from_text("0F0 0F1 0B0 0B1 \n 1F0 1B0 1F1 1B1")
    links = Links([Edge(0, 1, bytes=10, gradient_bytes=40)], Link(latency=1, bandwidth=10))
    timeline = simulate(schedule, [UNIT] * 2, links)
    assert starts(timeline) == {
        "0F0": 0, "0F1": 1, "1F0": 3, "1B0": 4, "1F1": 6, "1B1": 7, "0B0": 11, "0B1": 16,
    }  # fmt: skip
    forward, backward = Action(0, Kind.FORWARD, 0), Action(1, Kind.BACKWARD, 0)
    assert timeline.transfers[0] == Transfer(0, 1, 1, 3, forward, 10)
    assert Transfer(1, 0, 6, 11, backward, 40) in timeline.transfers


def test_copies_between_two_lanes_go_one_after_the_other():
    schedule = Schedule.from_text("0F0 0F1 0B0 0B1 \n 1F0 1F1 1B0 1B1")
    timeline = simulate(schedule, [UNIT] * 2, Links(link=Link(latency=5)))
    assert [(t.start, t.end) for t in timeline.transfers[:2]] == [(1, 6), (6, 11)]
    assert starts(timeline)["1F1"] == 11


def test_each_way_has_its_own_link():
    schedule = Schedule.from_text("0F0 0B0 \n 1F0 1B0")
    links = Links(link=Link(latency=1), between={(1, 0): Link(latency=7)})
    assert starts(simulate(schedule, [UNIT] * 2, links)) == {
        "0F0": 0,
        "1F0": 2,
        "1B0": 3,
        "0B0": 12,
    }


def test_nothing_travels_between_stages_of_a_lane():
    schedule = Schedule.from_text("0F0 1F0 1B0 0B0")
    timeline = simulate(schedule, [UNIT] * 2, Links(link=Link(latency=100)))
    assert timeline.makespan == 6
    assert timeline.transfers == ()


def test_copies_that_do_not_overlap_take_the_receivers_time():
    schedule = Schedule.from_text("0F0 0F1 0B0 0B1 \n 1F0 1B0 1F1 1B1")
    links = Links([Edge(0, 1, bytes=10)], Link(bandwidth=10), overlaps=False)
    timeline = simulate(schedule, [UNIT] * 2, links)
    assert starts(timeline) == {
        "0F0": 0, "0F1": 1, "1F0": 1, "1B0": 3, "1F1": 5, "0B0": 5, "1B1": 7, "0B1": 9,
    }  # fmt: skip
    assert timeline.makespan == 12


def test_a_skip_travels_straight_and_delays_only_its_consumer():
    schedule = Schedule.from_text("0F0 0B0 \n 1F0 1B0 \n 2F0 2B0")
    edges = [Edge(0, 1), Edge(1, 2), Edge(0, 2, bytes=8)]
    timeline = simulate(schedule, [UNIT] * 3, Links(edges, Link(bandwidth=1)))
    assert starts(timeline) == {"0F0": 0, "1F0": 1, "2F0": 9, "2B0": 10, "1B0": 12, "0B0": 20}
    ways = [(t.source, t.target, t.start, t.end) for t in timeline.transfers]
    assert ways == [(0, 2, 1, 9), (2, 0, 12, 20)]


def test_overlapping_actions_run_one_after_the_other():
    plain = Schedule.from_text("0F0 0F1 0B0 0B1")
    paired = Schedule.from_text("0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    assert simulate(paired, [UNIT]).spans == simulate(plain, [UNIT]).spans


def test_actions_that_take_no_time():
    timeline = simulate(named("zbv", lanes=2, microbatches=4), [StageCost(0, 0)] * 4)
    assert (timeline.makespan, timeline.bubble, timeline.bubble_in_span) == (0, 0, 0)


def test_memory_over_time():
    schedule = Schedule.from_text("0F0 0F1 0I0 0W0 0B1")
    memory = Memory([100], fixed=7, released_by_input=0.25)
    timeline = simulate(schedule, [UNIT], memory=memory)
    assert timeline.memory == (((0, 7), (0, 107), (1, 207), (3, 182), (4, 107), (6, 7)),)
    assert timeline.peak_memory == (207,)


def test_memory_of_checkpointed_micro_batches_is_their_inputs_but_for_their_backward():
    schedule = Schedule.from_text("0F0 0F1 0B0 0B1")
    memory = Memory([100], fixed=7, checkpointed=1, inputs=10)
    # UNIT takes 1 for a forward, 2 for a backward: the first, from 2 to 4, has all again.
    (held,) = simulate(schedule, [UNIT], memory=memory).memory
    assert held == ((0, 7), (0, 17), (1, 117), (2, 217), (4, 107), (6, 7))


def test_each_stage_may_have_its_own_number_of_checkpointed_micro_batches():
    schedule = Schedule.from_text("0F0 0F1 0B0 0B1 \n 1F0 1F1 1B0 1B1")
    apart = [Memory([100, 100], checkpointed=n, inputs=10) for n in (2, 0)]
    both = Memory([100, 100], checkpointed=[2, 0], inputs=10)
    first, last = simulate(schedule, [UNIT] * 2, memory=both).memory
    assert first == simulate(schedule, [UNIT] * 2, memory=apart[0]).memory[0]
    assert last == simulate(schedule, [UNIT] * 2, memory=apart[1]).memory[1]


def test_what_the_loss_saves_is_held_from_the_forward_of_the_last_stage_to_its_backward():
    schedule = Schedule.from_text("0F0 0F1 0B0 0B1 \n 1F0 1B0 1F1 1I1 1W1")
    memory = Memory([100, 100], fixed=7, checkpointed=1, inputs=10, loss=5, shared_with_loss=2)
    first, last = simulate(schedule, [UNIT] * 2, memory=memory).memory
    assert [held for _, held in first] == [7, 17, 117, 217, 107, 7], "no loss"
    # The second micro-batch keeps its activations, among them 2 of the 5 that the loss saves.
    assert [held for _, held in last] == [7, 22, 117, 7, 110, 107, 7]


def test_memory_of_a_checkpointed_backward_in_two_halves():
    schedule = Schedule.from_text("0F0 0I0 0F1 0W0 0B1")
    memory = Memory([100], released_by_input=0.25, checkpointed=2, inputs=10)
    (held,) = simulate(schedule, [UNIT], memory=memory).memory
    # I ends with a quarter of the activations free, and the inputs; W with the rest.
    assert [amount for _, amount in held] == [0, 10, 110, 75, 85, 10, 110, 0]


# ------------------------------------------------------------------------------- against formulas


@given(st.integers(1, 8), st.integers(1, 32))
@settings(deadline=None)
def test_1f1b_and_gpipe_idle_as_their_formula_says(lanes, microbatches):
    for name in ("1f1b", "gpipe"):
        bubble = equal(name, lanes, microbatches).bubble
        assert bubble == pytest.approx((lanes - 1) / (microbatches + lanes - 1))


@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 4))
@settings(deadline=None)
def test_interleaving_divides_the_idle_time_by_the_stages_of_a_lane(lanes, rounds, per_lane):
    timeline = equal("interleaved_1f1b", lanes, rounds * lanes, lanes * per_lane)
    idle = timeline.makespan - timeline.busy[0]
    assert idle == pytest.approx(3 * (lanes - 1))  # of a stage, which is a part of the lane's work
    assert timeline.busy[0] == 3 * rounds * lanes * per_lane


@given(st.integers(2, 8), st.integers(0, 24))
@settings(deadline=None)
def test_zb_h1_leaves_a_third_of_1f1bs_idle_time(lanes, more):
    microbatches = lanes + more
    whole, halved = (equal(name, lanes, microbatches) for name in ("1f1b", "zb_h1"))
    assert whole.makespan - whole.busy[0] == 3 * (lanes - 1)
    assert halved.makespan - halved.busy[0] == lanes - 1


@given(st.integers(1, 8), st.integers(0, 24))
@settings(deadline=None)
def test_zbv_never_idles_within_a_lanes_own_span(lanes, more):
    assert equal("zbv", lanes, 2 * lanes + more).bubble_in_span == pytest.approx(0)


@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zb_h1", "zbv"]),
    st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=4, max_size=4),
    st.integers(1, 6),
    st.integers(0, 3),
)
@settings(deadline=None)
def test_nothing_runs_before_its_inputs_are_there(name, costs, microbatches, latency):
    lanes = 4 if name in ("gpipe", "1f1b", "zb_h1") else 2
    schedule = named(name, lanes=lanes, microbatches=microbatches, stages=4)
    validate(schedule)
    timeline = simulate(schedule, [StageCost(*c) for c in costs], Links(link=Link(latency)))
    ends = {span.action: span.end for span in timeline.spans}
    place = schedule.placement

    def arrives(source, target, kind, i):
        way = latency if place[source] != place[target] else 0
        return ends[Action(source, kind, i)] + way

    for span in timeline.spans:
        stage, kind, i = span.action.stage, span.action.kind, span.action.microbatch
        if kind is Kind.FORWARD and stage:
            assert span.start >= arrives(stage - 1, stage, kind, i)
        if kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            assert span.start >= ends[Action(stage, Kind.FORWARD, i)]
            if stage < 3:
                assert span.start >= arrives(stage + 1, stage, kind, i)
        if kind is Kind.WEIGHT_GRAD:
            assert span.start >= ends[Action(stage, Kind.BACKWARD_INPUT, i)]
    for lane in range(lanes):
        own = timeline.of_lane(lane)
        assert [span.action for span in own] == list(schedule.actions(lane))
        assert all(a.end <= b.start for a, b in pairwise(own))


# ---------------------------------------------------------------------------------------- refusals


def test_a_schedule_that_cannot_run_is_refused():
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(Schedule.from_text("0B0 0F0"), [UNIT])


def test_numbers_that_do_not_fit():
    schedule = named("gpipe", lanes=2, microbatches=1)
    with pytest.raises(ValueError, match="costs of 3 stages are given: the schedule has 2"):
        simulate(schedule, [UNIT] * 3)
    with pytest.raises(ValueError, match="an edge goes from a stage to a later one, of 2"):
        simulate(schedule, [UNIT] * 2, Links([Edge(1, 0)]))
    with pytest.raises(ValueError, match="each stage: 1 numbers are given, 2 needed"):
        simulate(schedule, [UNIT] * 2, memory=Memory([1]))
    with pytest.raises(ValueError, match="give seconds, 0 or more"):
        StageCost(1, -1)


# ----------------------------------------------------------------- what waits in the host's memory


def offloading(seconds, line="0F0 0F1 0F2 0B2 0B1 0B0", memory=None):
    """The timeline of a stage that moves 1 byte of each micro-batch, which takes so long each way.
    A forward takes 1 second, a backward 2."""
    cost = StageCost(1, 1, 1, offloaded=1)
    links = Links(host={0: Link(latency=seconds)})
    return simulate(Schedule.from_text(line).reloading({0}), [cost], links, memory)


def moves(timeline):
    return [(str(copy), copy.start, copy.end) for copy in timeline.transfers]


def test_activations_move_beside_computation():
    timeline = offloading(1)
    assert moves(timeline) == [
        ("activations of 0F0, to the host", 1, 2),
        ("activations of 0F1, to the host", 2, 3),
        ("activations of 0R1, back from the host", 3, 4),
        ("activations of 0R0, back from the host", 5, 6),
    ]
    assert timeline.makespan == 3 + 6


def test_a_backward_waits_for_what_comes_back():
    # 0F1's activations are on the host after 7 s, and back after 10, when 0B1 begins.
    timeline = offloading(3)
    assert moves(timeline)[2] == ("activations of 0R1, back from the host", 7, 10)
    assert (timeline.spans[-2].action.microbatch, timeline.spans[-2].start) == (1, 10)


def test_each_tensor_is_a_copy_and_a_backward_begins_with_the_first_that_is_back():
    """Four tensors of a stage take half a second each, with the latency of the link."""
    cost = StageCost(1, 1, 1, offloaded=1, offloaded_tensors=4)
    links = Links(host={0: Link(latency=0.25, bandwidth=1.0)})
    timeline = simulate(Schedule.from_text("0F0 0R0 0B0"), [cost], links)
    assert moves(timeline) == [
        ("activations of 0F0, to the host", 1, 3),
        ("activations of 0R0, back from the host", 3, 5),
    ]
    backward = timeline.spans[-1]
    # The first tensor is back after 3.5 s. What is done with the last, after 5 s, takes 0.5 s.
    assert (backward.start, backward.end) == (3.5, 5.5)


def test_no_forward_begins_while_two_micro_batches_are_still_leaving():
    line = "0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0"
    starts = [span.start for span in offloading(3, line).spans if str(span)[1] == "F"]
    assert starts == [0, 1, 4, 7], "0F0 has left after 4 s, 0F1 after 7"


def test_what_comes_back_waits_until_what_leaves_has_left_since_it_is_given_its_memory():
    timeline = offloading(3, "0F0 0F1 0F2 0R0 0B0 0B1 0B2")
    # 0F2 begins after 4 s, when 0F0's are on the host, and its own are there after 10.
    assert moves(timeline)[2] == ("activations of 0F2, to the host", 7, 10)
    assert moves(timeline)[3] == ("activations of 0R0, back from the host", 10, 13)


def test_what_leaves_is_held_until_the_next_move_and_what_comes_from_the_reload_on():
    memory = Memory([1.0], checkpointed=3, offloaded={0})
    timeline = offloading(0.5, memory=memory)
    # 0F0's leave at 1, 0F1's at 2, when 0F0's are given up; 0F2 keeps its own from 2 on. At 3, when
    # 0F1's are given up, 0R1 begins to bring them back. Each backward gives up its own.
    held = ((0, 0), (1, 1), (2, 2), (3, 2), (5, 2), (7, 1), (9, 0))
    assert timeline.memory == (held,)
    assert timeline.host_memory == 2, "until their backward is done they have a place there"


def test_activations_that_do_not_move_are_held_as_always():
    memory = Memory([1.0], checkpointed=2, offloaded={0})
    assert offloading(1, "0F0 0F1 0B0 0B1", memory=memory).peak_memory == (2,)


# ------------------------------------------------------------------------------ the optimizer


def updates(timeline):
    """The lane, begin and end of each step of the optimizer."""
    return sorted((s.lane, s.start, s.end) for s in timeline.spans if s.action is None)


def test_a_lane_steps_the_parameters_of_a_stage_when_its_last_action_has_ended():
    schedule = named("gpipe", lanes=2, microbatches=2)
    costs = [StageCost(1, 1, 1, update=5), StageCost(1, 1, 1, update=3)]
    timeline = simulate(schedule, costs)
    assert updates(timeline) == [(0, 9, 14), (1, 7, 10)]
    assert {str(s) for s in timeline.spans if s.action is None} == {"optimizer"}
    assert timeline.makespan == 14


def test_the_actions_of_a_lanes_other_stage_wait_for_the_optimizer():
    """Lane 0 has the first stage and the last, whose backward comes first."""
    schedule = named("zbv", lanes=1, microbatches=1)
    timeline = simulate(schedule, [UNIT, StageCost(1, 1, 1, update=10)])
    assert updates(timeline) == [(0, 4, 14)]
    assert starts(timeline)["0I0"] == 14


def test_an_optimizer_needs_memory_while_it_steps():
    schedule = named("zbv", lanes=1, microbatches=1)
    costs = [StageCost(1, 1, 1, update=2), StageCost(1, 1, 1, update=3)]
    nothing = [Workspace()] * 2
    memory = Memory([10, 10], 100, running=WhileRunning(nothing, updating=[7.0, 70.0]))
    (held,) = simulate(schedule, costs, memory=memory).memory
    assert held[-4:] == ((4, 180), (7, 110), (9, 107), (11, 100))


@pytest.mark.parametrize("update", [-1.0, float("inf")])
def test_the_time_of_an_optimizer_is_some_seconds(update):
    with pytest.raises(ValueError, match="give seconds, 0 or more"):
        StageCost(1, 1, update=update)


@pytest.mark.parametrize("schedule, backward", [("gpipe", 4), ("zb_h1", 3)])
def test_the_last_stage_computes_the_loss_behind_its_forward_and_ahead_of_its_backward(
    schedule, backward
):
    """::

    lane 0   F0 ..............................................  B0
    lane 1      F0 (2) loss (5) loss backward (3) B0 or I0, W0
    """
    order = named(schedule, lanes=2, microbatches=1)
    costs = [StageCost(1, 1, 1), StageCost(2, 3, 1, loss=5, loss_backward=3)]
    found = [(str(s), s.start, s.end) for s in simulate(order, costs).of_lane(1)]
    assert found[:4] == [
        ("1F0", 1, 3),
        ("loss", 3, 8),
        ("loss backward", 8, 11),
        ("1B0" if backward == 4 else "1I0", 11, 11 + backward),
    ]


def test_what_is_run_again_comes_between_the_loss_and_its_backward():
    costs = [UNIT, StageCost(1, 1, 1, recompute=4, checkpointed=1, loss=1, loss_backward=2)]
    timeline = simulate(named("gpipe", lanes=2, microbatches=1), costs)
    assert [s.seconds for s in timeline.of_lane(1)] == [1, 1, 4, 2, 2]
    assert [str(s) for s in timeline.of_lane(1)] == ["1F0", "loss", "1R0", "loss backward", "1B0"]
