"""The command ``passes``: it lists the passes in the order in which they run, and says what each
does."""

from __future__ import annotations

import click

from fxpipe.cli.factory import chain_named


@click.command()
@click.argument("chain", required=False, metavar="[MODULE:CHAIN]")
def passes(chain: str | None) -> None:
    """List the passes, in the order in which they run.

    CHAIN is the name in MODULE of a chain of your own, or of a function that returns one. Without
    MODULE:CHAIN, the default chain is listed.

    \b
    Examples:
      fxpipe passes
      fxpipe passes mine:chain
    """
    from passes import default_chain

    click.echo(str(chain_named(chain) if chain else default_chain()))
    click.echo(
        "\nTo see what each pass changes, use fxpipe compile ... --dump DIR (or FXPIPE_DUMP=DIR)."
    )
