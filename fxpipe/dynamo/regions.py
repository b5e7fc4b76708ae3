"""The regions of Dynamo's graphs that run under ``no_grad`` or an autocast: each becomes one node.

Dynamo marks the beginning and the end of such a region by calls that switch a mode of the running
thread. A cut must not separate the two calls, since stages run in different threads.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from fxpipe.dynamo.errors import BackendError
from fxpipe.dynamo.inputs import free_name
from fxpipe.ir._torch import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD_ENABLED
from fxpipe.ir.graph import is_work


def keep_regions_whole(gm: fx.GraphModule) -> None:
    """Make one node of each region of the forward that runs under ``no_grad`` or an autocast."""
    for number, region in enumerate(list(_regions(gm.graph))):
        inside = set(region)
        takes = {n: None for node in region for n in node.all_input_nodes if n not in inside}
        gives = [node for node in region if not inside.issuperset(node.users)]
        graph = fx.Graph()
        own: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in takes}
        for node in region:
            own[node] = graph.node_copy(node, own.__getitem__)
        graph.output(tuple(own[node] for node in gives))
        name = free_name(gm, f"region_{number}")
        gm.add_submodule(name, fx.GraphModule(gm, graph, name))
        with gm.graph.inserting_after(region[-1]):
            call = gm.graph.call_module(name, tuple(takes))
        with gm.graph.inserting_after(call):
            made = [gm.graph.call_function(operator.getitem, (call, i)) for i in range(len(gives))]
        for given, item in zip(gives, made, strict=True):
            item.meta = dict(given.meta)
            given.replace_all_uses_with(item)
        for done in reversed(region):
            gm.graph.erase_node(done)


def _regions(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The regions of a graph: the nodes from each call that switches gradients or autocast to the
    call that restores the mode.

    Raises BackendError if a mode is never restored.
    """
    outside = torch.is_grad_enabled()
    region: list[fx.Node] = []
    grad, casts = outside, 0
    for node in filter(is_work, list(graph.nodes)):
        if node.target is SET_GRAD_ENABLED:
            grad = bool(node.args[0])
        elif node.target is ENTER_AUTOCAST:
            casts += 1
        elif node.target is EXIT_AUTOCAST:
            casts -= 1
        elif grad == outside and not casts:
            continue
        region.append(node)
        if grad == outside and not casts:
            yield region
            region = []
    if region:
        raise BackendError(
            "the model switches gradients or autocast and does not restore them before it returns, "
            f"at {region[0].meta.get('stack_trace') or region[0]}: switch them in a with statement"
        )
