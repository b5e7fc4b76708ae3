import threading

import pytest
import torch

import fxpipe
from fxpipe.ir.progress import listening, phase, report_progress, telling, timed
from tests.zoo import MLP


def test_without_a_listener_work_goes_on_and_prints_nothing(capfd):
    with fxpipe.compile(MLP(), ["cpu"] * 2) as pipe:
        assert pipe(torch.ones(6, 12)).shape == (6, 12)
    report_progress("a part that nobody listens to")
    assert capfd.readouterr() == ("", "")


def test_a_listener_is_told_of_the_trace_and_of_every_pass():
    told = []
    with listening(told.append):
        fxpipe.compile(MLP(), ["cpu"] * 2, example_inputs=(torch.ones(6, 12),)).close()
    assert told[:2] == ["check", "trace"] and told[-1] == "verify"
    assert [name for name in told if name in ("alias", "cost", "partition", "split")] == [
        *("alias", "cost", "partition", "split")
    ]


def test_who_wants_to_know_whether_it_takes_long_is_told_once():
    told = []
    telling_all = telling(0.0, lambda name, seconds: told.append((name, seconds > 0)))
    with telling_all, timed("all"), phase("check", quiet=True):
        report_progress("cost")
    report_progress("later")
    assert told == [("all", True)]


def test_nobody_is_told_of_what_takes_no_time_or_is_listened_to():
    told = []
    with telling(60.0, lambda *said: told.append(said)), timed("short"):
        report_progress("cost")
    with listening(lambda what: None), telling(0.0, lambda *said: told.append(said)):
        report_progress("cost")
    assert told == []


def test_afterwards_and_in_other_threads_it_is_told_nothing():
    told = []
    with listening(told.append):
        other = threading.Thread(target=report_progress, args=("elsewhere",))
        other.start()
        other.join()
        with listening(lambda what: told.append(f"inner {what}")):
            report_progress("a")
        report_progress("b")
    report_progress("c")
    assert told == ["inner a", "b"]


def test_the_times_of_phases_are_added_up_within_the_phases_around_them():
    with timed("work") as work:
        for _ in range(2):
            with phase("outer"), phase("inner", quiet=True):
                pass
        with phase("last"):
            pass
    assert list(work.parts) == ["outer", "last"]
    outer = work.parts["outer"]
    assert (work.count, outer.count, outer.parts["inner"].count) == (1, 2, 2)
    assert work.seconds >= outer.seconds >= outer.parts["inner"].seconds >= 0
    assert [line.split()[0] for line in work.table().splitlines()] == [
        *("work", "outer", "inner", "last")
    ]


def test_a_phase_that_fails_is_timed_and_the_phase_around_it_goes_on():
    with timed("work") as work:
        with pytest.raises(ValueError, match="no"), phase("fails"):
            raise ValueError("no")
        with phase("next"):
            pass
    assert [each.count for each in work.parts.values()] == [1, 1]


def test_what_is_timed_within_a_phase_is_a_part_of_it():
    with timed("all") as whole, phase("a"):
        for _ in range(2):
            with timed("b") as part, phase("c"):
                pass
            assert part.count == 1
    assert whole.parts["a"].parts["b"].parts["c"].count == 2


def test_a_compilation_is_timed_by_its_phases():
    with timed("all") as whole:
        fxpipe.compile(MLP(), ["cpu"] * 2, example_inputs=(torch.ones(6, 12),)).close()
    (kind, pipeline) = whole.parts.values()
    assert pipeline.name == "MLP: pipeline of 6 micro-batches"
    assert kind.name == "MLP: compiling a new kind of call"
    trace = kind.parts["trace"]
    assert list(trace.parts)[:3] == ["references", "symbolic", "comparison"]
    assert trace.parts["references"].parts["model"].count == 2  # two batch sizes
    assert trace.parts["comparison"].parts["graph"].count == 2
    assert {"alias", "cost", "partition", "split", "place"} < set(kind.parts)
    assert {"microbatch", "program"} < set(pipeline.parts)
