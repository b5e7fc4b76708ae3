"""The command line of the kit: its options, and the exit status."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from tests.gpu.part import OK, SKIPPED, Outcome
from tests.gpu.parts import PARTS
from tests.gpu.runner import Runner
from tests.gpu.table import overview

console = Console()


def _listed(context: click.Context, _: click.Parameter, value: bool) -> None:
    """Print the parts, and end."""
    if value:
        for part in PARTS:
            console.print(f"{part.name:16} {part.title} (at most {part.seconds:.0f} s)")
        context.exit()


def _say(outcome: Outcome) -> None:
    why = "; ".join(text.split("\n")[0] for text in (outcome.why, *outcome.problems) if text)
    line = f"{outcome.name:16} {outcome.status:8} {outcome.seconds:6.1f} s  {why[:300]}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--dry-run", "dry", is_flag=True, help="Small sizes on the simulated accelerator.")
@click.option("--parts", "names", default="", help="Only these parts, by name: bits,zoo.")
@click.option("--minutes", default=9.0, show_default=True, help="For all parts together.")
@click.option("--list", is_flag=True, is_eager=True, expose_value=False, callback=_listed)
def main(folder: Path, dry: bool, names: str, minutes: float) -> None:
    """Find out on a machine with CUDA GPUs what only such a machine can tell.

    Writes results.json and results.txt into FOLDER, after each part. The exit status is 1 if a part
    found a problem or did not end.
    """
    known, wanted = {part.name for part in PARTS}, [n for n in names.split(",") if n]
    if unknown := [name for name in wanted if name not in known]:
        raise click.BadParameter(f"no part is named {', '.join(unknown)}: see --list")
    parts = [part for part in PARTS if not wanted or part.name in wanted]
    if dry:  # what the variables switch on is CUDA's, and a machine for tests may be busy
        parts = [replace(part, environment={}, seconds=10 * part.seconds) for part in parts]
    outcomes = Runner(parts, folder.resolve(), dry=dry, seconds=60 * minutes, say=_say).run()
    console.print(overview(outcomes))
    console.print(f"{folder / 'results.txt'} has all tables, {folder / 'results.json'} the same")
    raise SystemExit(int(any(outcome.status not in (OK, SKIPPED) for outcome in outcomes)))
