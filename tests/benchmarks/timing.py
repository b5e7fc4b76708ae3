"""Times several functions in turns, so that whatever disturbs the machine disturbs all of them."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table


def keep_memory() -> None:
    """Let this process keep the memory that it has been given, where its allocator is glibc's.

    That would else go back to the system between micro-batches, to be asked for again: in a single
    thread that takes up to a quarter of the time, and a pipeline that saves it would seem faster
    than it is. All threads share one heap: one of a thread's own keeps no block of over 64 MiB, so
    that each gradient of GPT-2's head would be new memory to a lane, and not to a rank.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold, arena_max = -1, -3, -8  # malloc.h
        mallopt(trim_threshold, -1)  # never
        mallopt(mmap_threshold, 2**30)
        mallopt(arena_max, 1)


def medians(sides: dict[str, Callable[[], object]], rounds: int = 15) -> dict[str, float]:
    """Median seconds of each side, run in turns after one warm-up each."""
    for run in sides.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table on the terminal."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
