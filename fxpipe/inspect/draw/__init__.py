"""Drawings of graphs of every level, as Graphviz source: the model, its stages, the pipeline,
a training step.

::

    draw_model      a box a node                         what was traced, and where it was cut
    draw_stages     a box a stage                        who sends what to whom
    draw_pipeline   a box a cell (micro-batch, stage)    what runs, and what waits for what
    draw_step       a box an action (lane, time)         what a training step does, in which order

:func:`draw_model` also draws a part of any of them in full: a stage, a micro-batch, or a cell.

The same graph gives the same source. Lines differ by width and dashes as well as by colour (those
of Okabe and Ito), so that they can be told apart in print and by the colour-blind.
"""

import graphviz  # type: ignore[import-untyped]
from torch import fx

from fxpipe.inspect.draw.model import draw_model
from fxpipe.inspect.draw.picture import SKIP_COLOURS
from fxpipe.inspect.draw.pipeline import draw_pipeline
from fxpipe.inspect.draw.stages import draw_stages
from fxpipe.inspect.draw.step import draw_step
from fxpipe.inspect.draw.svg import render_svg
from fxpipe.ir.graph import ACTION, DEVICE, MICROBATCH, STAGE

__all__ = [
    "SKIP_COLOURS",
    "draw_graph",
    "draw_model",
    "draw_pipeline",
    "draw_stages",
    "draw_step",
    "render_svg",
]


def draw_graph(gm: fx.GraphModule) -> graphviz.Source:
    """A graph of any level, as what it is: a step, a pipeline, or a model."""
    devices: dict[int, str] = {}
    for node in gm.graph.nodes:
        if STAGE in node.meta:
            devices.setdefault(node.meta[STAGE], str(node.meta.get(DEVICE, "no device yet")))
    names = [devices[stage] for stage in sorted(devices)]
    if any(ACTION in node.meta for node in gm.graph.nodes):
        return draw_step(gm, names)
    if any(MICROBATCH in node.meta and STAGE in node.meta for node in gm.graph.nodes):
        return draw_pipeline(gm, names)
    return draw_model(gm)
