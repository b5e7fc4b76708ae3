"""The command ``schedule``: it prints a named schedule as a grid, with its bubble and memory."""

from __future__ import annotations

from pathlib import Path

import click

from fxpipe.cli.options import path_to, write, writing
from fxpipe.schedule import NAMES, StageCost, gantt, live, named, simulate, stages_per_lane

FORWARD, INPUT, WEIGHT = 1.0, 1.0, 1.0  # durations: a whole backward takes twice a forward
LANES = 4


@click.command(
    short_help="Print a schedule, and what it costs.", epilog=f"NAME is one of {', '.join(NAMES)}."
)
@click.argument("name", type=click.Choice(NAMES), metavar="NAME")
@click.option("--lanes", type=click.IntRange(min=1), help=f"Devices. Default: {LANES}.")
@click.option(
    "--stages", type=click.IntRange(min=1), help="Default: as many as the schedule takes."
)
@click.option(
    "--chunks", type=click.IntRange(min=1), help="Micro-batches. Default: two for each lane."
)
@click.option("--draw", type=path_to(".svg"), help="Draw its timeline, as .svg.")
@click.option(
    "--csv",
    type=path_to(".csv"),
    help="Write it as torch.distributed.pipelining reads it, as .csv.",
)
def schedule(
    name: str,
    lanes: int | None,
    stages: int | None,
    chunks: int | None,
    draw: Path | None,
    csv: Path | None,
) -> None:
    """Print a schedule, a row a lane, and how much time and memory it takes.

    1F0 is the forward of stage 1 for micro-batch 0, B a backward, I and W its halves: the gradients
    of the inputs, and those of the weights.

    \b
    Examples:
      fxpipe schedule 1f1b --lanes 4 --chunks 8
      fxpipe schedule interleaved_1f1b --stages 8 --lanes 4 --draw out.svg
      fxpipe schedule zbv --lanes 2 --csv out.csv
    """
    lanes, stages = _sizes(name, lanes, stages)
    found = named(name, lanes=lanes, stages=stages, microbatches=chunks or 2 * lanes)
    timeline = simulate(found, [StageCost(FORWARD, INPUT, WEIGHT)] * found.stages)
    alive = live(found)
    click.echo(str(found))
    click.echo(
        f"\nA step takes {timeline.makespan:g} times as long as a forward of one stage, if a "
        "backward takes two, and copies nothing."
    )
    click.echo(f"bubble: {timeline.bubble:.1%} of all lanes' time")
    click.echo(
        f"bubble: {timeline.bubble_in_span:.1%} of the lanes' time from each one's first action to "
        "its last"
    )
    click.echo(f"micro-batches alive, at most, by lane: {_numbers(alive.lanes)}")
    if found.stages > lanes:
        click.echo(f"micro-batches alive, at most, by stage: {_numbers(alive.stages)}")
    if draw:
        write(draw, gantt.draw([timeline], unit=gantt.FORWARDS))
    if csv:
        said = writing(csv)
        found.to_csv(csv)
        click.echo(said)


def _sizes(name: str, lanes: int | None, stages: int | None) -> tuple[int, int]:
    """The numbers of lanes and stages: one that is not given follows from the other."""
    usual = stages_per_lane(name)
    if lanes is None:
        lanes = LANES if stages is None else max(1, stages // usual)
    return lanes, lanes * usual if stages is None else stages


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)
