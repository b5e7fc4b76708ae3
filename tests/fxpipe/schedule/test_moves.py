"""The moves by which the search improves a schedule."""

from fxpipe.schedule import Needs, Schedule, StageCost, simulate
from fxpipe.schedule.moves import Move, moved, moves

GPIPE = Schedule.from_text("0F0 0F1 0B0 0B1 \n 1F0 1F1 1B0 1B1")


def line(schedule, lane):
    return " ".join(map(str, schedule.actions(lane)))


def test_the_action_for_which_a_lane_waits_moves_ahead():
    """Lane 0 idles ahead of 0B0, which waits for 1B0: that may overtake 1F1."""
    timeline = simulate(GPIPE, [StageCost(1, 2)] * 2)
    found = [moved(GPIPE, move) for move in moves(GPIPE, timeline, Needs(GPIPE))]
    assert "1F0 1B0 1F1 1B1" in [line(schedule, 1) for schedule in found]


def test_a_later_action_moves_into_idle_time():
    schedule = Schedule.from_text("0F0 0B0 0F1 0B1 \n 1F0 1B0 1F1 1B1")
    timeline = simulate(schedule, [StageCost(1, 2)] * 2)
    assert Move(lane=0, source=2, target=1) in moves(schedule, timeline, Needs(schedule))
    assert line(moved(schedule, Move(0, 2, 1)), 0) == "0F0 0F1 0B0 0B1"


def test_a_recomputation_is_moved_by_itself_and_a_backward_takes_its_own_along():
    schedule = Schedule.from_text("0F0 0F1 0B0 0R1 0B1")
    assert line(moved(schedule, Move(0, 3, 2)), 0) == "0F0 0F1 0R1 0B0 0B1"
    assert line(moved(schedule, Move(0, 4, 2)), 0) == "0F0 0F1 0B1 0B0"
