"""The command ``passes``: it lists the passes in the order in which they run, and says what each
does."""

from __future__ import annotations

import click

from fxpipe.cli.factory import chain_named


@click.command()
@click.argument("chain", required=False, metavar="[MODULE:CHAIN]")
def passes(chain: str | None) -> None:
    """List the passes, in the order in which they run.

    CHAIN is a chain of your own in MODULE, or a function that gives one; without it, the default
    chain is listed.

    \b
    Examples:
      fxpipe passes
      fxpipe passes mine:chain
    """
    from passes import default_chain

    click.echo(str(chain_named(chain) if chain else default_chain()))
    click.echo(
        "\nfxpipe compile ... --dump DIR (or FXPIPE_DUMP=DIR) writes what each of them changes."
    )
