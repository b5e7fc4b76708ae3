"""The command line: ``python -m fxpipe`` or ``fxpipe``."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from fxpipe import __version__
from fxpipe.cli.errors import UserError, is_users, said
from fxpipe.cli.models import bench, compile_, explain, plan
from fxpipe.cli.passes import passes
from fxpipe.cli.schedule import schedule


class _Main(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        if not ctx.params["traceback"]:  # PyTorch logs errors of fake tensors with tracebacks
            logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
        try:
            return super().invoke(ctx)
        except UserError as error:
            if ctx.params["traceback"] and error.__cause__ is not None:
                raise error.__cause__ from None
            raise
        except Exception as error:
            if ctx.params["traceback"] or not is_users(error):
                raise
            raise UserError(said(error)) from None


@click.group(cls=_Main, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fxpipe")
@click.option("--traceback", is_flag=True, help="Show the traceback of an error.")
def main(traceback: bool) -> None:
    """A compiler that turns any PyTorch model into a pipeline over several devices.

    \b
    Examples:
      fxpipe demo
      fxpipe compile torchvision.models:resnet18 --input 16,3,224,224 --devices cpu,cpu
      fxpipe schedule 1f1b --lanes 4 --chunks 8

    The exit code is 2 for wrong arguments and for models that cannot be compiled.
    """


for command in (compile_, explain, plan, bench, schedule, passes):
    main.add_command(command)


@main.command(short_help="Train a U-Net on four stages and without a pipeline, and compare.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo-out"),
    show_default=True,
    help="Folder for the drawings.",
)
@click.option(
    "--steps", type=click.IntRange(min=1), default=60, show_default=True, help="Training steps."
)
def demo(out: Path, steps: int) -> None:
    """Train a U-Net to take noise off photographs, once on four stages and once without a pipeline,
    and compare the losses. Drawings of the pipeline are written to a folder. Started by torchrun,
    each stage is a process, a rank.

    \b
    Examples:
      fxpipe demo --steps 20
      torchrun --nproc-per-node 4 -m fxpipe demo --steps 20
    """
    from fxpipe.demo import run, run_on_ranks  # imported here, so that --help need not wait

    out.mkdir(parents=True, exist_ok=True)
    train = run_on_ranks if int(os.environ.get("WORLD_SIZE", "1")) > 1 else run
    train(out, steps, Console(soft_wrap=True))
