"""Which sizes both ends of an edge expect of its messages."""

from __future__ import annotations

import torch

from fxpipe.runtime.ranks.expected import Expected
from fxpipe.runtime.ranks.packing import Strided


def noted(expected, *runs):
    """What is expected of message 0 ahead of each of these runs, and after them."""
    found = []
    for sizes in runs:
        found.append(expected.of(0))
        expected.note(0, sizes)
    return [*found, expected.of(0)]


def test_nothing_is_expected_of_a_message_that_nobody_knows_and_then_what_it_was():
    assert noted(Expected(), (12,), (12,)) == [None, (12,), (12,)]


def test_what_follows_from_shapes_is_expected_in_the_first_run():
    assert noted(Expected([(12, 8)]), (12, 8)) == [(12, 8), (12, 8)]


def test_a_first_message_of_another_size_tells_what_shapes_did_not():
    """A gradient of 12 bytes is missing: no shape says that, but it stays so."""
    assert noted(Expected([(12,)]), (), ()) == [(12,), (), ()]


def test_sizes_that_differ_from_run_to_run_travel_ahead_for_good():
    assert noted(Expected([(12,)]), (12,), (4,), (4,), (4,)) == [(12,), (12,), None, None, None]


def test_each_message_is_expected_by_itself():
    expected = Expected([(12,), (8,)])
    expected.note(0, (4,))
    expected.note(0, (12,))
    assert [expected.of(number) for number in range(3)] == [None, (8,), None]


def test_a_message_is_taken_to_be_the_tensor_that_it_was_until_it_is_something_else():
    """A vector, twice; nothing, as where a gradient is missing; and the vector again."""
    expected, vector = Expected([(48,)]), Strided.of(torch.ones(12))
    found = []
    for sizes, alone in [((48,), vector), ((48,), vector), ((), None), ((48,), vector)]:
        found.append(expected.alone(0))
        expected.note(0, sizes, alone)
    assert [*found, expected.alone(0)] == [None, vector, vector, None, None]
