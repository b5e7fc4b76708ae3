"""Options that several commands have, and what they write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console

DRAWINGS = (".svg", ".dot", ".gv")


class PathTo(click.ParamType[Path]):
    """A file to write, with one of these endings; None: with any."""

    name = "file"

    def __init__(self, *endings: str) -> None:
        self.endings = endings

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        if self.endings and path.suffix not in self.endings:
            self.fail(f"{str(path)!r} does not end with {' or '.join(self.endings)}", param, ctx)
        if path.is_dir():
            self.fail(f"{str(path)!r} is a folder: give a file", param, ctx)
        return path


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
