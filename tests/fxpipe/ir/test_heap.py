"""Memory that has been freed goes back to the system, where the C library would keep it."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest
import torch

from fxpipe.ir import heap
from fxpipe.ir.heap import forget_level, give_back, keep_low, resident

is_linux = Path("/proc/self/statm").exists()
is_glibc = (
    is_linux
    and hasattr(ctypes.CDLL(None), "malloc_trim")
    and "LD_PRELOAD" not in os.environ  # which may load another allocator
)


@pytest.mark.skipif(not is_glibc, reason="the C library is not glibc")
def test_memory_between_pieces_that_are_in_use_goes_back_to_the_system():
    pieces = [torch.ones(2**14) for _ in range(2000)]  # of 64 KiB, too small for a map of their own
    kept = pieces[::100]
    before = resident()
    del pieces
    give_back()
    assert resident() < before - 80 * 2**20
    assert all(bool(piece.all()) for piece in kept)


@pytest.mark.skipif(not is_linux, reason="the system does not say how much memory is in use")
def test_memory_counts_once_it_is_written_to():
    size = 2**26  # half of it is more than what else of the process comes and goes meanwhile
    with mmap.mmap(-1, size) as piece:
        before = resident()
        piece[: size // 8] = bytes(size // 8)
        assert resident() < before + size // 2
        piece.seek(0)
        for _ in range(size // 2**20):
            piece.write(bytes(2**20))
        assert resident() > before + size // 2


def test_memory_is_kept_as_far_as_it_has_been_in_use_at_one_time(monkeypatch):
    has, in_use, given = [0], [0], []

    def give_back():
        given.append(has[0])
        has[0] = in_use[0]

    monkeypatch.setattr(heap, "resident", lambda: has[0])
    monkeypatch.setattr(heap, "give_back", give_back)
    forget_level()
    for has[0], in_use[0] in [(10, 10), (12, 11), (20, 15), (17, 12), (18, 10), (16, 2), (19, 9)]:
        keep_low(2)
    assert given == [10, 20, 18, 19], "10 + 2, and then 15 + 2 are no reason"
    forget_level()
    has[:] = in_use[:] = [1]
    keep_low(2)
    assert given[4:] == [1]


def test_nothing_is_done_where_the_c_library_has_no_such_function(monkeypatch):
    class Library:
        def __init__(self, name):
            assert name is None

    monkeypatch.setattr(heap.ctypes, "CDLL", Library)
    heap._malloc_trim.cache_clear()
    try:
        give_back()
    finally:
        heap._malloc_trim.cache_clear()
