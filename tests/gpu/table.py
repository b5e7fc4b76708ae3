"""The results as text: a table of all parts, then the table of each part."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.gpu.part import Outcome, write_text

WIDTH = 140


def write_table(path: Path, results: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Write the tables into a file."""
    text = io.StringIO()
    console = Console(file=text, width=WIDTH, force_terminal=False)
    kind = "a dry run, whose figures mean nothing" if results["dry_run"] else "on CUDA"
    state = "complete" if results["complete"] else "not complete"
    console.print(f"{results['started']}, {results['seconds']} s, {kind}, {state}\n")
    console.print(overview(outcomes))
    for outcome in outcomes:
        _details(console, outcome)
    write_text(path, text.getvalue())


def overview(outcomes: Sequence[Outcome]) -> Table:
    """A line for each part."""
    table = Table("part", "what", "", "s", "CPU s", "why", box=box.SIMPLE)
    for each in outcomes:
        why = [each.why, *each.problems][:3]
        times = (f"{s:.1f}" if s else "" for s in (each.seconds, each.cpu_seconds))
        said = "\n".join(_short(w) for w in why if w)
        table.add_row(*map(escape, (each.name, each.title, each.status, *times, said)))
    return table


def _short(text: str) -> str:
    line = text.strip().split("\n")[0]
    return line if len(line) <= 200 else line[:199] + "…"


def _details(console: Console, outcome: Outcome) -> None:
    if not (outcome.rows or outcome.notes or outcome.problems or outcome.traceback):
        return
    console.print(f"\n== {escape(outcome.name)}: {escape(outcome.title)} ({outcome.status})")
    if outcome.rows:
        console.print(_table(outcome.rows))
    for note in outcome.notes:
        console.print(escape(note))
    for problem in outcome.problems:
        console.print(f"! {escape(problem)}")
    for name in outcome.files:
        console.print(f"file: {escape(name)}")
    if outcome.traceback:
        console.print(escape("\n".join(outcome.traceback.splitlines()[-12:])))


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*columns, box=box.SIMPLE)
    for row in rows:
        table.add_row(*(escape(_text(row.get(name))) for name in columns))
    return table


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
