"""The command line: ``python -m fxpipe`` or ``fxpipe``."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """A compiler that turns any PyTorch model into a pipeline over several devices."""


@main.command()
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo-out"),
    show_default=True,
    help="Folder for the drawings.",
)
@click.option(
    "--steps", type=click.IntRange(min=1), default=60, show_default=True, help="Training steps."
)
def demo(out: Path, steps: int) -> None:
    """Train a U-Net on four stages to take noise off photographs, and the same unpipelined.

    Example: python -m fxpipe demo --steps 20
    """
    from fxpipe.demo import run  # here, so that --help needs no torch

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.ClickException(f"cannot write to {out}: {error}") from None
    run(out, steps, Console(soft_wrap=True))
