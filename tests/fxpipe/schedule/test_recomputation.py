"""Recomputations in schedules: how they are read, checked, simulated, and counted as memory."""

from __future__ import annotations

from itertools import product

import pytest

from fxpipe.schedule import (
    Kind,
    Link,
    Links,
    Memory,
    Schedule,
    ScheduleError,
    StageCost,
    auto,
    named,
    peaks,
    search,
    simulate,
    validate,
)
from fxpipe.schedule.recomputation import with_recomputations, without_needless

TWO = "0F0 0F1 0R0 0B0 0B1 \n 1F0 1B0 1F1 1B1"


def starts(timeline):
    return {str(span): span.start for span in timeline.spans}


def again(forward=1.0, checkpointed=9):
    return StageCost(forward, forward, forward, recompute=forward, checkpointed=checkpointed)


# ------------------------------------------------------------------------------------ as data


def test_a_recomputation_is_read_and_written(tmp_path):
    schedule = Schedule.from_text(TWO)
    assert "0R0" in schedule.text()
    assert Schedule.from_text(schedule.text()).lanes == schedule.lanes
    schedule.to_csv(tmp_path / "s.csv")
    assert Schedule.from_csv(tmp_path / "s.csv").lanes == schedule.lanes


def test_a_file_for_torch_has_none(tmp_path):
    schedule = Schedule.from_text("0F0 0R0 0B0 0F1 (0R1;0B1)OVERLAP_F_B")
    schedule.to_csv(tmp_path / "s.csv", recomputations=False)
    assert (
        Schedule.from_csv(tmp_path / "s.csv").lanes == Schedule.from_text("0F0 0B0 0F1 0B1").lanes
    )


def test_a_recomputation_may_be_left_out_of_any_micro_batch():
    validate(Schedule.from_text(TWO))
    validate(Schedule.from_text("0F0 0F1 0R1 0B0 0B1"))
    validate(Schedule.from_text("0F0 0R0 0I0 0W0"))


@pytest.mark.parametrize(
    "text, message",
    [
        ("0F0 0R0 0R0 0B0", "0R0 comes twice"),
        ("0R0 0F0 0B0", r"lane 0 waits, at position 0 \(0R0\), for 0F0, which is at position 1"),
        ("0F0 0B0 0R0", r"lane 0 waits, at position 1 \(0B0\), for 0R0, which is at position 2"),
        ("0F0 0I0 0R0 0W0", r"lane 0 waits, at position 1 \(0I0\), for 0R0"),
        ("0F0 0B0 0F1 0B1 \n 0R1", "stage 0 is in two lanes"),
        ("0F0 0R0", "the backward is missing"),
    ],
)
def test_a_recomputation_comes_once_between_its_forward_and_its_backward(text, message):
    with pytest.raises(ScheduleError, match=message):
        validate(Schedule.from_text(text))


def test_the_last_of_the_first_micro_batches_may_keep_its_activations():
    schedule = Schedule.from_text("0F0 0F1 0F2 0R0 0R1 0R2 0B0 0B1 0B2")
    assert schedule.first(3) is schedule
    assert schedule.first(2).lanes == Schedule.from_text("0F0 0F1 0R0 0B0 0B1").lanes


def test_what_a_schedule_lacks_comes_right_ahead_of_the_backward():
    schedule = Schedule.from_text("0F0 0F1 0R1 0I0 0W0 0B1 0F2 0B2")
    found = " ".join(map(str, with_recomputations(schedule.actions(0), [2])))
    assert found == "0F0 0F1 0R1 0R0 0I0 0W0 0B1 0F2 0B2"


@pytest.mark.parametrize(
    "line, said",
    [
        ("0F0 0R0 0B0", "0F0 0B0"),
        ("0F0 0F1 0R0 0R1 0B0 0B1", "0F0 0F1 0R0 0R1 0B0 0B1"),
        ("0F0 0F1 0R1 0R0 0I0 0I1", "0F0 0F1 0R1 0I0 0I1"),
        ("0F0 0B0 0R0", "0F0 0B0"),
    ],
)
def test_what_is_right_ahead_of_the_backward_or_behind_it_need_not_be_said(line, said):
    actions = list(Schedule.from_text(line).actions(0))
    assert " ".join(map(str, without_needless(actions))) == said


