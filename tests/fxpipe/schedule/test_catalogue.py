import inspect
import textwrap
from types import SimpleNamespace

import pytest
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxpipe
from fxpipe.schedule import NAMES, Schedule, catalogue, live, named, validate

PER_LANE = {"gpipe": [1], "1f1b": [1], "zbv": [2], "dualpipe_v": [2]}


@st.composite
def sizes(draw, names=NAMES):
    name, lanes = draw(st.sampled_from(names)), draw(st.integers(1, 8))
    least = 2 * lanes if name == "dualpipe_v" else 1
    return {
        "name": name,
        "lanes": lanes,
        "stages": lanes * draw(st.sampled_from(PER_LANE.get(name, [1, 2, 3]))),
        "microbatches": draw(st.integers(least, least + 24)),
    }


@given(sizes())
@settings(deadline=None, max_examples=300)
def test_every_schedule_is_valid_for_any_numbers(size):
    schedule = named(**size)
    validate(schedule)
    assert schedule.name == size["name"]
    assert (schedule.stages, schedule.microbatches) == (size["stages"], size["microbatches"])
    assert len(schedule.lanes) == size["lanes"]


# ----------------------------------------------------------------------------------------- as drawn


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_in_the_docstring_is_the_schedule(name):
    generate, *_ = catalogue._NAMED[name]
    doc = inspect.getdoc(generate)
    drawn = Schedule.from_text("\n".join(line for line in doc.splitlines() if "|" in line), name)
    size = {"lanes": len(drawn.lanes), "stages": drawn.stages, "microbatches": drawn.microbatches}
    assert drawn == named(name, **size)
    assert textwrap.indent(drawn.text(), "    ") in doc


def test_gpipe():
    assert_expected_inline(
        named("gpipe", lanes=2, microbatches=3).text(),
        """\
lane 0 | 0F0 0F1 0F2  .   .  0B0 0B1 0B2
lane 1 |  .  1F0 1F1 1F2 1B0 1B1 1B2  .""",
    )


def test_1f1b_with_fewer_microbatches_than_stages():
    assert_expected_inline(
        named("1f1b", lanes=3, microbatches=2).text(),
        """\
lane 0 | 0F0 0F1  .   .   .  0B0  .  0B1
lane 1 |  .  1F0 1F1  .  1B0  .  1B1  .
lane 2 |  .   .  2F0 2B0 2F1 2B1  .   .""",
    )


def test_looped_bfs_comes_back_the_way_it_went():
    assert_expected_inline(
        named("looped_bfs", lanes=2, microbatches=2, stages=4).text(),
        """\
lane 0 | 0F0 0F1 2F0 2F1  .   .  2B1 2B0 0B1 0B0
lane 1 |  .  1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0  .""",
    )


def test_interleaved_1f1b_goes_by_rounds():
    assert_expected_inline(
        named("interleaved_1f1b", lanes=2, microbatches=4, stages=4).text(),
        """\
lane 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1  .  2B2  .  2B3 0B2 0B3
lane 1 |  .  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3  .""",
    )


def test_rounds_may_be_uneven_larger_ones_first():
    lane = named("interleaved_1f1b", lanes=2, microbatches=5, stages=4).lanes[0]
    forwards = [str(entry) for entry in lane if "F" in str(entry)]
    assert forwards == ["0F0", "0F1", "0F2", "2F0", "2F1", "2F2", "0F3", "0F4", "2F3", "2F4"]


def test_zb_h1_puts_weight_gradients_off_by_the_index_of_the_lane():
    assert_expected_inline(
        named("zb_h1", lanes=3, microbatches=4).text(),
        """\
lane 0 | 0F0 0F1 0F2  .   .  0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
lane 1 |  .  1F0 1F1  .  1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
lane 2 |  .   .  2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3""",
    )


def test_zbv_turns_on_the_last_lane():
    assert_expected_inline(
        named("zbv", lanes=2, microbatches=3).text(),
        """\
lane 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2  .
lane 1 |  .  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2""",
    )


