"""The drawing of the stage graph: a box for each stage, and a line for each value that one stage
sends to another."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import pairwise

import graphviz  # type: ignore[import-untyped]
from torch import fx

from fxpipe.inspect.draw.model import draw_node
from fxpipe.inspect.draw.picture import (
    CALLER,
    STRAIGHT,
    Line,
    Picture,
    label,
    lines_text,
    origin,
    skip_lines,
    type_text,
    value_text,
)
from fxpipe.ir.cost import Cost, batch_bytes
from fxpipe.ir.graph import VALUE
from fxpipe.ir.text import human_bytes, human_time
from passes.common.skips import routes, stage_of

MANY = 4  # more values than this between the same two stages are drawn as one line
WIDE = 48  # the most letters of a line of what is in a stage, so that the drawing is not too wide
MANY_RESULTS = 2  # more outputs of the model than this from the same stage are drawn as one line

_NEXT = Line("value for the next stage")


def draw_stages(
    gm: fx.GraphModule, devices: Sequence[str], costs: Sequence[Cost], contain: Sequence[str] = ()
) -> graphviz.Source:
    """Draw the stage graph: a box for each stage, and a line for each value between two stages.

    Args:
        devices: the name of each stage's device.
        costs: the cost of each stage, for a whole mini-batch.
        contain: what is in each stage, in words.
    """
    picture = Picture("stages", nodesep="0.6", ranksep="0.5")
    for stage, cost in enumerate(costs):
        said = contain[stage] if contain else ""
        _draw_stage(picture.dot, stage, devices[stage], cost, said)
    for node in gm.graph.find_nodes(op="placeholder"):
        picture.oval(node.name, node.name)
    _draw_hops(picture, gm.graph)
    _draw_results(picture, gm.graph)
    for stage in range(1, len(costs)):
        picture.order(_stage(stage - 1), _stage(stage))
    return picture.source()


def _stage(index: int) -> str:
    return f"stage {index}"


def _draw_stage(dot: graphviz.Digraph, stage: int, device: str, cost: Cost, contains: str) -> None:
    text = label(
        f"stage {stage} · {device}",
        *textwrap.wrap(contains, WIDE, break_long_words=False, break_on_hyphens=False),
        f"parameters {human_bytes(cost.param_bytes)}, "
        f"activations {human_bytes(cost.activation_bytes)}",
        f"forward {human_time(cost.forward_s)}, backward {human_time(cost.backward_s)}",
    )
    dot.node(_stage(stage), text, style="rounded,filled", fillcolor="white", group="stages")


def _draw_hops(picture: Picture, graph: fx.Graph) -> None:
    hops = [
        (value, source, target)
        for value, stages in routes(graph)
        for source, target in pairwise(stages)
    ]
    skips = skip_lines([origin(v) for v, s, t in hops if _is_skip(s, t)], "long skip:")
    ways: dict[tuple[str, str, Line], list[fx.Node]] = {}
    for value, source, target in hops:
        tail = value.name if source is None else _stage(source)
        line = CALLER if source is None else _NEXT
        if _is_skip(source, target):
            line = skips[origin(value)]
        ways.setdefault((tail, _stage(target or 0), line), []).append(value)
    for (tail, head, line), values in ways.items():
        _draw_values(picture, tail, head, line, values, weight="0" if line.is_skip else STRAIGHT)


def _draw_values(
    picture: Picture,
    tail: str,
    head: str,
    line: Line,
    values: Sequence[fx.Node],
    most: int = MANY,
    **more: str,
) -> None:
    """A line for each value, or one for all if there are more than ``most``."""
    texts = [value_text(value) for value in values]
    if len(values) > most:
        types = {type_text(value.meta.get(VALUE)) for value in values}
        size = sum(map(batch_bytes, values))
        said = [f"{len(values)} values", *(types if len(types) == 1 else ()), human_bytes(size)]
        texts = [lines_text(said)]
    for text in texts:
        picture.edge(tail, head, line, label=text, **more)


def _is_skip(source: int | None, target: int | None) -> bool:
    return source is not None and target is not None and target > source + 1


def _draw_results(picture: Picture, graph: fx.Graph) -> None:
    output = graph.output_node()
    picture.oval(output.name, output.name)
    ways: dict[str, list[fx.Node]] = {}
    for value in output.all_input_nodes:
        stage = stage_of(value)
        if value.op == "get_attr":
            draw_node(picture.dot, value)
        ways.setdefault(value.name if stage is None else _stage(stage), []).append(value)
    for tail, values in ways.items():
        _draw_values(picture, tail, output.name, CALLER, values, most=MANY_RESULTS)
