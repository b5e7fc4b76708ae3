"""Which runs of a test with parameters are long, see ``tests/conftest.py``."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest

from tests.conftest import pytest_collection_modifyitems


class Run:
    """One run of a test, as far as the selection looks at it."""

    def __init__(self, marks, **params):
        self.function, self.callspec = Run, SimpleNamespace(params=params)
        self.marks = {each.mark.name: each.mark for each in marks}

    def get_closest_marker(self, name):
        return self.marks.get(name)

    def add_marker(self, mark):
        self.marks[mark.name] = mark


def always_run(marks, **params):
    """The values of those runs of a product of parameters that are not long."""
    runs = [Run(marks, **dict(zip(params, v, strict=True))) for v in product(*params.values())]
    pytest_collection_modifyitems(runs)
    return [tuple(run.callspec.params.values()) for run in runs if "long" not in run.marks]


def test_without_marks_all_are_run():
    assert len(always_run([], a="xyz", b="uv")) == 6


def test_each_value_is_there_and_none_more_often_than_it_has_to_be():
    found = always_run([pytest.mark.covering(1)], a="wxyz", b="uv")
    assert found == [("w", "u"), ("x", "v"), ("y", "u"), ("z", "v")]


def test_each_pair_of_values_is_there():
    found = always_run([pytest.mark.covering(2)], a="xyz", b="uvw", c=[True, False])
    assert len(found) < 18
    for a, b in product("xyz", "uvw"):
        assert any(run[:2] == (a, b) for run in found)
    for a, c in product("xyz", [True, False]):
        assert any((run[0], run[2]) == (a, c) for run in found)


def test_every_kth_of_a_list_is_there():
    assert always_run([pytest.mark.one_in(3)], a=range(8)) == [(0,), (3,), (6,)]


def test_every_kth_of_what_covers_the_values_is_there():
    marks = [pytest.mark.covering(1), pytest.mark.one_in(3)]
    assert always_run(marks, a="wxyz", b="uv") == [("w", "u"), ("z", "v")]
