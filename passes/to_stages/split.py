"""Split: the nodes of each stage are moved into a module of its own, and the stage graph calls
these modules.

::

    model graph (labelled)              stage graph
    x ─ a(0) ─ b(0) ─ c(1) ─ d(2)       x ─ stage_0 ─[b]─ stage_1 ─ stage_2
          └────────────────────┘               └─[a]──────────────────┘

Every stage becomes one ``call_module``. What a stage takes and gives is in the order of the model
graph, so the same labels always give the same stage graph.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxpipe.ir._torch import OuterModule
from fxpipe.ir.graph import (
    BROUGHT,
    CONTAINS,
    COPIES,
    FIRST,
    GROWS,
    MEMORIES,
    NO_BACKWARD,
    ONCE,
    ORIGIN,
    PART,
    SEED,
    SHARED,
    STAGE,
    UPDATES,
    VALUE,
    WRITES,
    attribute,
    rename_in_meta,
    stage_nodes,
)
from fxpipe.ir.tensors import with_tensors
from passes.common.stage_names import stage_names


class SplitError(ValueError):
    """The ``meta["stage"]`` of a model graph's nodes does not describe a chain of stages."""


@dataclass(frozen=True)
class Split:
    """Model graph, its nodes labelled ``meta["stage"]`` from 0 on → stage graph.

    A parameter or buffer (``get_attr``) needs no label: it lives in every stage that uses it, as
    the same object under the same name. A stage that writes to what it receives writes to a
    clone: the memory may be another stage's, or the caller's. ``meta["contains"]`` of a stage's
    module says what is in it.

    Raises :class:`SplitError` where a node has no label, a stage number is left out, or a value
    flows from a later stage to an earlier one.
    """

    name: ClassVar[str] = "split"
    part: str = "stage"  # what the parts are called: ``stage_0``, ``stage_1``, ...

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        members = _members(gm.graph)
        contains = stage_names(gm.graph)
        once = [node for node in gm.graph.nodes if ONCE in node.meta]
        attributes: dict[str, Any] = {}  # of the stage graph, by name
        top = fx.Graph()
        at_top: dict[fx.Node, fx.Node] = {}
        for node in gm.graph.nodes:
            if FIRST in node.meta:
                (parameter,) = node.all_input_nodes
                attributes[str(parameter.target)] = attribute(gm, str(parameter.target))
                at_top[parameter] = top.node_copy(parameter)
            if node.op == "placeholder" or FIRST in node.meta:
                at_top[node] = top.node_copy(node, at_top.__getitem__)
                at_top[node].meta.setdefault(ORIGIN, node.name)

        for stage, nodes in enumerate(members):
            takes, gives = _boundary(nodes)
            name = f"{self.part}_{stage}"
            attributes[name] = _stage_module(gm, name, nodes, takes, gives)
            attributes[name].meta[CONTAINS] = contains[stage]
            call = top.call_module(name, tuple(at_top[n] for n in takes))
            call.meta[STAGE] = stage
            if len(gives) == 1:
                at_top[gives[0]] = call
                _describe(gives[0], call)
            else:
                for i, given in enumerate(gives):
                    item = top.create_node(
                        "call_function", operator.getitem, (call, i), name=given.name
                    )
                    item.meta[STAGE] = stage
                    at_top[given] = item
                    _describe(given, item)

        # Nodes that run once, after all micro-batches, are in no stage's module.
        for node in (*once, gm.graph.output_node()):
            for source in node.all_input_nodes:
                if source.op == "get_attr" and source not in at_top:
                    attributes[str(source.target)] = attribute(gm, str(source.target))
                    at_top[source] = top.node_copy(source, at_top.__getitem__)
            copied = top.node_copy(node, at_top.__getitem__)
            stages = [n.meta[STAGE] for n in copied.all_input_nodes if STAGE in n.meta]
            if node.op != "output":
                copied.meta[STAGE] = max(stages)
                copied.meta[UPDATES] = _names(node)
        return OuterModule(attributes, top)


