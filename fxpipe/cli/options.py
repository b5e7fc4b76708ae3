"""Options, file output and a progress bar that several commands share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from fxpipe.cli.factory import chain_named
from fxpipe.ir.progress import listening
from fxpipe.schedule.catalogue import NAMES

DRAWINGS = (".svg", ".dot", ".gv")


def path_to(*endings: str) -> Callable[[str], Path]:
    """An option type for a file to be written. Its name has to have one of these endings; if none
    are given, any name will do."""

    def file(value: str) -> Path:
        path = Path(value)
        if endings and path.suffix not in endings:
            raise click.BadParameter(f"{value!r} does not end with {' or '.join(endings)}")
        if path.is_dir():
            raise click.BadParameter(f"{value!r} is a folder: give a file")
        return path

    return file


def devices_of(ctx: click.Context, param: click.Parameter, value: str | None) -> list[str] | None:
    """Parse a list of devices such as ``cpu,cpu``; a device that this machine lacks is refused."""
    if value is None:
        return None
    import torch

    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count() if kind is not None else 0
    there = ["cpu", *(f"{kind.type}:{i}" for i in range(count) if kind is not None)]
    names = [name.strip() for name in value.split(",")]
    for name in names:
        if name not in there and (kind is None or not count or name != kind.type):
            raise click.BadParameter(
                f"there is no device {name!r} here: give some of {', '.join(there)}, with commas "
                "between them"
            )
    return names


def memory_of(value: str) -> str | list[str]:
    """One size for all lanes, or a list with one for each."""
    sizes = [size.strip() for size in value.split(",")]
    return sizes[0] if len(sizes) == 1 else sizes


def _chunks_of(ctx: click.Context, param: click.Parameter, value: str | None) -> int | str | None:
    """The number of micro-batches, or "auto"."""
    if value is None or value == "auto":
        return value
    number: Any = click.IntRange(min=1)
    try:
        return int(number.convert(value, param, ctx))
    except click.BadParameter as error:
        raise click.BadParameter(f"{error.message} Or give auto, for the fastest.") from None


def _segments_of(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> int | str | list[int] | None:
    """The number of segments, one number for each stage, or "auto"."""
    if value is None or value == "auto":
        return value
    number: Any = click.IntRange(min=1)
    numbers = [int(number.convert(each.strip(), param, ctx)) for each in value.split(",")]
    return numbers if "," in value else numbers[0]


devices_option = click.option(
    "--devices",
    callback=devices_of,
    metavar="NAME,NAME",
    help="A device for each lane, such as cpu,cpu or cuda:0,cuda:1. Default: every accelerator, or "
    "cpu,cpu.",
)

_PIPELINE = (
    click.option(
        "--chunks",
        callback=_chunks_of,
        metavar="NUMBER|auto",
        help="The number of micro-batches in a mini-batch; auto takes the fastest. Default: four "
        "for each stage; with --schedule auto, the fastest.",
    ),
    click.option(
        "--schedule",
        type=click.Choice([*NAMES, "auto"], case_sensitive=False),
        default="gpipe",
        show_default=True,
        help="The schedule of a training step, in the literature's names; auto takes the fastest.",
    ),
    click.option(
        "--stages",
        type=click.IntRange(min=1),
        help="The number of stages. Default: as many for each lane as the schedule takes.",
    ),
    click.option(
        "--partition",
        callback=lambda ctx, param, value: value if value == "auto" else value.split(","),
        default="auto",
        show_default=True,
        metavar="auto|NAME,NAME",
        help="Where to cut: the names of the modules or nodes that begin the second stage, the "
        "third, and so on; auto balances the stages by their costs.",
    ),
    click.option(
        "--boundaries",
        callback=lambda ctx, param, value: value and value.split(","),
        metavar="NAME,NAME",
        help="Where an automatic cut may be: at the begin and the end of each module whose path, "
        "or the end of it, is one of these, such as layers.* for cuts between layers only.",
    ),
    click.option(
        "--checkpoint",
        callback=lambda ctx, param, value: value.split(",") if "," in value else value,
        default="never",
        show_default=True,
        metavar="MODE|MODE,MODE",
        help="Which micro-batches keep no activations, but recompute them in the backward: never, "
        "except_last or always; selective, for all but the results of products; offload, for "
        "activations that wait in the host's memory, always 1/2 or offload 1/2, for half of "
        "each stage; one of these for each stage; or auto, for what fits the memory and takes "
        "least time.",
    ),
    click.option(
        "--checkpoint-segments",
        callback=_segments_of,
        metavar="NUMBER|auto|NUMBER,NUMBER",
        help="In how many parts a checkpointed stage is recomputed, one at a time; one number for "
        "each stage; or auto, for more than one where nothing fits otherwise. Default: auto with "
        "--checkpoint auto, else 1.",
    ),
    click.option(
        "--memory",
        callback=lambda ctx, param, value: value and memory_of(value),
        metavar="SIZE|SIZE,SIZE",
        help="The memory that a training step may take on each lane, such as 20GiB, or one size "
        "for each lane. Default: what the devices have.",
    ),
    click.option(
        "--optimizer",
        help="The optimizer whose states count as memory: one of torch.optim, such as sgd. "
        "Default: adam.",
    ),
    click.option(
        "--training/--inference",
        default=True,
        show_default=True,
        help="Whether the model is to be trained, or only computes outputs: then no memory is "
        "counted for gradients, and the cut is balanced by the time of the forward.",
    ),
    click.option(
        "--passes",
        callback=lambda ctx, param, value: value and chain_named(value),
        metavar="MODULE:CHAIN",
        help="A chain of passes, or a function that returns one. Default: the chain that the "
        "command `fxpipe passes` lists.",
    ),
)


def pipeline_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say how a pipeline is cut, checkpointed and scheduled to a command."""
    for option in reversed(_PIPELINE):
        command = option(command)
    return command


def writing(path: Path) -> str:
    """Make the folder of a file that is about to be written. Returns the message to print when the
    file has been written."""
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
    """Show a progress bar on stderr inside the ``with`` block, if stderr is a terminal.

    ``what`` is being done; the bar shows it with the part that is under way, as ``report_progress``
    names it. ``parts``: about how many parts there are; None if that is not known.
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
