"""Memory that has been freed goes back to the system, where the C library would keep it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch

from fxpipe.ir import heap
from fxpipe.ir.heap import give_back

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

    monkeypatch.setattr(heap.ctypes, "CDLL", Library)
    heap._malloc_trim.cache_clear()
    try:
        give_back()
    finally:
        heap._malloc_trim.cache_clear()
