"""The nodes whose gradients of parameters can be computed apart from those of their inputs, in the
second half of a backward: for the passes "defer" and "cost"."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

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


def is_deferrable(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node computes gradients of parameters that can wait for a second half.

    Such nodes are linear, convolution and embedding modules, and the functions of that name and
    matrix products where a parameter is among their arguments. A module with hooks is none of them,
    since its hooks would fire in both halves.
    """
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