def test_recomputations_of_other_modes_are_left_out():
    schedule = Schedule.from_text("0F0 0F1 0R0 0R1 0B0 (0F2;0B1)OVERLAP_F_B 0R2 0B2 \n 1F0 1R0 1B0")
    other = Schedule.from_text("0F0 0F1 0R0 0R1 0B0 (0F2;0B1)OVERLAP_F_B 0B2 \n 1F0 1B0")
    assert schedule.recomputing([2, 0]).lanes == other.lanes


# ------------------------------------------------------------------------------------ in time


@pytest.mark.parametrize("text", [TWO.replace(" 0R0", ""), TWO])
def test_a_recomputation_runs_while_the_gradient_is_made(text):
    timeline = simulate(Schedule.from_text(text), [again(), StageCost(1, 2, 2)])
    assert starts(timeline) == {
        "0F0": 0, "0F1": 1, "0R0": 2, "0B0": 6, "0R1": 8, "0B1": 11,
        "1F0": 1, "1B0": 2, "1F1": 6, "1B1": 7,
    }  # fmt: skip


def test_it_may_be_earlier_than_that():
    schedule = Schedule.from_text("0F0 0F1 0R0 0R1 0B0 0B1 \n 1F0 1B0 1F1 1B1")
    timeline = simulate(schedule, [again(), StageCost(1, 2, 2)])
    assert starts(timeline)["0R1"] == 3
    assert starts(timeline)["0B1"] == 11


def test_only_checkpointed_micro_batches_are_run_again():
    timeline = simulate(named("gpipe", lanes=1, microbatches=3), [again(checkpointed=2)])
    found = [str(s) for s in timeline.spans]
    assert found == ["0F0", "0F1", "0F2", "0R0", "0B0", "0R1", "0B1", "0B2"]
    assert timeline.makespan == 3 + 6 + 2


def test_it_takes_no_time_to_receive_anything():
    links = Links(link=Link(latency=1.0), overlaps=False)
    timeline = simulate(Schedule.from_text("0F0 0R0 0B0 \n 1F0 1R0 1B0"), [again()] * 2, links)
    seconds = {str(span): span.seconds for span in timeline.spans}
    assert (seconds["0R0"], seconds["1R0"], seconds["0B0"]) == (1, 1, 3)


def test_it_is_drawn_with_a_meaning_of_its_own():
    schedule = Schedule.from_text(TWO)
    drawn = simulate(schedule, [again()] * 2).draw()
    assert "recomputation" in drawn and "<title>0R0" in drawn
    assert "recomputation" not in simulate(schedule.first(1), [StageCost(1, 1)] * 2).draw()


# ----------------------------------------------------------------------------------- in memory


@pytest.mark.parametrize(
    "text, most",
    [
        ("0F0 0F1 0B0 0B1", 10 + 10 + 95),
        ("0F0 0F1 0R0 0B0 0R1 0B1", 10 + 10 + 95),
        ("0F0 0R0 0F1 0B0 0B1", 10 + 10 + 95),
        ("0F0 0F1 0R0 0R1 0B0 0B1", 10 + 10 + 95 + 95),
        ("0F0 0F1 0R1 0B0 0B1", 10 + 10 + 95 + 95),
    ],
)
def test_activations_are_held_from_the_recomputation_on(text, most):
    memory = Memory([100], checkpointed=2, inputs=10, kept_inputs=5)
    schedule = Schedule.from_text(text)
    assert peaks(schedule, memory).lanes == (most,)
    timeline = simulate(schedule, [again()], memory=memory)
    assert timeline.peak_memory == (most,) and timeline.memory[0][-1][1] == 0


def test_while_it_waits_for_the_gradient_the_activations_are_there():
    memory = Memory([100, 1], checkpointed=[1, 0], inputs=10)
    timeline = simulate(
        Schedule.from_text("0F0 0B0 \n 1F0 1B0"), [again(), StageCost(1, 4)], memory=memory
    )
    assert timeline.memory[0] == ((0.0, 0.0), (0.0, 10.0), (1.0, 110.0), (8.0, 0.0))


