"""The kit for GPUs (``tests/gpu``) keeps its results if a part fails or hangs, or it is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.accelerator.sim.build import compiler
from tests.gpu.needs import missing
from tests.gpu.part import ERROR, KILLED, OK, PROBLEM, SKIPPED, Outcome, Part, Skip
from tests.gpu.parts import PARTS
from tests.gpu.runner import Runner
from tests.gpu.times import _busy

ROOT = Path(__file__).parents[1]

needs_compiler = pytest.mark.skipif(
    compiler() is None, reason="the simulated accelerator needs a C++ compiler: g++, or CXX=..."
)

# --------------------------------------------------------------------- parts of these tests' own


def fine(machine, report):
    report.row(devices=machine.count, kind=machine.kind)


def doubtful(machine, report):
    report.problem("two and two are five")
    report.row(sum=5)


def fails(machine, report):
    report.row(before="it failed")
    raise ValueError("no good")


def dies(machine, report):
    report.row(before="it died")
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(machine, report):
    child = subprocess.Popen(["sleep", "1000"])
    report.row(child=child.pid)
    time.sleep(1000)


def needs_what_is_not_there(machine, report):
    raise Skip("there is no moon")


def tells_its_environment(machine, report):
    report.row(value=os.environ.get("FXPIPE_TEST_OF_THE_KIT"))


def races(machine, report):
    import torch

    x = torch.ones(4, device=machine.name())
    with torch.Stream(torch.device(machine.name())):
        x + 1


def part(function, seconds=300.0, **options):
    where = f"tests.test_gpu_kit:{function.__name__}"
    return Part(function.__name__, "a part of a test", where, seconds, **options)


def ran(folder, *parts, seconds=300.0):
    """What became of parts in a dry run, by name; results.json has to say the same."""
    outcomes = Runner(parts, folder, dry=True, seconds=seconds).run()
    results = json.loads((folder / "results.json").read_text())
    assert results["complete"] and results["dry_run"]
    assert [Outcome(**each) for each in results["parts"]] == outcomes
    return {outcome.name: outcome for outcome in outcomes}


# ------------------------------------------------------------------------------------- the runner


@needs_compiler
def test_what_goes_wrong_in_a_part_does_not_stop_the_next(tmp_path):
    functions = [fails, dies, doubtful, needs_what_is_not_there, fine]
    found = ran(tmp_path, *(part(each) for each in functions))
    assert {name: outcome.status for name, outcome in found.items()} == {
        "fails": ERROR,
        "dies": KILLED,
        "doubtful": PROBLEM,
        "needs_what_is_not_there": SKIPPED,
        "fine": OK,
    }
    assert found["fails"].why == "ValueError: no good"
    assert found["fails"].rows == [{"before": "it failed"}] and "fails" in found["fails"].traceback
    assert found["dies"].rows == [{"before": "it died"}]
    assert "ended with exit code -11" in found["dies"].why
    assert found["needs_what_is_not_there"].why == "there is no moon"
    table = (tmp_path / "results.txt").read_text()
    assert "two and two are five" in table and "no good" in table and "there is no moon" in table


@needs_compiler
def test_a_part_that_hangs_is_killed_with_all_that_it_has_started(tmp_path):
    found = ran(tmp_path, part(hangs, seconds=20.0), part(fine))
    assert found["hangs"].status == KILLED and "it took more than 20 s" in found["hangs"].why
    assert "in hangs" in (tmp_path / "logs/hangs.txt").read_text()
    assert found["fine"].status == OK
    (row,) = found["hangs"].rows
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # until the system has taken the process away
            os.kill(row["child"], 0)
            if _is_gone(row["child"]):
                raise ProcessLookupError
            time.sleep(0.1)


def _is_gone(pid):
    """Whether a process has ended, even if nobody has asked how."""
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "Z"


@needs_compiler
def test_a_part_may_have_an_environment_of_its_own(tmp_path):
    told = part(tells_its_environment, environment={"FXPIPE_TEST_OF_THE_KIT": "here"})
    assert ran(tmp_path, told)["tells_its_environment"].rows == [{"value": "here"}]
    assert "FXPIPE_TEST_OF_THE_KIT" not in os.environ


@needs_compiler
def test_with_fewer_devices_than_it_needs_a_part_is_skipped(tmp_path):
    outcome = ran(tmp_path, part(fine, devices=5))["fine"]
    assert outcome.status == SKIPPED and outcome.why == "it needs 5 GPUs, and there are 4"


@needs_compiler
def test_a_race_on_the_simulated_accelerator_is_a_problem(tmp_path):
    outcome = ran(tmp_path, part(races))["races"]
    assert outcome.status == PROBLEM and "race: aten::add" in outcome.problems[0]


def test_what_has_no_time_left_is_skipped(tmp_path):
    outcome = ran(tmp_path, part(fine), seconds=0.0)["fine"]
    assert outcome.status == SKIPPED and outcome.why == "no time is left"


@needs_compiler
def test_when_the_kit_is_killed_what_has_been_found_is_there(tmp_path):
    command = [sys.executable, "-m", "tests.gpu", str(tmp_path), "--dry-run", "--parts=about,large"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    first = process.stdout.readline()
    process.kill()
    process.wait()
    assert re.match(r"about +ok", first)
    results = json.loads((tmp_path / "results.json").read_text())
    assert not results["complete"]
    assert [(p["name"], p["status"]) for p in results["parts"]] == [
        ("about", OK),
        ("large", "not run"),
    ]
    assert results["parts"][0]["rows"][0]["what"] == "python"
    assert "about" in (tmp_path / "results.txt").read_text()


# -------------------------------------------------------------------------------------- the parts


@pytest.mark.long  # "make kit" runs all parts
@needs_compiler
def test_quick_parts_find_nothing_wrong_in_a_dry_run(tmp_path):
    names = {"about", "bits", "inputs", "sleeps", "trace", "triton", "speed"}
    found = ran(tmp_path, *(each for each in PARTS if each.name in names))
    assert {name: (o.status, o.problems) for name, o in found.items()} == {
        name: (OK, []) for name in names
    }
    assert {row["bits"] for row in found["bits"].rows} == {"same"}
    for file in found["trace"].files:
        assert (tmp_path / file).stat().st_size > 0


def test_parts_have_names_of_their_own_and_can_be_loaded():
    assert len({each.name for each in PARTS}) == len(PARTS)
    for each in PARTS:
        assert callable(each.load()), each.name


def test_without_what_fxpipe_depends_on_the_kit_says_what_to_bring(monkeypatch):
    assert missing() == []
    absent = {"graphviz", "click"}
    monkeypatch.setattr("tests.gpu.needs.find_spec", lambda name: None if name in absent else name)
    (line,) = missing()
    assert line.startswith("Packages are missing: graphviz, click.") and "pip download" in line


def test_how_busy_a_stream_was_is_read_from_the_trace(tmp_path):
    def event(stream, begin, length, kind="kernel"):
        where = {"device": 0, "stream": stream}
        return {"ph": "X", "cat": kind, "ts": begin, "dur": length, "args": where}

    path = tmp_path / "trace.json"
    events = [event(7, 0, 10), event(7, 5, 10), event(20, 10, 10, "gpu_memcpy"), event(7, 30, 10)]
    path.write_text(json.dumps({"traceEvents": [*events, event(7, 0, 99, "cpu_op")]}))
    busy = {row["stream"]: row["of_the_time"] for row in _busy(path)}
    assert busy == {7: 25 / 40, 20: 10 / 40, "all": 30 / 40}
