import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from fxpipe.schedule import Link, Links, Memory, Span, StageCost, Timeline, named, simulate
from fxpipe.schedule.gantt import draw

SVG = "{http://www.w3.org/2000/svg}"


def boxes(svg):
    """Left, right, top, label of every box, by its title."""
    found = {}
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        title, box, label = (group.find(f"{SVG}{tag}") for tag in ("title", "rect", "text"))
        if title is not None:
            x, width, y = (float(box.get(key)) for key in ("x", "width", "y"))
            found[title.text.partition(":")[0]] = (x, x + width, y, label)
    return found


def texts(svg):
    return [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zbv", "dualpipe_v"])
@pytest.mark.parametrize("lanes, microbatches", [(2, 4), (8, 64)])
def test_every_action_is_a_box_with_its_microbatch_and_none_lies_on_another(
    name, lanes, microbatches
):
    schedule = named(name, lanes=lanes, microbatches=microbatches)
    timeline = simulate(schedule, [StageCost(1e-3, 1e-3, 1e-3)] * schedule.stages)
    found = boxes(timeline.draw())
    for lane in range(lanes):
        row = [found[str(action)] for action in schedule.actions(lane)]
        for action, (_, _, _, label) in zip(schedule.actions(lane), row, strict=True):
            assert label.text == str(action.microbatch)
        for (_, right, _, _), (left, _, _, _) in pairwise(row):
            assert right <= left + 0.02  # rounding
        for left, right, _, label in row:
            assert 0.58 * 11 * len(label.text) <= right - left


def test_boxes_are_as_long_as_actions_and_lanes_lie_below_each_other():
    timeline = simulate(named("gpipe", lanes=2, microbatches=1), [StageCost(1, 1), StageCost(2, 2)])
    found = boxes(timeline.draw())
    wide = {name: box[1] - box[0] for name, box in found.items()}
    assert wide["1F0"] == pytest.approx(2 * wide["0F0"], abs=0.02)
    assert found["1F0"][0] == pytest.approx(found["0F0"][1], abs=0.02)
    assert found["1F0"][2] > found["0F0"][2] + 20


def test_boxes_that_are_too_short_have_no_number():
    spans = [Span(0, 0.0, 100.0, None, "warm-up"), Span(0, 100.0, 100.001, None, "loss")]
    found = boxes(Timeline("t", ("cpu",), tuple(spans)).draw())
    assert found["warm-up"][3].text == "warm-up"
    assert found["loss"][3] is None


@pytest.mark.parametrize("seconds, unit", [(2, "s"), (2e-3, "ms"), (2e-6, "µs"), (2e-9, "µs")])
def test_the_axis_says_its_unit(seconds, unit):
    schedule = named("gpipe", lanes=1, microbatches=2)
    svg = simulate(schedule, [StageCost(seconds, seconds)]).draw()
    assert f"time ({unit})" in texts(svg)


def test_the_legend_says_what_there_is_and_nothing_else():
    halved = simulate(named("zbv", lanes=2, microbatches=4), [StageCost(1, 1, 1)] * 4).draw()
    assert {"forward", "backward, input half", "weight gradient"} <= set(texts(halved))
    assert "backward" not in texts(halved)
    assert any("later ones are darker" in text for text in texts(halved))
    whole = named("1f1b", lanes=2, microbatches=4)
    timeline = simulate(whole, [StageCost(1, 1)] * 2, Links(link=Link(1)), Memory([1, 1]))
    assert {"backward", "copy to the lane", "memory, with its peak"} <= set(texts(timeline.draw()))
    assert "weight gradient" not in texts(timeline.draw())
    assert "memory, with its peak" not in texts(timeline.draw(memory=False))


def test_kinds_and_stages_have_colours_of_their_own():
    svg = simulate(named("zbv", lanes=2, microbatches=4), [StageCost(1, 1, 1)] * 4).draw()
    colours = dict(re.findall(r'<title>(\d\D)0:.*?fill="(#\w+)"', svg))
    assert len(colours) == 4 * 3
    assert len({colours[key] for key in colours if key[0] in "03"}) == 6


def test_memory_is_drawn_with_its_peak():
    memory = Memory([3 * 2**20] * 2, fixed=[0, 2**20])
    schedule = named("gpipe", lanes=2, microbatches=2)
    svg = simulate(schedule, [StageCost(1, 1)] * 2, memory=memory).draw()
    assert {"6 MiB", "7 MiB"} <= set(texts(svg))


def test_names_are_escaped():
    svg = draw([Timeline("a < b & c", ("<cpu>",), (Span(0, 0.0, 1.0, None, "x < y"),))])
    assert {"a < b & c", "<cpu>", "x < y"} <= set(texts(svg))


def test_two_timelines_share_an_axis_even_if_they_begin_at_different_times():
    first = simulate(named("gpipe", lanes=1, microbatches=1), [StageCost(1, 1)])
    moved = tuple(Span(s.lane, s.start + 5, s.end + 5, s.action) for s in first.spans)
    second = Timeline("later", first.lanes, moved)
    lefts = re.findall(r'<title>0F0:.*?<rect x="([\d.]+)"', draw([first, second]))
    assert len(lefts) == 2
    assert lefts[0] == lefts[1]
