"""The model graph: a box a node, a cluster a stage."""

from __future__ import annotations

import graphviz  # type: ignore[import-untyped]
from torch import fx

from fxpipe.graph import VALUE, operator_name
from fxpipe.inspect.draw.picture import (
    CLUSTER,
    DATA,
    SKIP_COLOURS,
    THICK,
    Line,
    Picture,
    label,
    type_text,
)
from passes.skips import stage_of

_MODEL_SKIP = Line("value that passes over stages", color=SKIP_COLOURS[0], penwidth=THICK)


def draw_model(gm: fx.GraphModule) -> graphviz.Source:
    """The traced model, a box a node: its name, what it calls, and the shape that it gives.

    Where nodes have stages, each stage is a cluster, and values that pass over stages stand out.
    """
    picture = Picture("model", nodesep="0.25", ranksep="0.35")
    clusters: dict[int | None, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        clusters.setdefault(_home(node), []).append(node)
    for stage, nodes in sorted(
        clusters.items(), key=lambda item: -1 if item[0] is None else item[0]
    ):
        if stage is None:
            for node in nodes:
                draw_node(picture.dot, node)
            continue
        with picture.dot.subgraph(name=f"cluster_stage_{stage}") as cluster:
            cluster.attr(label=f"stage {stage}", **CLUSTER)
            for node in nodes:
                draw_node(cluster, node)
    for node in gm.graph.nodes:
        for source in node.all_input_nodes:
            _draw_use(picture, source, node)
    return picture.source()


def _home(node: fx.Node) -> int | None:
    """The stage that a node is drawn in; a parameter's is its first user's."""
    stage = stage_of(node)
    if stage is None and node.op == "get_attr":
        stages = [s for user in node.users if (s := stage_of(user)) is not None]
        return min(stages, default=None)
    return stage


def draw_node(dot: graphviz.Digraph, node: fx.Node) -> None:
    shape = type_text(node.meta.get(VALUE))
    if node.op in ("placeholder", "output"):
        dot.node(node.name, label(node.name, shape), shape="oval", style="solid")
    elif node.op == "get_attr":
        small = {"fontsize": "7", "height": "0.2", "margin": "0.05,0.02"}
        dot.node(node.name, label(str(node.target)), style="dotted", **small)
    else:
        called = operator_name(node)
        text = label(node.name, "" if called == node.name else called, shape)
        dot.node(node.name, text, style="rounded,filled", fillcolor="white")


def _draw_use(picture: Picture, source: fx.Node, user: fx.Node) -> None:
    tail, head = stage_of(source), stage_of(user)
    if tail is not None and head is not None and head > tail + 1:
        picture.edge(source.name, user.name, _MODEL_SKIP, weight="0")
    else:
        picture.edge(source.name, user.name, DATA)
