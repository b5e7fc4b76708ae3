"""Options, file output and a progress bar that several commands share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from fxpipe.cli.factory import chain_named
from fxpipe.ir.progress import listening
from fxpipe.schedule.catalogue import NAMES

DRAWINGS = (".svg", ".dot", ".gv")


def path_to(*endings: str) -> Callable[[str], Path]:
    """An option type for a file to be written, whose name has one of these endings; without any
    endings given, any name will do."""

    def file(value: str) -> Path:
        path = Path(value)
        if endings and path.suffix not in endings:
            raise click.BadParameter(f"{value!r} does not end with {' or '.join(endings)}")
        if path.is_dir():
            raise click.BadParameter(f"{value!r} is a folder: give a file")
        return path

    return file


def devices_of(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[str, ...] | None:
    """Parse a list of devices such as ``cpu,cpu``; a device that this machine lacks is refused."""
    if value is None:
        return None
    import torch

    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count() if kind is not None else 0
    there = ["cpu", *(f"{kind.type}:{i}" for i in range(count) if kind is not None)]
    names = tuple(name.strip() for name in value.split(","))
    for name in names:
        if name not in there and (kind is None or not count or name != kind.type):
            raise click.BadParameter(
                f"there is no device {name!r} here: give some of {', '.join(there)}, with commas "
                "between them"
            )
    return names


devices_option = click.option(
    "--devices",
    callback=devices_of,
    metavar="NAME,NAME",
    help="One for each lane: cpu,cpu or cuda:0,cuda:1. Default: every accelerator, or two CPU "
    "lanes.",
)

_PIPELINE = (
    click.option(
        "--chunks",
        type=click.IntRange(min=1),
        help="Micro-batches of a mini-batch. Default: four for each stage.",
    ),
    click.option(
        "--schedule",
        type=click.Choice([*NAMES, "auto"]),
        default="gpipe",
        show_default=True,
        help="The order of a training step.",
    ),
    click.option(
        "--stages", type=click.IntRange(min=1), help="Stages in all. Default: by the schedule."
    ),
    click.option(
        "--partition",
        callback=lambda ctx, param, value: value if value == "auto" else value.split(","),
        default="auto",
        show_default=True,
        metavar="auto|NAME,NAME",
        help="The modules or nodes that begin the second stage, the third, ...",
    ),
    click.option(
        "--checkpoint",
        type=click.Choice(["never", "except_last", "always"]),
        default="never",
        show_default=True,
        help="Which micro-batches keep no activations, and compute them again in the backward.",
    ),
    click.option(
        "--passes",
        callback=lambda ctx, param, value: value and chain_named(value),
        metavar="MODULE:CHAIN",
        help="The chain of passes to run, or a function that gives it. Default: see fxpipe passes.",
    ),
)


def pipeline_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say how a pipeline is cut, checkpointed and scheduled to a command."""
    for option in reversed(_PIPELINE):
        command = option(command)
    return command


def writing(path: Path) -> str:
    """Make the folder of a file that is about to be written; returns the message to print then."""
    is_new = not path.parent.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    return f"wrote {path}" + f" (in a new folder, {path.parent})" * is_new


def write(path: Path, text: str) -> None:
    """Write a file, and print its path."""
    said = writing(path)
    path.write_text(text, encoding="utf-8")
    click.echo(said)


@contextmanager
def working(what: str, parts: int | None = None) -> Iterator[None]:
    """Show a progress bar on stderr inside the ``with`` block, if that is a terminal.

    ``parts``: about how many parts the work has, each of which the bar names; None if unknown.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(what, total=parts)
        count = itertools.count()

        def show(part: str) -> None:
            done = next(count) if parts is None else min(next(count), parts - 1)
            progress.update(bar, completed=done, description=f"{what}: {part}", refresh=True)

        with listening(show):
            yield