def test_the_loss_is_freed_ahead_of_the_recomputation():
    memory = Memory([100], checkpointed=2, inputs=10, loss=50, shared_with_loss=20)
    for text in ("0F0 0B0", "0F0 0R0 0B0"):
        assert peaks(Schedule.from_text(text), memory).lanes == (110,)


@pytest.mark.parametrize(
    "text, most",
    [
        ("0F0 0F1 0B0 0B1", 10 + 10 + 35),
        ("0F0 0F1 0I0 0W0 0I1 0W1", 10 + 10 + 95),
        ("0F0 0F1 0I0 0I1 0W0 0W1", 10 + 10 + 95 + 90),
    ],
)
def test_of_segments_the_activations_of_one_are_there_unless_gradients_of_weights_are_put_off(
    text, most
):
    memory = Memory([100], checkpointed=2, inputs=10, kept_inputs=5, recomputed=[40])
    schedule = Schedule.from_text(text)
    assert peaks(schedule, memory).lanes == (most,)
    timeline = simulate(schedule, [again()], memory=memory)
    assert timeline.peak_memory == (most,) and timeline.memory[0][-1][1] == 0


def test_a_micro_batch_that_is_not_checkpointed_goes_through_segments_as_if_they_were_one():
    memory = Memory([100], checkpointed=1, inputs=10, recomputed=[40])
    assert peaks(Schedule.from_text("0F0 0F1 0B1 0B0"), memory).lanes == (10 + 100,)
    assert peaks(Schedule.from_text("0F0 0F1 0B0 0B1"), memory).lanes == (10 + 40 + 100,)


# ----------------------------------------------------------------------------------- the search


def test_a_bound_holds_though_recomputations_run_ahead():
    costs = [again(), again(2.0), again()]
    for schedule, latency in product(("gpipe", "1f1b", "zb_h1"), (0.0, 0.5)):
        links = Links(link=Link(latency=latency))
        found = search(costs, 3, 4, placement=(0, 1, 2), links=links)
        order = named(schedule, lanes=3, microbatches=4)
        timeline = simulate(order, costs, links)
        assert found.bound <= found.timeline.makespan <= timeline.makespan
        assert found.timeline.makespan == simulate(found.schedule, costs, links).makespan


def test_the_search_keeps_within_its_memory_with_recomputations():
    memory = Memory([10.0] * 3, checkpointed=4, inputs=1.0)
    schedule = auto([again()] * 3, 3, 4, placement=(0, 1, 2), memory=memory, max_bytes=13.0)
    assert max(peaks(schedule, memory).lanes) <= 13
    assert Kind.FORWARD in {action.kind for action in schedule.actions(0)}


# ----------------------------------------------------------------- what waits in the host's memory


def test_activations_come_back_an_action_ahead_of_their_backward():
    given = Schedule.from_text("0F0 0F1 0F2 0B2 0B1 0B0")
    found = given.reloading({0})
    assert found == Schedule.from_text("0F0 0F1 0F2 0R1 0B2 0R0 0B1 0B0")
    assert found.reloading({0}) == found


@pytest.mark.parametrize("line", ["0F0 0B0", "0F0 0F1 0B0 0B1", "0F0 (0F1;0B0)OVERLAP_F_B 0B1"])
def test_activations_stay_if_there_is_no_time_for_the_way_there_and_back(line):
    given = Schedule.from_text(line)
    assert given.reloading({0}) == given


def test_a_schedule_may_say_itself_when_activations_come_back():
    given = Schedule.from_text("0F0 0F1 0R0 0F2 0F3 0B0 0B1 0B2 0B3")
    expected = "0F0 0F1 0R0 0F2 0F3 0R1 0B0 0R2 0B1 0R3 0B2 0B3"
    assert given.reloading({0}) == Schedule.from_text(expected)


def test_only_the_stages_that_are_named_are_reloaded():
    given = Schedule.from_text("0F0 0F1 0F2 0B2 0B1 0B0\n1F0 1F1 1F2 1B2 1B1 1B0")
    assert given.reloading(()) is given
    assert given.reloading({1}).lanes[0] == given.lanes[0]
    assert given.reloading({1}).lanes[1] != given.lanes[1]
