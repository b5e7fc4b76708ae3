"""The command ``schedule``: it prints a named schedule as a grid, with its bubble and memory."""

from __future__ import annotations

from pathlib import Path

import click

from fxpipe.cli.options import path_to, write, writing
from fxpipe.schedule import NAMES, StageCost, gantt, live, named, simulate, stages_per_lane

# Durations of a forward and of the halves of a backward, which takes twice as long as a forward.
FORWARD, INPUT, WEIGHT = 1.0, 1.0, 1.0
LANES = 4


@click.command(
    short_help="Print a schedule, its bubble, and how much memory it takes.",
    epilog=f"NAME is one of {', '.join(NAMES)}.",
)
@click.argument("name", type=click.Choice(NAMES, case_sensitive=False), metavar="NAME")
@click.option(
    "--lanes", type=click.IntRange(min=1), help=f"The number of lanes (devices). Default: {LANES}."
)
@click.option(
    "--stages",
    type=click.IntRange(min=1),
    help="The number of stages. Default: as many for each lane as the schedule takes.",
)
@click.option(
    "--chunks",
    type=click.IntRange(min=1),
    help="The number of micro-batches. Default: two for each lane.",
)
@click.option("--draw", type=path_to(".svg"), help="Draw the timeline to a file, .svg.")
@click.option(
    "--csv",
    type=path_to(".csv"),
    help="Write the schedule to a file, .csv, that torch.distributed.pipelining can load.",
)
def schedule(
    name: str,
    lanes: int | None,
    stages: int | None,
    chunks: int | None,
    draw: Path | None,
    csv: Path | None,
) -> None:
    """Print a schedule, one row for each lane, and how much time and memory it takes.

    1F0 is the forward of stage 1 for micro-batch 0, and 1B0 is its backward. The halves of a
    backward are 1I0, the gradients of the inputs, and 1W0, the gradients of the weights.

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
        "backward takes as long as two forwards and copies take no time."
    )
    click.echo(f"bubble: {timeline.bubble:.1%} of all lanes' time")
    click.echo(
        f"bubble: {timeline.bubble_in_span:.1%} of the lanes' time, if a lane's time begins with "
        "its first action and ends with its last"
    )
    click.echo(f"most micro-batches alive at once, by lane: {_numbers(alive.lanes)}")
    if found.stages > lanes:
        click.echo(f"most micro-batches alive at once, by stage: {_numbers(alive.stages)}")
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
