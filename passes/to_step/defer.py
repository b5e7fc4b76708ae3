"""Defer: let gradients of parameters be computed apart from those of the input.

::

    before     x ─ linear ─ relu ─ y

    after      x ─ defer (linear) ─ relu ─ y       backward in two halves: the gradient of x,
                                                   and later that of linear's weight

This is for the nodes that :func:`passes.common.deferrable.is_deferrable` names. Every other node
does its whole backward in the first half.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx, nn

from fxpipe import ops
from fxpipe.ir.graph import attribute
from passes.common.deferrable import is_deferrable


class Apply(nn.Module):
    """A module that calls a function, for ``ops.defer``, which takes modules only."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result."""
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class Defer:
    """Stage → a copy in which gradients of parameters can be computed later than those of inputs.

    The stage itself is returned if it has no node whose gradients can be deferred.
    """

    name: ClassVar[str] = "defer"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        if not any(is_deferrable(gm, node) for node in gm.graph.nodes):
            return gm
        graph = fx.Graph()
        own: dict[fx.Node, fx.Node] = {}
        modules: dict[str, nn.Module] = {}
        for node in gm.graph.nodes:
            if not is_deferrable(gm, node):
                own[node] = graph.node_copy(node, own.__getitem__)
                continue
            target = str(node.target)
            if node.op == "call_function":
                target = f"{node.name}_apply"
                modules[target] = Apply(node.target)
            module = graph.create_node("get_attr", target, name=f"{node.name}_module")
            args, kwargs = fx.map_arg((node.args, node.kwargs), own.__getitem__)
            own[node] = graph.create_node(
                "call_function", ops.defer, (module, *args), kwargs, name=node.name
            )
            own[node].meta = dict(node.meta)
        return fx.GraphModule(_with(gm, modules), graph, class_name=type(gm).__name__)


def _with(gm: fx.GraphModule, modules: dict[str, nn.Module]) -> dict[str, Any]:
    """The modules and attributes that the new graph refers to, by path."""
    paths = {str(n.target) for n in gm.graph.nodes if n.op in ("get_attr", "call_module")}
    return {path: attribute(gm, path) for path in paths} | dict(modules)
