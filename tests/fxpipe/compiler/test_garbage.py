"""While a model is compiled, older objects are no business of the garbage collector; afterwards,
memory that is free goes back to the system."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.compiler.garbage import AT_ONCE, OF_PYTHON, older_objects_set_aside


class Cycle:
    def __init__(self):
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_is_frozen():
    assert gc.get_freeze_count() < OF_PYTHON
    yield
    assert gc.get_freeze_count() < OF_PYTHON


def test_older_objects_are_not_searched_and_newer_ones_are():
    older = Cycle()
    gc.collect()
    with older_objects_set_aside():
        was_older = weakref.ref(older)
        del older
        newer = Cycle()
        was_newer = weakref.ref(newer)
        del newer
        gc.collect()
        assert was_older() is not None and was_newer() is None
    gc.collect()
    assert was_older() is None


def test_garbage_that_is_young_is_collected_ahead():
    gc.collect()
    young = Cycle()
    was_young = weakref.ref(young)
    del young
    with older_objects_set_aside():
        assert was_young() is None


def test_objects_are_set_aside_until_the_last_of_several_compilations_ends():
    with older_objects_set_aside():
        with older_objects_set_aside():
            pass
        assert gc.get_freeze_count() > OF_PYTHON


def test_what_somebody_else_has_frozen_stays_frozen():
    frozen = Cycle()
    gc.freeze()
    try:
        with older_objects_set_aside():
            pass
        was_frozen = weakref.ref(frozen)
        del frozen
        gc.collect()
        assert was_frozen() is not None
    finally:
        gc.unfreeze()
    gc.collect()
    assert was_frozen() is None


@pytest.fixture
def thresholds():
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


def test_garbage_is_looked_for_less_often_until_the_last_compilation_ends(thresholds):
    gc.set_threshold(700, 10, 10)
    with older_objects_set_aside():
        with older_objects_set_aside():
            pass
        assert gc.get_threshold() == (AT_ONCE, 10, 10)
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [0, 10 * AT_ONCE])
def test_a_threshold_that_somebody_else_has_set_is_kept(thresholds, own):
    gc.set_threshold(own, 10, 10)
    with older_objects_set_aside():
        assert gc.get_threshold() == (own, 10, 10)
    assert gc.get_threshold() == (own, 10, 10)


class Counts(nn.Module):
    def forward(self, x):
        Counts.frozen.append(gc.get_freeze_count())
        return x * 2


def test_a_model_is_compiled_so_also_if_that_fails():
    Counts.frozen = []
    with fxpipe.compile(nn.Sequential(Counts(), nn.Linear(4, 4)), ["cpu"] * 2) as pipe:
        with pytest.raises(RuntimeError):
            pipe(torch.randn(4, 5))
        assert Counts.frozen and min(Counts.frozen) > OF_PYTHON
        pipe(torch.randn(4, 4))


def test_memory_that_is_free_is_given_back_at_the_end(monkeypatch):
    given = []
    monkeypatch.setattr("fxpipe.compiler.garbage.give_back", lambda: given.append(True))
    with older_objects_set_aside():
        assert not given
    assert given
