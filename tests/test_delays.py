"""A few of the random delays that ``python -m tests.delays`` tries."""

from __future__ import annotations

import pytest

from tests.delays import MODELS, WAYS, Subject

PAIRS = list(zip(MODELS, WAYS * 2, strict=False))  # each model in another way


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "way"), PAIRS)
def test_whichever_lane_is_slow_the_bits_are_the_same(name, way):
    subject = Subject(name, way)
    try:
        assert [seed for seed in range(3) if not subject.is_the_same(seed)] == []
    finally:
        subject.pipe.close()


def test_a_gradient_that_is_added_in_another_order_would_be_noticed():
    subject = Subject("MLP", "gpipe")
    subject.expected[1] = subject.expected[1] + 1e-7
    assert not subject.is_the_same(0)
    subject.pipe.close()
