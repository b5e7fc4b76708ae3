"""Time several things against each other: in turns, so that what disturbs one disturbs all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table


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
