from __future__ import annotations

import pytest

from passes.partition.ways import Change, ways_out

SETTINGS = {"schedule": ["1f1b"], "chunks": [16, 32], "checkpoint": ["except_last", "always"]}


def said(fits, settings=SETTINGS, devices=2):
    """What is said, having checked that all that is tried is another case than the one given."""

    def tried(change):
        assert change.settings or change.devices is not None
        return fits(change)

    return ways_out(tried, settings, devices)


def test_the_mildest_value_of_a_setting_is_said_and_nothing_that_has_more():
    assert said(lambda c: c.settings.get("chunks", 8) >= 32) == "it would fit with chunks=32"
    assert (
        said(lambda c: "checkpoint" in c.settings or (c.devices or 2) > 2)
        == 'it would fit with checkpoint="except_last" or with 3 devices'
    )


def test_settings_that_help_only_together_are_said_together():
    assert (
        said(lambda c: c.settings.get("chunks") == 32 and "checkpoint" in c.settings)
        == 'it would fit with chunks=32 and checkpoint="except_last"'
    )


@pytest.mark.parametrize("needed", range(3, 9))
def test_the_fewest_devices_are_found(needed):
    assert said(lambda c: (c.devices or 2) >= needed) == f"it would fit with {needed} devices"


def test_no_more_devices_are_tried_than_are_needed():
    """A try takes the longer, the more devices there are."""
    tried = []

    def fits(change):
        tried.append(change.devices)
        return change.devices >= 11

    assert said(fits, {}, 8) == "it would fit with 11 devices"
    assert tried == [9, 10, 12, 11]


def test_nothing_more_is_tried_when_the_time_is_over():
    tried = []

    def fits(change):
        tried.append(change.devices)
        return change.devices >= 12

    for count, found in (2, "no change that makes it fit has been found in the time"), (3, "12"):
        tried.clear()
        is_over = lambda count=count: len(tried) >= count  # noqa: E731
        assert found in ways_out(fits, {}, 8, is_over)
        assert tried == [9, 10, 12][:count]


def test_devices_for_which_a_model_has_too_few_parts_do_not_hide_fewer_that_are_enough():
    assert said(lambda c: c.devices in (4, 5), {}, 3) == "it would fit with 4 devices"


def test_fewer_devices_with_settings_are_said_beside_more_without():
    def fits(change):
        return (change.devices or 2) >= (4 if "checkpoint" in change.settings else 7)

    assert (
        said(fits) == 'it would fit with 7 devices or with checkpoint="except_last" and 4 devices'
    )


def test_what_is_of_no_use_is_not_said():
    """A schedule that saves no device is left out, beside one that does."""

    def fits(change):
        return (change.devices or 2) >= 5

    assert said(fits) == "it would fit with 5 devices"


def test_where_nothing_helps_it_is_said_what_does_not():
    assert said(lambda c: False) == (
        "nothing that was tried makes it fit (schedule, chunks, checkpoint, up to 8 devices): give "
        "devices with more memory"
    )
    assert said(lambda c: False, {}, 3) == (
        "nothing that was tried makes it fit (up to 12 devices): give devices with more memory"
    )


def test_a_change_is_written_as_arguments():
    assert str(Change({"chunks": 16, "checkpoint": "always"}, 4)) == (
        'chunks=16 and checkpoint="always" and 4 devices'
    )
