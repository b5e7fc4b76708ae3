"""The command ``passes``: it lists the passes in the order in which they run, and says what each
does."""

from __future__ import annotations

import click


@click.command()
def passes() -> None:
    """List the passes, in the order in which they run.

    \b
    Example: fxpipe passes
    """
    from passes import default_chain

    click.echo(str(default_chain()))
    click.echo(
        "\nfxpipe compile ... --dump DIR (or FXPIPE_DUMP=DIR) writes what each of them changes."
    )
