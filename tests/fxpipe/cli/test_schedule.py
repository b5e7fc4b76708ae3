import re

import pytest

from fxpipe.schedule import NAMES, Schedule, named
from tests.fxpipe.cli.invoke import refused, run


def shown(*args):
    result = run("schedule", *args)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_printed_as_a_grid(name):
    out = shown(name, "--lanes", 2, "--chunks", 4)
    stages = int(re.match(rf"{name}: (\d+) stages on 2 lanes, 4 micro-batches\n", out)[1])
    found = named(name, lanes=2, stages=stages, microbatches=4)
    assert out.startswith(str(found))


def test_names_are_taken_in_any_case():
    assert shown("1F1B", "--lanes", 2, "--chunks", 4) == shown("1f1b", "--lanes", 2, "--chunks", 4)


def test_the_bubble_is_counted_in_both_ways_and_so_are_live_micro_batches():
    out = shown("1f1b", "--lanes", 4, "--chunks", 8)
    # All lanes: (n - 1) / (m + n - 1). Lane i begins i forwards after the first and ends i
    # backwards ahead of the last: 8 * 3 of its 33 - 3 * i units are work.
    assert "bubble: 27.3% of all lanes' time" in out
    assert pytest.approx(0.158, abs=5e-4) == 1 - 4 * 24 / (33 + 30 + 27 + 24)
    assert "bubble: 15.8% of the lanes' time, if" in out
    assert "takes 33 times" in out
    assert "most micro-batches alive at once, by lane: 4, 3, 2, 1" in out
    assert "by stage" not in out, "it would say the same"
    assert "by lane: 8, 8, 8, 8" in shown("gpipe", "--lanes", 4, "--chunks", 8)


@pytest.mark.parametrize(
    ("args", "stages", "lanes"),
    [
        (["gpipe"], 4, 4),
        (["zbv"], 8, 4),
        (["interleaved_1f1b"], 8, 4),
        (["gpipe", "--stages", 3], 3, 3),
        (["zbv", "--stages", 4], 4, 2),
        (["looped_bfs", "--stages", 6, "--lanes", 2], 6, 2),
    ],
)
def test_what_is_not_given_follows_from_what_is(args, stages, lanes):
    assert f"{stages} stages on {lanes} lanes, {2 * lanes} micro-batches" in shown(*args)


def test_it_is_drawn_and_written(tmp_path):
    files = ["--draw", tmp_path / "new" / "out.svg", "--csv", tmp_path / "new" / "out.csv"]
    out = shown("zb_h1", "--lanes", 2, "--chunks", 3, *files)
    assert out.count("wrote ") == 2
    drawing = (tmp_path / "new" / "out.svg").read_text()
    assert "time (forwards of a stage)" in drawing and "(s)" not in drawing, "no stage takes 1 s"
    written = Schedule.from_csv(tmp_path / "new" / "out.csv", name="zb_h1")
    assert written == named("zb_h1", lanes=2, stages=2, microbatches=3)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "Missing argument"),
        (["1f2b"], "'1f2b' is not one of 'gpipe', '1f1b'"),
        (["zbv", "--lanes", 4, "--stages", 4], "4 lanes take 8 stages, not 4"),
        (["gpipe", "--lanes", 0], "'--lanes': 0 is not in the range"),
        (["gpipe", "--chunks", "many"], "'many' is not a valid integer"),
        (["dualpipe_v", "--lanes", 4, "--chunks", 2], "needs 8 micro-batches or more, not 2"),
        (["gpipe", "--csv", "out.txt"], "'out.txt' does not end with .csv"),
    ],
)
def test_what_makes_no_sense_is_refused(args, message):
    assert message in refused("schedule", *args)
