"""Defer: let gradients of parameters be computed apart from those of the input.

::

    before     x ─ linear ─ relu ─ y

    after      x ─ defer (linear) ─ relu ─ y       backward in two halves: the gradient of x,
                                                   and later that of linear's weight

This is for linear, convolution and embedding modules, and for the functions of that name and matrix
products where a parameter is among their arguments. Every other node does its whole backward in the
first half. So does a module with hooks, since its hooks would fire in both halves.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import fx, nn

from fxpipe import ops
from fxpipe.ir._torch import ConvNd
from fxpipe.ir.graph import attribute
from fxpipe.ir.hooks import has_hooks

MODULES = (nn.Linear, nn.Bilinear, ConvNd, nn.Embedding)
_aten = torch.ops.aten
FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(
    {
        *(F.linear, F.bilinear, F.embedding, F.conv1d, F.conv2d, F.conv3d),
        *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        *(operator.matmul, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm),
        *(_aten.linear.default, _aten.embedding.default, _aten.convolution.default),
        *(_aten.conv1d.default, _aten.conv2d.default, _aten.conv3d.default),
        *(_aten.conv1d.padding, _aten.conv2d.padding, _aten.conv3d.padding),
        *(_aten.conv_transpose1d.default, _aten.conv_transpose2d.input),
        *(_aten.conv_transpose3d.input, _aten.matmul.default, _aten.mm.default),
        *(_aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default),
    }
)


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
        if not any(_is_deferrable(gm, node) for node in gm.graph.nodes):
            return gm
        graph = fx.Graph()
        own: dict[fx.Node, fx.Node] = {}
        modules: dict[str, nn.Module] = {}
        for node in gm.graph.nodes:
            if not _is_deferrable(gm, node):
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


def _is_deferrable(gm: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        module = gm.get_submodule(str(node.target))
        is_known = isinstance(module, MODULES) and type(module).forward in _FORWARDS
        return is_known and not any(map(has_hooks, module.modules()))
    if node.op != "call_function" or node.target not in FUNCTIONS:
        return False
    return any(
        source.op == "get_attr" and isinstance(attribute(gm, str(source.target)), nn.Parameter)
        for source in node.all_input_nodes
    )


_FORWARDS = {
    kind.forward
    for kind in (
        *(nn.Linear, nn.Bilinear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d),
        *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    )
}
