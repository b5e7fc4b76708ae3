import pytest

from fxpipe.schedule import Action, Kind, Span, StageCost, Timeline, compare, named, simulate
from fxpipe.schedule.comparison import Disagreement

FORWARD = Action(0, Kind.FORWARD, 0)
SCHEDULE = named("1f1b", lanes=2, microbatches=2)


def predicted(last=2.0):
    return simulate(SCHEDULE, [StageCost(1, 1, 1), StageCost(last, 1, 1)])


def measured():
    """As predicted, but for one backward that took half a second longer."""
    slow, spans = Action(1, Kind.BACKWARD, 1), []
    for span in predicted().spans:
        late = 0.5 * (span.action == slow)
        after = 0.5 * (span.action == Action(0, Kind.BACKWARD, 1))
        spans.append(Span(span.lane, span.start + after, span.end + after + late, span.action))
    return Timeline("measured", ("cpu", "cpu"), tuple(spans))


def test_the_largest_disagreement_is_named():
    found = compare(predicted(), measured())
    assert found.largest == Disagreement(Action(1, Kind.BACKWARD, 1), 2.0, 2.5)
    assert found.largest.seconds == 0.5
    said = "largest disagreement: backward of micro-batch 1 at stage 1 (1B1), 1f1b 2 s, measured"
    assert f"{said} 2.5 s" in str(found)


def test_how_far_off_the_prediction_is():
    assert predicted().makespan == 11
    assert compare(predicted(), measured()).error == pytest.approx(0.5 / 11)
    assert "1f1b 11 s, measured 11.5 s (+4.5%)" in str(compare(predicted(), measured()))


def test_stages_are_compared_by_the_means_of_their_actions():
    stages = compare(predicted(), predicted(last=3.0)).stages
    assert stages[1, Kind.FORWARD] == (2.0, 3.0)
    assert stages[1, Kind.BACKWARD] == (2.0, 2.0)
    assert list(stages) == [(s, k) for s in (0, 1) for k in (Kind.BACKWARD, Kind.FORWARD)]
    assert "stage 1 forward: 1f1b 2 s, 1f1b 3 s" in str(compare(predicted(), predicted(last=3.0)))


def test_both_are_drawn_and_the_disagreement_outlined():
    svg = compare(predicted(), measured()).draw()
    assert svg.count('stroke="#CC0000"') == 2
    assert "largest disagreement: backward of micro-batch 1 at stage 1 (1B1)" in svg
    assert svg.count('font-weight="bold"') == 2


def test_timelines_with_nothing_in_common():
    other = Timeline("other", ("cpu",), (Span(0, 0.0, 1.0, None, "optimizer"),))
    found = compare(predicted(), other)
    assert found.largest is None
    assert "no action is in both" in str(found)
    assert "<svg" in found.draw()
