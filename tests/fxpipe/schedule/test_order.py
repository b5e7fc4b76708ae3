from fxpipe.schedule import Needs, Schedule, named
from fxpipe.schedule.order import earliest_starts, run_order


def ordered(schedule):
    return run_order(schedule.lanes, Needs(schedule).of)


def test_lanes_take_turns_and_each_takes_its_entries_in_order():
    schedule = Schedule.from_text("0F0 0F1 0B0 0B1 \n 1F0 1B0 1F1 1B1")
    said = " ".join(f"{lane}:{entry}" for lane, entry in ordered(schedule))
    # In the third round lane 0 waits: its 0B0 needs 1B0, which lane 1 does meanwhile.
    assert said == "0:0F0 0:0F1 1:1F0 1:1B0 0:0B0 1:1F1 1:1B1 0:0B1"


def test_one_thread_can_run_the_entries_in_that_order():
    schedule = named("interleaved_1f1b", lanes=4, microbatches=8)
    needs, done = Needs(schedule), set()
    for _, entry in ordered(schedule):
        for action in entry.parts:  # no overlaps in this schedule
            assert done.issuperset(needs.of(action))
            done.add(action)
    assert len(done) == sum(map(len, schedule.lanes))


def test_lanes_that_wait_for_each_other_stop_there_and_the_others_go_on():
    schedule = Schedule.from_text("0F0 0B0 0F1 0B1 \n 1F0 1F1 1B0 1B1")
    assert [str(entry) for _, entry in ordered(schedule)] == ["0F0", "1F0"]


def test_the_parts_of_an_overlap_do_not_wait_for_each_other():
    schedule = Schedule.from_text("(0F0;0B0)OVERLAP_F_B")
    assert [str(entry) for _, entry in ordered(schedule)] == ["(0F0;0B0)OVERLAP_F_B"]


def test_an_entry_starts_when_its_lane_is_free_and_what_it_needs_has_ended():
    schedule = Schedule.from_text("0F0 0B0 \n 1F0 1B0")
    starts = earliest_starts(ordered(schedule), Needs(schedule).of, lambda entry: 3.0)
    assert {str(entry): at for _, entry, at in starts} == {
        "0F0": 0.0,
        "1F0": 3.0,
        "1B0": 6.0,
        "0B0": 9.0,
    }
