"""Commands that take a model: compile, explain, plan and bench."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fxpipe.cli.factory import Given, Shape, called_with, factory_argument, load
from fxpipe.cli.options import (
    DRAWINGS,
    devices_option,
    path_to,
    pipeline_options,
    working,
    write,
    writing,
)
from fxpipe.ir.devices import NAMES

if TYPE_CHECKING:
    from fxpipe.pipeline import Pipeline

PLANNING = 4  # the parts of planning that the progress bar counts: trace, cost, partition, schedule


_CALLS = (
    "The calls above are Python, in which model and example_inputs stand for what FACTORY and\n"
    "--input give. The options of this command go by the same names: chunks=8 is --chunks 8."
)


def _compiled(given: Given, **options: Any) -> Pipeline:
    import fxpipe

    with called_with(given), working("compiling", _parts()):
        return fxpipe.compile(
            given.model,
            example_inputs=given.args,
            example_kwargs=given.kwargs or None,
            **options,
        )


def _parts() -> int:
    """The number of steps that a compilation reports: the trace, and each pass to the pipeline
    graph."""
    from passes.chain import Level, default_chain

    return 1 + sum(entry.leads_to != Level.STEP for entry in default_chain().entries)


@click.command("compile")
@factory_argument
@devices_option
@pipeline_options
@click.option(
    "--draw", type=path_to(*DRAWINGS), help="Draw the graph to a file: .svg, .dot or .gv."
)
@click.option(
    "--level",
    type=click.Choice(["model", "stage", "pipeline", "step"]),
    default="pipeline",
    show_default=True,
    help="Which graph to draw.",
)
@click.option(
    "--stage", type=click.IntRange(min=0), help="Draw only this stage of the graph, node by node."
)
@click.option(
    "--microbatch",
    type=click.IntRange(min=0),
    help="Draw only this micro-batch of the graph, node by node.",
)
@click.option(
    "--timeline", type=path_to(".svg"), help="Draw the predicted training step to a file, .svg."
)
@click.option(
    "--report",
    type=path_to(),
    help="Write the report to a file: text, or as .html a page with the drawings, the passes and "
    "the code too.",
)
@click.option(
    "--code", type=path_to(".py"), help="Write the code of the pipeline graph to a file, .py."
)
@click.option(
    "--dump",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the graph after each pass to a folder, whose index.html shows the changes.",
)
def compile_(
    factory: str,
    shapes: tuple[Shape, ...],
    draw: Path | None,
    level: str,
    stage: int | None,
    microbatch: int | None,
    timeline: Path | None,
    report: Path | None,
    code: Path | None,
    dump: Path | None,
    **options: Any,
) -> None:
    """Compile a model to a pipeline, and print the report.

    FACTORY is a function or class without arguments in MODULE. It returns a model, or a tuple of a
    model and its example inputs, which are a tensor, a tuple, or a dict of keyword arguments.

    \b
    Examples:
      fxpipe compile models:build --devices cpu,cpu --chunks 8 --schedule 1f1b
      fxpipe compile fxpipe.demo:UNet --input 16,3,32,32 --draw out.svg --level step
      fxpipe compile models:build --draw out.svg --stage 1 --microbatch 0
      fxpipe compile models:build --dump passes --report out.html
    """
    if draw is None and (stage is not None or microbatch is not None):
        raise click.UsageError("--stage and --microbatch say what to draw: give --draw, too")
    given = load(factory, shapes)
    with _compiled(given, dump=dump, **options) as pipe:
        text = pipe.report()
        click.echo(text, nl=False)
        if report and report.suffix == ".html":
            said = writing(report)
            with working("writing the report", 1):
                pipe.report_html(report)
            click.echo(said)
        elif report:
            write(report, text)
        if code:
            write(code, pipe.code)
        if timeline:
            write(timeline, pipe.timeline().draw())
        if draw:
            from fxpipe.inspect.draw import render_svg

            with working("drawing"):
                source = pipe.draw(level, stage=stage, microbatch=microbatch)
                drawing = render_svg(source) if draw.suffix == ".svg" else source.source
            write(draw, drawing)
    if dump:
        click.echo(f"wrote {dump / 'index.html'}, and the files that it links to")


@click.command(short_help="Say in sentences what limits the speed, and what would help.")
@factory_argument
@devices_option
@pipeline_options
def explain(factory: str, shapes: tuple[Shape, ...], **options: Any) -> None:
    """Compile a model, and say in plain sentences where its batch is, what has traced it, where it
    is cut, what limits the speed, and which calls of fxpipe.compile would help most.

    \b
    Examples:
      fxpipe explain models:build --devices cpu,cpu --chunks 8
      fxpipe explain fxpipe.demo:UNet --input 16,3,32,32 --schedule 1f1b
    """
    given = load(factory, shapes)
    with _compiled(given, **options) as pipe:
        with working("asking the planner"):
            said = str(pipe.explain())
        click.echo(f"{said}\n\n{_CALLS}")


@click.command(short_help="Predict a pipeline for devices that need not be here.")
@factory_argument
@click.option(
    "--devices",
    required=True,
    metavar="NAME,NAME",
    help=f"A device for each lane, each one of: {', '.join(NAMES)}. They need not be here.",
)
@pipeline_options
@click.option(
    "--meta", is_flag=True, help='Make the model on the device "meta", where it takes no memory.'
)
def plan(
    factory: str,
    shapes: tuple[Shape, ...],
    devices: str,
    meta: bool,
    **options: Any,
) -> None:
    """Predict the stages, memory and step time of a pipeline for devices that need not be here.

    \b
    Examples:
      fxpipe plan models:build --devices h100,h100,h100,h100 --chunks 16
      fxpipe plan models:build --devices a100,a100 --schedule interleaved_1f1b
      fxpipe plan models:build --devices a100,a100 --checkpoint always --meta
    """
    import torch

    import fxpipe

    with torch.device("meta") if meta else nullcontext():
        given = load(factory, shapes)
    names = [name.strip() for name in devices.split(",")]
    with called_with(given), working("planning", PLANNING):
        found = fxpipe.plan(
            given.model,
            names,
            example_inputs=given.args,
            example_kwargs=given.kwargs,
            **options,
        )
    click.echo(str(found).rstrip("\n"))


@click.command(short_help="Measure a training step, and compare it with its prediction.")
@factory_argument
@devices_option
@pipeline_options
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Training steps to measure; the one of median length is shown.",
)
@click.option(
    "--draw", type=path_to(".svg"), help="Draw the predicted and the measured step to a file, .svg."
)
def bench(
    factory: str,
    shapes: tuple[Shape, ...],
    rounds: int,
    draw: Path | None,
    **options: Any,
) -> None:
    """Measure a training step, and compare it with its prediction.

    The loss of the step is the one that the model returns by the name "loss"; or else the mean of
    the model's output, or the sum of the means if it returns several tensors. With --inference, a
    call is measured.

    \b
    Examples:
      fxpipe bench models:build --devices cpu,cpu --schedule 1f1b
      fxpipe bench fxpipe.demo:UNet --input 16,3,32,32 --rounds 20 --draw out.svg
    """
    from fxpipe.inspect.against import OF_THE_MODEL, against, is_off
    from fxpipe.schedule import compare

    given = load(factory, shapes)
    loss = LossToMeasure()
    if options["training"]:
        options["loss_fn"] = loss
    with _compiled(given, **options) as pipe:
        before = replace(pipe.timeline(), name="predicted")
        with working("measuring", 1 + rounds):
            measured = pipe.measure(*given.args, rounds=rounds, **given.kwargs)
        if options["training"]:
            what = "that which" if loss.is_the_models else "the mean of what"
            click.echo(f"The loss of the step is {what} the model returns.\n")
        click.echo(str(compare(before, measured)))
        again = replace(pipe.timeline(), name="predicted from the measured times of the stages")
        click.echo("\n" + str(again).splitlines()[0])
        lanes = {stage.lane: str(stage.device) for stage in pipe.stages}
        devices = [lanes[lane] for lane in sorted(lanes)]
        run = "step" if options["training"] else "call"
        uncounted = OF_THE_MODEL if loss.is_the_models else NOT_COUNTED
        _, *causes = against(before, measured, again, devices, run, uncounted)
        if is_off(before, measured):
            causes.append(
                "The times of nodes are estimates, and they are off, unless lanes slow each other: "
                'fxpipe.compile(..., costs="measured") measures each node by itself.'
            )
        click.echo("\n" + "\n".join(textwrap.fill(cause, 100) for cause in causes))
        if draw:
            write(draw, compare(before, measured).draw())


NOT_COUNTED = "which is that of bench, and no part of the prediction"
"""What is said of the time of the loss: the user gives none."""


class LossToMeasure:
    """A loss for measurements: that of the model, if its output has a scalar by the name ``loss``;
    or else the sum of the means of all floating-point tensors in the output.

    Attributes:
        is_the_models: whether it has been the model's in the last call.
    """

    is_the_models = False

    def __call__(self, output: Any, target: Any) -> Any:
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        self.is_the_models = getattr(own, "ndim", None) == 0
        return own if self.is_the_models else _mean(output)


def _mean(output: Any) -> Any:
    from fxpipe.ir.structure import Structure

    tensors = [tensor for tensor in Structure.of(output)[0] if tensor.is_floating_point()]
    if not tensors:
        raise ValueError(
            "the model returns no floating-point tensor, so there is no loss to train with"
        )
    return sum(tensor.float().mean() for tensor in tensors)
