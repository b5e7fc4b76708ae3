"""While a model is compiled, older objects are no business of the garbage collector; afterwards,
memory that is free goes back to the system."""

from __future__ import annotations

import ctypes
import gc
import os
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.compiler import garbage
from fxpipe.compiler.garbage import give_back, older_objects_set_aside


class Cycle:
    def __init__(self):
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_is_frozen():
    assert not gc.get_freeze_count()
    yield
    assert not gc.get_freeze_count()


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
        assert gc.get_freeze_count()


def test_what_somebody_else_has_frozen_stays_frozen():
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with older_objects_set_aside():
            pass
        assert gc.get_freeze_count() == count
    finally:
        gc.unfreeze()


class Counts(nn.Module):
    def forward(self, x):
        Counts.frozen.append(gc.get_freeze_count())
        return x * 2


def test_a_model_is_compiled_so_also_if_that_fails():
    Counts.frozen = []
    with fxpipe.compile(nn.Sequential(Counts(), nn.Linear(4, 4)), ["cpu"] * 2) as pipe:
        with pytest.raises(RuntimeError):
            pipe(torch.randn(4, 5))
        assert Counts.frozen and all(Counts.frozen)
        pipe(torch.randn(4, 4))


STATUS = Path("/proc/self/status")
is_glibc = (
    STATUS.exists()
    and hasattr(ctypes.CDLL(None), "malloc_trim")
    and "LD_PRELOAD" not in os.environ  # which may load another allocator
)


def resident() -> int:
    """The resident set of this process, in KiB."""
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@pytest.mark.skipif(not is_glibc, reason="the C library is not glibc")
def test_memory_between_pieces_that_are_in_use_goes_back_to_the_system():
    pieces = [torch.ones(2**14) for _ in range(2000)]  # of 64 KiB, too small for a map of their own
    kept = pieces[::100]
    before = resident()
    del pieces
    give_back()
    assert resident() < before - 80 * 2**10
    assert all(bool(piece.all()) for piece in kept)


def test_nothing_is_done_where_the_c_library_has_no_such_function(monkeypatch):
    class Library:
        def __init__(self, name):
            assert name is None

    monkeypatch.setattr(garbage.ctypes, "CDLL", Library)
    garbage._malloc_trim.cache_clear()
    try:
        give_back()
    finally:
        garbage._malloc_trim.cache_clear()
