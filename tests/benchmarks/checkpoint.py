"""fxpipe.checkpoint beside torch.utils.checkpoint. Run: python -m tests.benchmarks.checkpoint

The table has a row for each situation. It says whether the results are bit for bit those without a
checkpoint, how often functions run in forward and backward, and how many bytes the first outermost
call leaves saved.
"""

from __future__ import annotations

import sys
from collections import Counter

from rich.console import Console
from rich.table import Table

from tests.checkpoint_cases import CASES, Outcome, rows


def cells(verdict: str, outcome: Outcome) -> tuple[str, str, str]:
    kept = "" if outcome.kept is None else str(outcome.kept)
    return verdict, str(outcome.calls), kept


def main() -> None:
    table = Table(title=f"{len(CASES)} situations")
    table.add_column("situation")
    for whose in "torch", "fxpipe":
        table.add_column(whose)
        for column in "calls", "bytes":
            table.add_column(column, justify="right")
    found: Counter[tuple[str, str]] = Counter()
    for name, theirs, their_outcome, ours, our_outcome in rows():
        table.add_row(name, *cells(theirs, their_outcome), *cells(ours, our_outcome))
        found[theirs, ours] += 1
    console = Console(width=130 if not sys.stdout.isatty() else None)
    console.print(table)
    for (theirs, ours), count in found.most_common():
        console.print(f"{count:4} times: torch {theirs}, fxpipe {ours}")


if __name__ == "__main__":
    main()
