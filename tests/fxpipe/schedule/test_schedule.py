from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.schedule import NAMES, Action, Kind, Needs, Overlap, Schedule, chain, named, validate

F, B, INPUT, WEIGHT, AGAIN = Kind


def test_lanes_print_as_a_grid_of_unit_time():
    assert_expected_inline(
        str(named("1f1b", lanes=2, microbatches=3)),
        """\
1f1b: 2 stages on 2 lanes, 3 micro-batches
lane 0 | 0F0 0F1  .  0B0 0F2 0B1  .  0B2
lane 1 |  .  1F0 1B0 1F1 1B1 1F2 1B2  .""",
    )


def test_one_of_each_is_said_as_one():
    assert str(named("gpipe", lanes=1, microbatches=1)).startswith(
        "gpipe: 1 stage on 1 lane, 1 micro-batch\n"
    )


def test_a_wide_entry_widens_its_column():
    schedule = Schedule.from_text("0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    assert_expected_inline(schedule.text(), """lane 0 | 0F0 (0F1;0B0)OVERLAP_F_B 0B1""")


def test_what_waits_forever_is_printed_last():
    schedule = Schedule.from_text("0F0 0B0 0F1 0B1\n1B0 1F0 1F1 1B1")
    assert_expected_inline(
        schedule.text(),
        """\
lane 0 | 0F0 0B0 0F1 0B1  .
lane 1 |  .  1B0 1F0 1F1 1B1""",
    )


@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(8, 10))
def test_text_is_read_as_it_is_printed(name, lanes, microbatches):
    schedule = named(name, lanes=lanes, microbatches=microbatches)
    assert Schedule.from_text(schedule.text(), name) == schedule


def test_text_needs_no_labels_and_no_idle_time():
    schedule = Schedule.from_text("0F0 0B0\n\n 1F0 1B0")
    assert schedule.lanes == (
        (Action(0, F, 0), Action(0, B, 0)),
        (Action(1, F, 0), Action(1, B, 0)),
    )
    assert (schedule.stages, schedule.microbatches) == (2, 1)


def test_the_placement_follows_from_the_lanes():
    assert named("zbv", lanes=2, microbatches=4).placement == (0, 1, 1, 0)
    assert named("looped_bfs", lanes=2, microbatches=4, stages=4).placement == (0, 1, 0, 1)
    assert Schedule("", 3, 1, Schedule.from_text("2F0 0F0").lanes).placement == (0, -1, 0)


# ---------------------------------------------------------------------------------------------- CSV


def test_a_csv_file_has_a_row_a_lane(tmp_path):
    named("zb_h1", lanes=2, microbatches=2).to_csv(tmp_path / "s.csv")
    assert (tmp_path / "s.csv").read_text().split() == [
        "0F0,0F1,0I0,0W0,0I1,0W1",
        "1F0,1I0,1F1,1I1,1W0,1W1",
    ]


@given(st.sampled_from(NAMES))
def test_csv_is_read_as_it_is_written(tmp_path_factory, name):
    schedule, path = named(name, lanes=2, microbatches=5), tmp_path_factory.mktemp("csv") / "a.csv"
    schedule.to_csv(path)
    assert Schedule.from_csv(path, name) == schedule
    assert Schedule.from_csv(path).name == "a"


def test_idle_cells_are_left_out(tmp_path):
    path = tmp_path / "s.csv"
    path.write_text("0F0,,0B0\r\n,1F0,1B0,\r\n")
    assert Schedule.from_csv(path).lanes == Schedule.from_text("0F0 0B0\n1F0 1B0").lanes


def test_what_computes_nothing_is_left_out_and_said(tmp_path):
    path = tmp_path / "s.csv"
    path.write_text("0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    said = "left out: 1 RECV_B, 1 RECV_F, 1 SEND_B, 1 SEND_F, 1 UNSHARD"
    with pytest.warns(UserWarning, match=said):
        schedule = Schedule.from_csv(path)
    assert schedule.lanes == Schedule.from_text("0F0 0B0\n1F0 1B0").lanes


def test_a_cell_that_is_no_action_is_named(tmp_path):
    path = tmp_path / "s.csv"
    path.write_text("0F0,0B0\n1F0,1Q0\n")
    with pytest.raises(ValueError, match=r"s\.csv, lane 1, column 1: '1Q0' is not an action"):
        Schedule.from_csv(path)


@pytest.mark.parametrize("name", ["zbv", "dualpipe_v", "interleaved_1f1b"])
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_torch_reads_what_is_written_and_the_other_way_round(tmp_path, name, form):
    torchs = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule, path = named(name, lanes=2, microbatches=4, stages=4), tmp_path / "s.csv"
    schedule.to_csv(path)
    stages = [SimpleNamespace(group_size=2, group_rank=0, num_stages=4) for _ in range(2)]
    theirs = torchs._PipelineScheduleRuntime(stages, 4, loss_fn=lambda y, target: y)
    theirs._load_csv(str(path))
    assert theirs.stage_index_to_group_rank == dict(enumerate(schedule.placement))
    theirs._dump_csv(str(path), format=form)
    with nullcontext() if form == "compute_only" else pytest.warns(match="are left out"):
        assert Schedule.from_csv(path, name) == schedule


# ------------------------------------------------------------------------------- who waits for whom


def test_lanes_may_be_written_as_lists():
    first, second = Action(0, F, 0), Action(0, F, 1)
    lane = [first, Overlap([second, Action(0, B, 0)]), Action(0, B, 1)]
    schedule = Schedule("own", 1, 2, [lane])
    assert schedule == Schedule.from_text("0F0 (0F1;0B0)OVERLAP_F_B 0B1", name="own")
    validate(schedule, edges=[])


def test_what_an_action_needs():
    whole, halved = (
        Schedule.from_text("0F0 0B0\n1F0 1B0"),
        Schedule.from_text("0F0 0B0\n1F0 1I0 1W0"),
    )
    assert Needs(whole).of(Action(0, F, 0)) == []
    assert Needs(whole).of(Action(1, F, 0)) == [Action(0, F, 0)]
    assert Needs(whole).of(Action(0, B, 0)) == [Action(0, F, 0), Action(1, B, 0)]
    assert Needs(halved).of(Action(0, B, 0)) == [Action(0, F, 0), Action(1, INPUT, 0)]
    assert Needs(halved).of(Action(1, WEIGHT, 0)) == [Action(1, INPUT, 0)]


def test_a_backward_needs_its_recomputation_where_the_schedule_has_one():
    needs = Needs(Schedule.from_text("0F0 0R0 0B0\n1F0 1B0"))
    assert needs.of(Action(0, AGAIN, 0)) == [Action(0, F, 0)]
    assert needs.of(Action(0, B, 0)) == [Action(0, F, 0), Action(0, AGAIN, 0), Action(1, B, 0)]
    assert needs.of(Action(1, B, 0)) == [Action(1, F, 0)]


def test_edges_say_who_passes_to_whom():
    schedule = Schedule.from_text("0F0 0B0\n1F0 1B0\n2F0 2B0")
    assert chain(3) == ((0, 1), (1, 2))
    needs = Needs(schedule, [(0, 2), (1, 2)])
    assert needs.of(Action(1, F, 0)) == []
    assert needs.of(Action(2, F, 0)) == [Action(0, F, 0), Action(1, F, 0)]
    assert needs.of(Action(0, B, 0)) == [Action(0, F, 0), Action(2, B, 0)]


def test_in_notebooks_a_schedule_is_a_timeline_if_it_can_run():
    drawn = named("1f1b", lanes=2, microbatches=4)._repr_svg_()
    assert drawn.count("<title>") == 2 * 4 * 2, "a box an action"
    assert "15 forwards of a stage" in drawn, "2 * (1 + 2) + 3 * 3: nobody knows of seconds"
    assert Schedule.from_text("0B0 0F0")._repr_svg_() is None


def test_the_first_micro_batches_go_in_the_same_order():
    schedule = Schedule.from_text("""
        0F0 (0F1;0I0)OVERLAP_F_B 0F2 0B2 0W0 0B1
        1F0 1B0 (1F2;1F1)OVERLAP_F_B 1B2 1B1
    """)
    assert schedule.first(2) == Schedule.from_text("""
        0F0 (0F1;0I0)OVERLAP_F_B 0W0 0B1
        1F0 1B0 1F1 1B1
    """)
    assert schedule.first(3) is schedule


def test_a_csv_file_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "schedule.csv"
    path.write_bytes(b"\xef\xbb\xbf0F0,0B0\n")
    assert Schedule.from_csv(path) == Schedule.from_text("0F0 0B0", "schedule")
