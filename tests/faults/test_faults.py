"""A part of the table of faults that ``python -m tests.faults`` goes through as a whole."""

from __future__ import annotations

import pytest

from tests.faults.table import SETTINGS, Subject, cells

EVERY = 23


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_after_a_fault_nothing_waits_nothing_is_left_and_the_next_call_is_right(setting):
    subject = Subject(setting)
    try:
        for place, number, kind in list(cells(subject))[::EVERY]:
            assert subject.fails((place, number), kind) is None, (place, number, kind)
        assert subject.living() <= subject.tensors
    finally:
        subject.pipe.close()