def test_zbv_with_few_microbatches_leaves_the_others_out():
    assert_expected_inline(
        named("zbv", lanes=2, microbatches=1).text(),
        """\
lane 0 | 0F0  .   .  3F0 3I0 3W0  .   .  0I0 0W0
lane 1 |  .  1F0 2F0  .   .  2I0 2W0 1I0 1W0  .""",
    )


def test_dualpipe_v_overlaps_forward_and_backward_of_a_lanes_two_stages():
    lane = named("dualpipe_v", lanes=2, microbatches=4).lanes[1]
    assert " ".join(map(str, lane)) == (
        "1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0)OVERLAP_F_B (1F3;2B1)OVERLAP_F_B "
        "(2F3;1B1)OVERLAP_F_B 2B2 1B2 2I3 1I3 2W3 1W3"
    )


# ------------------------------------------------------------------------------- what is kept alive


@given(st.integers(1, 8), st.integers(1, 20))
def test_1f1b_keeps_at_most_stages_less_the_index(lanes, microbatches):
    peaks = live(named("1f1b", lanes=lanes, microbatches=microbatches)).stages
    assert peaks == tuple(min(microbatches, lanes - stage) for stage in range(lanes))


@given(st.integers(1, 8), st.integers(1, 20))
def test_gpipe_keeps_all(lanes, microbatches):
    assert set(live(named("gpipe", lanes=lanes, microbatches=microbatches)).stages) == {
        microbatches
    }


@given(st.integers(1, 8), st.integers(1, 40))
@settings(deadline=None)
def test_zbv_keeps_no_more_than_the_first_lane_of_1f1b(lanes, microbatches):
    """Its stages are half as large."""
    most = max(live(named("1f1b", lanes=lanes, microbatches=microbatches)).lanes)
    halves = [0.5] * (2 * lanes)
    kept = live(named("zbv", lanes=lanes, microbatches=microbatches), halves).lanes
    assert max(kept) <= most


@given(st.integers(1, 8), st.integers(1, 20))
def test_zb_h1_keeps_no_more_than_the_first_lane_of_1f1b(lanes, microbatches):
    kept = live(named("zb_h1", lanes=lanes, microbatches=microbatches)).lanes
    assert max(kept) <= min(lanes, microbatches)


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "name, size, message",
    [
        ("gpip", {}, "schedule is 'gpip': did you mean 'gpipe'"),
        ("gpipe", {"stages": 8}, "gpipe has 1 stage on each lane: 4 lanes take 4 stages, not 8"),
        ("zbv", {"stages": 4}, "zbv has 2 stages on each lane: 4 lanes take 8 stages, not 4"),
        ("looped_bfs", {"stages": 7}, "4 lanes take 8 stages, say, not 7"),
        ("interleaved_1f1b", {"stages": 2}, "4 lanes take 4 stages, say, not 2"),
        ("dualpipe_v", {"microbatches": 7}, "4 lanes needs 8 micro-batches or more, not 7"),
        ("1f1b", {"microbatches": 0}, "microbatches is 0: give 1 or more"),
        ("1f1b", {"lanes": 0}, "lanes is 0: give 1 or more"),
    ],
)
def test_numbers_that_a_schedule_does_not_exist_for(name, size, message):
    with pytest.raises(ValueError, match=message):
        named(name, **{"lanes": 4, "microbatches": 8, **size})


def by_definition(name, lanes, lane, microbatches):
    """What a lane does in GPipe: all forwards, then all backwards. In 1F1B it begins with one
    forward for each lane behind it, and then does a forward and a backward in turn."""
    forwards, backwards = ([f"{lane}{kind}{i}" for i in range(microbatches)] for kind in "FB")
    if name == "gpipe":
        return forwards + backwards
    ahead = min(lanes - lane - 1, microbatches)
    in_turn = zip(forwards[ahead:], backwards, strict=False)
    rest = backwards[microbatches - ahead :]
    return [*forwards[:ahead], *(action for pair in in_turn for action in pair), *rest]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("lanes, microbatches", [(1, 1), (2, 2), (3, 8), (4, 2), (4, 4), (4, 7)])
