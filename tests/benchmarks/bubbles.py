"""Idle time of all schedules beside their formulas. Run: python -m tests.benchmarks.bubbles

A forward and each half of a backward take one unit of time, and copies none. Idle time is counted
in two ways: over the whole step, and from a lane's first action to its last, which is the idle time
that remains when one step follows another. Memory is the largest number of micro-batches whose
activations a lane keeps, counted over all its stages, so that lanes with one stage and with two can
be compared.
"""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.table import Table

from fxpipe.schedule import (
    NAMES,
    Memory,
    Schedule,
    StageCost,
    Timeline,
    live,
    named,
    search,
    simulate,
)

LOOPED = ("interleaved_1f1b", "looped_bfs")


def formula(name: str, n: int, m: int, v: int) -> tuple[str, float]:
    """Idle time over the makespan, for ``n`` lanes, ``m`` micro-batches, ``v`` stages a lane."""
    if name in ("gpipe", "1f1b"):
        return "(n-1) / (m+n-1)", (n - 1) / (m + n - 1)
    if name in LOOPED:
        return "(n-1) / (vm+n-1)", (n - 1) / (v * m + n - 1)
    # Of the idle time of 1F1B, (n-1)(F+B+W), there is left (n-1)(F+B-W), a third.
    return "(n-1) / (3vm+n-1)", (n - 1) / (3 * v * m + n - 1)


def row(schedule: Schedule, timeline: Timeline, n: int, m: int, seconds: float) -> list[str]:
    v = schedule.stages // n
    kept = live(schedule, [1 / v] * schedule.stages).lanes
    said, expected = formula(schedule.name, n, m, v)
    return [
        schedule.name,
        str(v),
        f"{timeline.bubble:.2%}",
        f"{expected:.2%}",
        said,
        f"{timeline.bubble_in_span:.2%}",
        f"{max(kept):g}",
        f"{seconds:.2f} s",
    ]


def main(n: int = 8, m: int = 32) -> None:
    table = Table(title=f"{n} lanes, {m} micro-batches, F = B = W, no communication")
    for column in ("schedule", "stages a lane", "idle", "formula", "", "idle in own span"):
        table.add_column(column, justify="left" if column in ("schedule", "") else "right")
    table.add_column("memory", justify="right")
    table.add_column("made in", justify="right")
    for name in NAMES:
        if name == "dualpipe_v" and m < 2 * n:
            continue
        begin = time.perf_counter()
        schedule = named(name, lanes=n, microbatches=m, stages=2 * n if name in LOOPED else None)
        timeline = simulate(schedule, [StageCost(1, 1, 1)] * schedule.stages)
        table.add_row(*row(schedule, timeline, n, m, time.perf_counter() - begin))
    for v, bound in ((1, n), (1, None), (2, n / 2), (2, n)):
        begin = time.perf_counter()
        memory = Memory([1 / v] * v * n)
        found = search([StageCost(1, 1, 1)] * v * n, n, m, memory=memory, max_bytes=bound)
        cells = row(found.schedule, found.timeline, n, m, time.perf_counter() - begin)
        cells[0] += "" if bound is None else f", memory {bound:g}"
        table.add_row(*cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