def _members(graph: fx.Graph) -> list[list[fx.Node]]:
    """The nodes of each stage, in graph order, with all labels and edges checked."""
    work = list(stage_nodes(graph))
    unlabelled = [n.name for n in work if STAGE not in n.meta]
    if unlabelled:
        raise SplitError(
            f"node {unlabelled[0]!r} has no stage ({len(unlabelled)} such nodes); "
            "give every node that computes something a stage"
        )
    for node in work:
        for source in node.all_input_nodes:
            if source.op not in ("placeholder", "get_attr") and (
                source.meta[STAGE] > node.meta[STAGE]
            ):
                raise SplitError(
                    f"{node.name!r} in stage {node.meta[STAGE]} needs {source.name!r} from the "
                    f"later stage {source.meta[STAGE]}; put {node.name!r} into stage "
                    f"{source.meta[STAGE]} or later"
                )
    labels = {n.meta[STAGE] for n in work}
    if labels != set(range(len(labels))):
        raise SplitError(
            f"stages must be numbered from 0 without gaps, got {sorted(labels)}; "
            "give every stage at least one node"
        )
    members: list[list[fx.Node]] = [[] for _ in labels]
    for node in work:
        members[node.meta[STAGE]].append(node)
    return members


def _boundary(nodes: Iterable[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """What the nodes take from outside, in order of first use, and what they give to outside."""
    nodes = list(nodes)
    inside = set(nodes)
    takes = dict.fromkeys(
        source
        for node in nodes
        for source in node.all_input_nodes
        if source not in inside and source.op != "get_attr"
    )
    gives = [node for node in nodes if any(user not in inside for user in node.users)]
    return list(takes), gives


def _stage_module(
    gm: fx.GraphModule,
    name: str,
    nodes: list[fx.Node],
    takes: list[fx.Node],
    gives: list[fx.Node],
) -> fx.GraphModule:
    graph = fx.Graph()
    own: dict[fx.Node, fx.Node] = {}
    for taken in takes:
        own[taken] = graph.placeholder(taken.name)
        _describe(taken, own[taken])
        if FIRST in taken.meta:
            own[taken].meta[BROUGHT] = str(taken.all_input_nodes[0].target)
        elif BROUGHT in taken.meta:  # a stage is cut into segments
            own[taken].meta[BROUGHT] = taken.meta[BROUGHT]
    written = {name for node in nodes for name in node.meta.get(WRITES, ())}
    clones: dict[str, str] = {}
    for taken in takes:
        if taken.name in written:
            own[taken] = graph.call_function(torch.clone, (own[taken],))
            clones[taken.name] = own[taken].name
            _describe(taken, own[taken])
    for node in nodes:
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in own:
                own[source] = graph.node_copy(source, own.__getitem__)
        own[node] = graph.node_copy(node, own.__getitem__)
    rename_in_meta(graph, clones)
    results = []
    for node in gives:
        result = own[node]
        if NO_BACKWARD in node.meta:
            # The model's backward does not reach this value. The pipeline's would, since a gate
            # hands a stage the gradients of all its results, with none for this one: so the value
            # is detached.
            result = graph.call_function(torch.detach, (result,))
            _describe(node, result)
            result.meta[VALUE] = with_tensors(Tensor.detach, node.meta[VALUE])
        results.append(result)
    graph.output(results[0] if len(results) == 1 else tuple(results))
    graph.output_node().meta[ORIGIN] = tuple(node.meta.get(ORIGIN, node.name) for node in gives)
    return fx.GraphModule(gm, graph, class_name=name)


def _names(once: fx.Node) -> tuple[str, ...]:
    """By name what a node that runs once is given: buffers by their paths, other values by the
    nodes of the model graph."""
    names: list[str] = []

    def note(node: fx.Node) -> None:
        own = node.meta.get(ORIGIN, node.name)
        names.append(str(node.target if node.op == "get_attr" else own))

    fx.map_arg(once.args, note)
    return tuple(names)


def _describe(source: fx.Node, target: fx.Node) -> None:
    """Note which node of the model graph another node stands for, with its value's metadata."""
    target.meta[ORIGIN] = source.meta.get(ORIGIN, source.name)
    target.meta |= {
        key: source.meta[key]
        for key in (VALUE, PART, COPIES, GROWS, MEMORIES, SEED, SHARED)
        if key in source.meta
    }