def test_gpipe_and_1f1b_are_what_their_definitions_say(name, lanes, microbatches):
    ours = named(name, lanes=lanes, microbatches=microbatches)
    for lane in range(lanes):
        assert list(map(str, ours.lanes[lane])) == by_definition(name, lanes, lane, microbatches)


# ------------------------------------------------------------------------------------ torch's lists

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


def fake_stage(lanes, stages, index):
    return SimpleNamespace(
        group_size=lanes,
        group_rank=0,
        num_stages=stages,
        stage_index=index,
        submod=nn.Identity(),
        has_backward=True,
    )


def torchs_lanes(cls, lanes, stages, microbatches):
    """The order that a class with several stages a rank makes for all ranks."""
    own = [fake_stage(lanes, stages, i * lanes) for i in range(stages // lanes)]
    order = cls(own, microbatches, loss_fn=lambda y, target: y).pipeline_order
    return [[str(action) for action in order[lane] if action is not None] for lane in range(lanes)]


@pytest.mark.parametrize(
    "name, cls, per_lane",
    [
        ("interleaved_1f1b", "ScheduleInterleaved1F1B", (1, 2, 3)),
        ("looped_bfs", "ScheduleLoopedBFS", (1, 2, 3)),
        ("zb_h1", "ScheduleInterleavedZeroBubble", (1, 2, 3)),
        ("zbv", "ScheduleZBVZeroBubble", (2,)),
        ("dualpipe_v", "ScheduleDualPipeV", (2,)),
    ],
)
@pytest.mark.parametrize(
    "lanes, microbatches", [(1, 3), (2, 4), (2, 7), (3, 9), (4, 3), (4, 10), (4, 8)]
)
def test_schedules_with_several_stages_a_lane_are_those_of_torch(
    name, cls, per_lane, lanes, microbatches
):
    found = getattr(torch_schedules, cls, None)
    if found is None:
        pytest.skip(f"this torch has no {cls}")
    for each in per_lane:
        size = {"lanes": lanes, "stages": lanes * each, "microbatches": microbatches}
        if torch_takes(name, lanes, microbatches):
            theirs = torchs_lanes(found, **size)
            assert [list(map(str, lane)) for lane in named(name, **size).lanes] == theirs


def torch_takes(name, lanes, microbatches):
    """Torch interleaves only rounds of one size; a DualPipe in V needs twice as many as lanes."""
    if name == "dualpipe_v":
        return microbatches >= 2 * lanes
    rounds = max(1, microbatches // lanes)
    return name not in ("interleaved_1f1b", "zb_h1") or microbatches % rounds == 0


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("1F1B", "1f1b"),
        ("GPipe", "gpipe"),
        ("1fb1", "1f1b"),
        ("Interleaved1F1B", "interleaved_1f1b"),
        ("ZB-H1", "zb_h1"),
        ("DualPipeV", "dualpipe_v"),
    ],
)
def test_a_name_that_is_written_in_another_way_is_suggested(written, meant):
    with pytest.raises(ValueError, match=f"'{written}': did you mean '{meant}'. There are gpipe, "):
        named(written, lanes=2, microbatches=4)
    with pytest.raises(ValueError, match=f"did you mean '{meant}'.*dualpipe_v, or auto"):
        fxpipe.compile(nn.Linear(2, 2), ["cpu"] * 2, schedule=written)


@pytest.mark.parametrize("written", ["nosuch", None, 1])
def test_nothing_is_suggested_for_what_is_like_no_name(written):
    with pytest.raises(ValueError, match=f"schedule is {written!r}: give one of gpipe, 1f1b"):
        fxpipe.compile(nn.Linear(2, 2), ["cpu"] * 2, schedule=written)
