"""Constants are compared by what a program may see of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fxpipe.ir.exact import exact


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (1j, complex(-0.0, 1)), (0.0, math.nan)])
def test_numbers_that_differ_in_a_sign_are_two(one, other):
    assert exact(one) == exact(one) and exact(one) != exact(other)


@pytest.mark.parametrize("kind", [float, complex, np.float64, np.float32])
def test_every_nan_is_the_same_and_a_zero_has_a_sign(kind):
    assert exact(kind("nan")) == exact(kind("nan")) != exact(kind("inf"))
    assert exact(kind(0.0)) == exact(kind("0")) != exact(kind("-0.0"))
    assert len({exact(kind("nan")) for _ in range(2)}) == 1


@pytest.mark.parametrize("value", [1.5, -2, True, "a", None, (0.0,)])
def test_all_else_is_what_it_is(value):
    assert exact(value) is value


def test_they_are_shown_as_they_are():
    assert [repr(exact(value)) for value in (-0.0, math.nan, 1.5)] == ["-0.0", "nan", "1.5"]
