"""Options that several commands have, and what they write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console

DRAWINGS = (".svg", ".dot", ".gv")


def path_to(*endings: str) -> Callable[[str], Path]:
    """The type of a file to write, with one of these endings; without any: with all."""

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
    """``cpu,cpu`` as a tuple; refused if one of them is not there."""
    if value is None:
        return None
    import torch

    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count() if kind is not None else 0
    there = ["cpu", "meta", *(f"{kind.type}:{i}" for i in range(count) if kind is not None)]
    names = tuple(name.strip() for name in value.split(","))
    for name in names:
        if name not in there and (kind is None or not count or name != kind.type):
            raise click.BadParameter(
                f"there is no device {name!r} here: give some of {', '.join(there)}, with commas "
                "between them"
            )
    return names


def chunks_option(command: Callable[..., None]) -> Callable[..., None]:
    """How many micro-batches."""
    return click.option(
        "--chunks",
        type=click.IntRange(min=1),
        help="Micro-batches of a mini-batch. Default: four for each stage.",
    )(command)


def checkpoint_option(command: Callable[..., None]) -> Callable[..., None]:
    """Which micro-batches keep nothing."""
    return click.option(
        "--checkpoint",
        type=click.Choice(["never", "except_last", "always"]),
        default="never",
        show_default=True,
        help="Which micro-batches keep no activations, and compute them again in the backward.",
    )(command)


def partition_option(command: Callable[..., None]) -> Callable[..., None]:
    """Where to cut."""
    return click.option(
        "--partition",
        callback=lambda ctx, param, value: value if value == "auto" else value.split(","),
        default="auto",
        show_default=True,
        metavar="auto|NAME,NAME",
        help="The modules or nodes that begin the second stage, the third, ...",
    )(command)


def write(path: Path, text: str) -> None:
    """Write a file, and say so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    click.echo(f"wrote {path}")


@contextmanager
def working(what: str) -> Iterator[None]:
    """Says that something goes on, to a terminal only."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        yield
