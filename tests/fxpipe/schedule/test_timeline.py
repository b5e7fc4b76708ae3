import json

import pytest

from fxpipe.schedule import (
    Action,
    Kind,
    Link,
    Links,
    Memory,
    Span,
    StageCost,
    Timeline,
    named,
    simulate,
)

FORWARD, BACKWARD = Action(0, Kind.FORWARD, 0), Action(0, Kind.BACKWARD, 0)


def measured():
    """Two lanes; the second begins late, and does something that is no action."""
    spans = (
        Span(0, 10.0, 12.0, FORWARD),
        Span(0, 14.0, 16.0, BACKWARD),
        Span(1, 12.0, 13.0, None, "loss"),
    )
    return Timeline("measured", ("cuda:0", "cuda:1"), spans)


def test_the_two_counts_of_idle_time():
    timeline = measured()
    assert timeline.makespan == 6
    assert timeline.busy == (4, 1)
    assert timeline.own_spans == (6, 1)
    assert timeline.bubble == pytest.approx(1 - 5 / 12)
    assert timeline.bubble_in_span == pytest.approx(1 - 5 / 7)
    assert timeline.period == 6


def test_steps_that_follow_each_other_take_a_period_each():
    """Lane i starts i later, and is done i later: a second step fits in right behind."""
    timeline = simulate(named("zbv", lanes=4, microbatches=8), [StageCost(1, 1, 1)] * 8)
    assert timeline.own_spans == (48, 48, 48, 48)
    assert timeline.period == 48
    assert timeline.makespan == 51


def test_a_timeline_without_spans():
    timeline = Timeline("nothing", ("cpu",), ())
    assert (timeline.makespan, timeline.bubble, timeline.bubble_in_span) == (0, 0, 0)
    assert (timeline.busy, timeline.own_spans, timeline.peak_memory) == ((0,), (0,), ())
    assert "nothing" in timeline.draw()


def test_a_lane_that_does_nothing():
    timeline = Timeline("half", ("cpu", "cpu"), (Span(0, 0.0, 1.0, FORWARD),))
    assert timeline.bubble == 0.5
    assert timeline.bubble_in_span == 0
    assert "<svg" in timeline.draw()


def test_it_prints_what_matters():
    memory = Memory([1024], fixed=24)
    timeline = simulate(named("gpipe", lanes=1, microbatches=1), [StageCost(1, 1, 1)], None, memory)
    assert str(timeline).splitlines() == [
        "gpipe: 3 s; lanes wait 0.0% of the time, and 0.0% between their first action and their "
        "last",
        "lane 0: works 3 of the 3 s from its first action to its last, peak 1.0 KiB",
    ]
    assert [str(span) for span in measured().spans] == ["0F0", "0B0", "loss"]


def test_a_trace_for_perfetto(tmp_path):
    schedule = named("gpipe", lanes=2, microbatches=1)
    timeline = simulate(schedule, [StageCost(1, 1)] * 2, Links(link=Link(0.5)), Memory([8, 4]))
    timeline.to_perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {
        0: "lane 0",
        1: "lane 0, copies to it",
        2: "lane 1",
        3: "lane 1, copies to it",
    }
    spans = [(e["name"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans == [
        ("0F0", 0, 0, 1e6),
        ("0B0", 0, 4e6, 1e6),
        ("1F0", 2, 1.5e6, 1e6),
        ("1B0", 2, 2.5e6, 1e6),
        ("copy 0F0", 3, 1e6, 0.5e6),
        ("copy 1B0", 1, 3.5e6, 0.5e6),
    ]
    first = next(e for e in events if e["ph"] == "X")
    assert first["args"] == {"stage": 0, "microbatch": 0, "kind": "forward"}
    counted = [(e["name"], e["ts"], e["args"]["bytes"]) for e in events if e["ph"] == "C"]
    assert ("memory of lane 0", 0, 8) in counted
    assert ("memory of lane 0", 5e6, 0) in counted
