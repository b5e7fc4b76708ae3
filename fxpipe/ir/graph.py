"""Metadata of the graphs of every level, and what all passes do with nodes.

A node says where it belongs in ``node.meta``, under the keys below, beside fx's own (``val``,
``stack_trace``, ``nn_module_stack``).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import fx, nn
from torch.fx.immutable_collections import immutable_dict

STAGE = "stage"  #: int
MICROBATCH = "microbatch"  #: int
LANE = "lane"  #: int: the lane that runs a node of a step graph; elsewhere it is the stage's number
DEVICE = "device"  #: torch.device
STREAM = "stream"  #: str such as ``"cuda:1/copy"``
GAP = "gap"  #: float, of a graph module: how far its cut is from optimal at most; 0.1 is 10 %
CONTAINS = "contains"  #: str, of a stage's module: what is in it, for people
COST = "cost"  #: Cost
WORKSPACE = "workspace"  #: NodeWorkspace: the memory that it needs only while it runs
SAVED = "saved"  #: tuple[tuple[int, int], ...]: the memories kept for its backward: number, bytes
SAVED_STATE = "saved_state"  #: as "saved": memories of parameters, of views that others make
PRODUCTS = "products"  #: tuple[int, ...]: which tensors of the value are results of products
ORIGIN = "origin"  #: str: the value of the stage graph that a node of the pipeline graph stands for
ACTION = "action"  #: fxpipe.schedule.Action: the one that a node of the step graph does
TURN = "turn"  #: int: how many actions the lane of a node with an action runs ahead of it
VALUE = "val"  #: fx's key: the fake (or example) value of a node
COPIES = "copies"  #: tuple[int, ...]: how many of each tensor of the value a mini-batch has
GROWS = (
    "grows"  #: tuple[tuple[int, ...], ...]: of each tensor the dimensions that grow with the batch
)
SHAPES = "shapes"  #: Shapes (passes.common.shapes): of the tensors in a value of a step graph
CARRIED = "carried"  #: Carried | None (passes.to_rank.carried): what a transfer carries
PART = "part"  #: the fake value for a micro-batch
MEMORIES = "memories"  #: tuple[tuple[int, int], ...]: of each tensor its memory: number, bytes
BROUGHT = "brought"  #: str: at a stage's input, the path of the parameter that is copied there
SHARED = "shared"  #: True at a node that hands a parameter to all stages that use it
HOME = "home"  #: int: where a node copies a parameter to another stage: the stage that owns it
AGAIN = "again"  #: tuple[str, ...]: the buffers that it writes to once more in its backward
HANDED = "handed"  #: tuple[int, ...]: numbers of objects that it hands to, or gets from, others
ALIAS = "alias"  #: int: nodes with the same number have to stay in one stage
WRITES = "writes"  #: tuple[str, ...]: the nodes whose memory this one writes to
#: tuple[str, ...]: the paths of the parameters and buffers whose memory this node writes to
WRITES_STATE = "writes_state"
SAME_AS = "same_as"  #: tuple[str, ...]: the nodes whose tensors this one returns unchanged
NO_BACKWARD = "no_backward"  #: True where a gradient is required, but no backward computes it
WRITTEN = "written"  #: True at the placeholder of an input that is written to
SEED = "seed"  #: True at the placeholder of the seed
DRAWS = "draws"  #: str: that its own code draws random numbers, on the "host" or by "torch"
RANDOM = "random"  #: True where random numbers are drawn
ON_THE_HOST = "on_the_host"  #: True where Python's ``random`` or NumPy draws them
OF_THE_STEP = "of_the_step"  #: True at an input whose value a step gives, and not its caller
WHOLE = "whole"  #: tuple[str, str]: why a front end has made one node of this; what would help
ONCE = "once"  #: True at a node that runs once for a mini-batch, after its micro-batches
UPDATES = "updates"  #: tuple[str, ...]: by name what such a node updates, then what it is given
FIRST = "first"  #: True at a node that runs once for a mini-batch, ahead of its micro-batches

MADE = "_made_constant"
"""The name, but for a number behind it, under which a graph module holds a constant that stands for
a tensor which the model makes anew in each call."""


def where(node: fx.Node) -> dict[str, Any]:
    """The metadata that says where a node runs, and for which micro-batch. A pass gives it to nodes
    that it puts beside this one."""
    return {key: node.meta[key] for key in _WHERE if key in node.meta}


_WHERE = STAGE, MICROBATCH, LANE, DEVICE, STREAM


def attribute(gm: nn.Module, target: str) -> Any:
    """The module, tensor or other value that a node's ``target`` names, as a path in ``gm``."""
    *path, name = target.split(".")
    owner: Any = gm
    for step in path:  # straight through the tables of modules, whose own look-up is slow
        modules: Any = getattr(owner, "_modules", None)
        is_there = type(modules) is dict and step in modules  # TorchScript has tables of its own
        owner = modules[step] if is_there else getattr(owner, step)
    return getattr(owner, name)


def add_input(graph: fx.Graph, name: str, *default: Any) -> fx.Node:
    """Add an input (a placeholder) to a graph, renamed if the graph has a node of that name."""
    node = graph.create_node("placeholder", name, default, name=name)
    node.target = node.name  # which fx has made unique
    return node


def written_inputs(graph: fx.Graph) -> list[int]:
    """The places, among the inputs of a graph, of those to which the model writes."""
    inputs = graph.find_nodes(op="placeholder")
    return [place for place, node in enumerate(inputs) if WRITTEN in node.meta]


def rename_in_meta(graph: fx.Graph, names: dict[str, str]) -> None:
    """Update the names of nodes within metadata. ``names``: the new name by each old one."""
    for node in graph.nodes if names else ():
        for key in (WRITES, SAME_AS):
            if key in node.meta:
                node.meta[key] = tuple(names.get(name, name) for name in node.meta[key])


def stage_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes that stages are made of."""
    return filter(is_work, graph.nodes)


def stages_of(stage_graph: fx.GraphModule) -> list[fx.GraphModule]:
    """The graph modules of the stages, in the order of the stages."""
    calls = stage_graph.graph.find_nodes(op="call_module")
    return [attribute(stage_graph, str(call.target)) for call in calls]


def nodes_of_stages(stage_graph: fx.GraphModule) -> list[list[fx.Node]]:
    """The nodes of each stage of a stage graph."""
    return [list(stage_nodes(stage.graph)) for stage in stages_of(stage_graph)]


def is_work(node: fx.Node) -> bool:
    """Whether a node is part of a stage: no placeholder, ``get_attr``, or output."""
    is_once = ONCE in node.meta or FIRST in node.meta
    return node.op not in ("placeholder", "get_attr", "output") and not is_once


def mutable(value: Any) -> Any:
    """A node's arguments with lists and dicts that a function may write to, as the code that fx
    generates gives them; in the graph they are immutable."""
    if isinstance(value, list):
        return [mutable(part) for part in value]
    if isinstance(value, tuple):
        parts = [mutable(part) for part in value]
        if all(map(operator.is_, parts, value)):
            return value  # of whatever type: a shape, or what an operator gives, with names
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if type(value) in (dict, immutable_dict):
        return {key: mutable(part) for key, part in value.items()}
    return value
