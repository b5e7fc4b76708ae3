"""Of two ways the faster one is taken, which is found out by taking both."""

from __future__ import annotations

from collections.abc import Callable

from fxpipe.runtime.trial import FIRST, Trial


def ways(trial: Trial, seconds: Callable[[bool], float], runs: int) -> list[bool]:
    """Which way each of so many runs takes, where a way takes so many seconds."""
    taken = []
    for _ in range(runs):
        other = trial.takes_other()
        trial.note(other, seconds(other))
        taken.append(other)
    return taken


def test_both_ways_are_tried_and_the_faster_one_is_taken():
    for faster in (False, True):
        taken = ways(Trial(1.0), lambda other, faster=faster: 0.1 if other == faster else 0.2, 50)
        assert taken[: 2 * FIRST] == [False] * FIRST + [True] * FIRST
        assert taken[2 * FIRST :] == [faster] * (50 - 2 * FIRST)


def test_where_the_usual_way_takes_long_the_other_one_is_not_tried():
    assert not any(ways(Trial(0.1), lambda other: 0.2, 1000))


def test_the_slower_way_is_tried_again_the_sooner_the_less_that_costs():
    runs = 5000
    little, much = (
        ways(Trial(1.0), lambda other, slow=slow: slow if other else 0.1, runs).count(True) - FIRST
        for slow in (0.11, 0.4)
    )
    assert little > much > 0
    for times, more in (little, 0.01), (much, 0.3):
        assert times * more < 0.015 * runs * 0.1, "it costs a hundredth of the time, or so"


def test_a_change_of_the_work_is_noticed():
    trial = Trial(1.0)
    ways(trial, lambda other: 0.1 if other else 0.2, 20)
    assert not ways(trial, lambda other: 0.8 if other else 0.4, 20)[-1]
    trial = Trial(1.0)
    ways(trial, lambda other: 0.1 if other else 0.2, 20)
    assert not any(ways(trial, lambda other: 9.0 if other else 3.0, 200)[10:])


def test_a_run_that_is_disturbed_changes_nothing():
    trial = Trial(1.0)
    ways(trial, lambda other: 0.1 if other else 0.2, 20)
    trial.note(True, 0.4)
    assert trial.takes_other()
