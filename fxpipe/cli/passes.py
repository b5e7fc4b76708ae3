"""The command passes: which there are, and what each does."""

from __future__ import annotations

import sys

import click

WIDTH = 100


@click.command()
def passes() -> None:
    """List the passes, in the order in which they run.

    \b
    Example: fxpipe passes
    """
    from passes import Pass

    formatter = click.HelpFormatter(width=WIDTH)
    groups: dict[str, list[type[Pass]]] = chains()
    for title, kinds in groups.items():
        with formatter.section(title):
            formatter.write_dl([(str(kind.name), about(kind)) for kind in kinds])
    click.echo(formatter.getvalue(), nl=False)
    click.echo(
        "\nfxpipe compile ... --dump DIR (or FXPIPE_DUMP=DIR) writes what each of them changes."
    )


def chains() -> dict[str, list[type]]:
    """The passes as they run, by what they lead to."""
    import passes as p

    to_pipeline = p.default_passes(devices=("cpu",), chunks=1, in_dims=(0,), out_dims=(0,))
    return {
        "Model graph to stage graph": [
            p.DeferredBatchNorm,
            p.Alias,
            p.WrittenInputs,
            p.Rows,
            p.AnalyticCost,
            p.Shared,
            p.Random,
            p.Partition,
            p.Free,
            p.Tied,
            p.Split,
            p.Devices,
        ],
        "Stage graph to pipeline graph": [type(one) for one in to_pipeline],
        "Stage graph to step graph": [p.Step],
    }


def about(kind: type) -> str:
    """What the file of a pass says of it, in one sentence."""
    from fxpipe.ir.text import summary

    _, _, said = summary(sys.modules[kind.__module__]).partition(": ")
    return said
