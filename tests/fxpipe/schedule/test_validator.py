import pytest

from fxpipe.schedule import Schedule, ScheduleError, live, named, validate

GOOD = "0F0 0F1 0B0 0B1 \n 1F0 1B0 1F1 1B1"


def refused(text, **bounds):
    with pytest.raises(ScheduleError) as error:
        validate(Schedule.from_text(text), **bounds)
    return str(error.value)


def test_a_good_schedule_passes():
    validate(Schedule.from_text(GOOD))


@pytest.mark.parametrize(
    "text, message",
    [
        (
            GOOD.replace("1F1", ""),
            "stage 1, micro-batch 1: the forward 1F1 is missing",
        ),
        (
            GOOD.replace("0B1", ""),
            "stage 0, micro-batch 1: the backward is missing, 0B1 or its halves 0I1, 0W1",
        ),
        (
            GOOD.replace("0B1", "0I1"),
            "stage 0, micro-batch 1: 0I1, at position 3 of lane 0, lacks its other half 0W1",
        ),
        (
            GOOD.replace("1B1", "1W1"),
            "stage 1, micro-batch 1: 1W1, at position 3 of lane 1, lacks its other half 1I1",
        ),
        (
            GOOD.replace("0B1", "0B1 0W1"),
            "stage 0, micro-batch 1: a whole backward 0B1, at position 3 of lane 0, and also 0W1, "
            "at position 4 of lane 0, which is a part of it",
        ),
        (
            GOOD.replace("1B1", "1B1 1F0"),
            "1F0 comes twice: at position 0 of lane 1 and at position 4 of lane 1",
        ),
        (
            GOOD.replace("1F1", "").replace("0F1", "0F1 1F1"),
            "stage 1 is in two lanes: at position 2 of lane 0 and at position 0 of lane 1 (1F0); "
            "a stage has one lane",
        ),
    ],
)
def test_what_is_missing_or_too_much(text, message):
    assert refused(text) == message


def test_stages_and_microbatches_are_counted():
    schedule = Schedule.from_text(GOOD)
    with pytest.raises(ScheduleError, match=r"1F0, at position 0 of lane 1, is of stage 1"):
        validate(Schedule("", 1, 2, schedule.lanes))
    with pytest.raises(ScheduleError, match=r"0F1, .* is of micro-batch 1: the schedule has 1"):
        validate(Schedule("", 2, 1, schedule.lanes))
    with pytest.raises(ScheduleError, match="stage 2, micro-batch 0: the forward 2F0 is missing"):
        validate(Schedule("", 3, 2, schedule.lanes))


# ---------------------------------------------------------------------------------------- deadlocks


def test_a_circle_of_lanes_that_wait_is_told_by_lane_and_position():
    assert refused("0F0 0B0 0F1 0B1 \n 1F0 1F1 1B0 1B1") == (
        "deadlock: lane 0 waits, at position 1 (0B0), for 1B0, which is at position 2 of lane 1; "
        "lane 1 waits, at position 1 (1F1), for 0F1, which is at position 2 of lane 0"
    )


def test_a_lane_can_wait_for_itself():
    assert refused("0F0 0W0 0I0") == (
        "deadlock: lane 0 waits, at position 1 (0W0), for 0I0, which is at position 2 of lane 0"
    )


def test_lanes_that_wait_for_a_circle_are_no_part_of_it():
    message = refused("0F0 0B0 \n 1F0 1B0 \n 2F0 2B0 \n 4F0 3F0 3B0 4B0")
    assert message.startswith("deadlock: lane 3 waits, at position 0 (4F0), for 3F0")
    assert message.count(";") == 0


def test_edges_say_what_may_deadlock():
    schedule = Schedule.from_text("1F0 0F0 0B0 1B0")
    with pytest.raises(ScheduleError, match="deadlock"):
        validate(schedule)
    validate(schedule, edges=[])


def test_overlapping_actions_count_one_after_the_other():
    validate(Schedule.from_text("(0F0;0B0)OVERLAP_F_B"))
    assert "at position 0 (0B0), for 0F0" in refused("(0B0;0F0)OVERLAP_F_B")


# ------------------------------------------------------------------------------- what is kept alive


def test_alive_from_forward_to_the_end_of_backward():
    kept = live(Schedule.from_text("0F0 0F1 0B0 0F2 0B1 0B2"))
    assert kept.stages == (2,)
    assert kept.lanes == (2,)


def test_halves_keep_until_the_weight_gradient():
    schedule = Schedule.from_text("0F0 0I0 0F1 0I1 0W0 0W1")
    assert live(schedule).stages == (2,)
    assert live(schedule, released_by_input=1.0).stages == (1,)
    assert live(schedule, released_by_input=0.25).stages == (1.75,)


def test_a_lane_adds_up_its_stages_and_weights_count():
    schedule = Schedule.from_text("0F0 1F0 1B0 0F1 1F1 1B1 0B1 0B0")
    assert live(schedule).stages == (2, 1)
    assert live(schedule).lanes == (3,)
    assert live(schedule, [10, 1]).stages == (20, 1)
    assert live(schedule, [10, 1]).lanes == (21,)


def test_bounds_on_stages():
    validate(named("1f1b", lanes=3, microbatches=6), max_live=[3, 2, 1])
    validate(named("1f1b", lanes=3, microbatches=6), max_live=3)
    with pytest.raises(ScheduleError) as error:
        validate(named("1f1b", lanes=3, microbatches=6), max_live=[3, 1, 1])
    assert str(error.value) == (
        "stage 1 keeps 2 micro-batches alive, at position 1 of lane 1 (1F1): 1 are allowed"
    )


def test_bounds_on_lanes_and_on_bytes():
    schedule = named("zbv", lanes=2, microbatches=4)
    validate(schedule, max_live_in_lane=4)
    validate(schedule, activation_bytes=[100] * 4, max_bytes=400)
    with pytest.raises(
        ScheduleError, match=r"lane 0 keeps 4 micro-batches alive, at position 3 of"
    ):
        validate(schedule, max_live_in_lane=3)
    with pytest.raises(ScheduleError, match=r"lane 1 keeps 400 B alive, .*: 399 B are allowed"):
        validate(schedule, activation_bytes=[100] * 4, max_bytes=[400, 399])


def test_bounds_that_make_no_sense():
    schedule = named("gpipe", lanes=2, microbatches=1)
    with pytest.raises(ValueError, match="max_bytes needs activation_bytes"):
        validate(schedule, max_bytes=3)
    with pytest.raises(ValueError, match="each stage: 3 numbers are given, 2 needed"):
        validate(schedule, max_live=[1, 1, 1])
