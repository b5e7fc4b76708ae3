"""Drawings of the graphs of every level, as Graphviz source: of the model, its stages, the pipeline
and a training step.

::

    draw_model      a box for each node                       the traced model and its cut
    draw_stages     a box for each stage                      the values sent between stages
    draw_pipeline   a box for each cell (micro-batch, stage)  the cells and their dependencies
    draw_step       a box for each action (lane, time)        the order of a training step
    draw_ranks      a box for each action (rank, time)        the transfers between all ranks
    draw_rank       a box for each action (order)             what one rank does, gets and sends

:func:`draw_model` also draws one stage, micro-batch or cell of any of these graphs node by node.

Equal graphs give equal source. Lines differ by width and dashes as well as by colour (the palette
of Okabe and Ito), so that they can be told apart in print and by the colour-blind.
"""

import graphviz  # type: ignore[import-untyped]
from torch import fx

from fxpipe.inspect.draw.model import draw_model
from fxpipe.inspect.draw.picture import SKIP_COLOURS
from fxpipe.inspect.draw.pipeline import draw_pipeline
from fxpipe.inspect.draw.ranks import draw_rank, draw_ranks
from fxpipe.inspect.draw.stages import draw_stages
from fxpipe.inspect.draw.step import draw_step
from fxpipe.inspect.draw.svg import NoLayout, render_svg
from fxpipe.ir.graph import ACTION, DEVICE, MICROBATCH, STAGE

__all__ = [
    "SKIP_COLOURS",
    "NoLayout",
    "draw_graph",
    "draw_model",
    "draw_pipeline",
    "draw_rank",
    "draw_ranks",
    "draw_stages",
    "draw_step",
    "render_svg",
]


def draw_graph(gm: fx.GraphModule) -> graphviz.Source:
    """Draw a graph of any level; its nodes' metadata tell whether it is a step, a pipeline or a
    model graph."""
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
