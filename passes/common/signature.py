"""Finds nodes that do the same, so that passes "rows" and "cost" have to run only one of them.

::

    h.0.mlp ─ h.1.mlp ─ h.2.mlp       the same module class and settings, shapes, dtypes, layouts
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list

from fxpipe.ir._torch import pytree
from fxpipe.ir.graph import VALUE
from fxpipe.ir.tensors import memory_of, tensors_of


def signature(
    gm: fx.GraphModule,
    node: fx.Node,
    value_of: Callable[[fx.Node], Any] = lambda node: node.meta[VALUE],
) -> Any:
    """A key on which the work of a node depends: nodes with equal keys do the same, and results
    with the same shapes and layouts come of it.

    None for a call of a module that is not PyTorch's, whose work may depend on anything, or that is
    an argument.

    Args:
        value_of: the fake value of each node that this one uses.
    """
    target: Any = node.target
    if node.op == "call_module":
        module = gm.get_submodule(str(node.target))
        if not all(type(m).__module__.startswith("torch.nn.") for m in module.modules()):
            return None
        state = tuple(look_of(t) for t in (*module.parameters(), *module.buffers()))
        target = type(module), repr(module), module.training, state
    if any(isinstance(each.meta.get(VALUE), nn.Module) for each in node.all_input_nodes):
        return None
    memories: dict[int, int] = {}  # numbers the memories, so that the key tells which are shared

    def look(value: Any) -> Any:
        kind = type(value)
        if kind is fx.Node:
            return value.op == "get_attr", look(value_of(value))
        if isinstance(value, Tensor):
            return look_of(value), memories.setdefault(memory_of(value), len(memories))
        if kind in (tuple, list, immutable_list):
            return kind, tuple(map(look, value))
        if kind in (dict, immutable_dict):
            return kind, tuple(value), tuple(map(look, value.values()))
        if kind is slice:
            return kind, look(value.start), look(value.stop), look(value.step)
        leaves, structure = pytree.tree_flatten(value)
        if len(leaves) == 1 and leaves[0] is value:
            return repr(value)
        return str(structure), tuple(map(look, leaves))

    given = tuple(map(look, node.args)), tuple(node.kwargs), tuple(map(look, node.kwargs.values()))
    wants_gradient = tuple(t.requires_grad for t in tensors_of(node.meta.get(VALUE)))
    return node.op, target, given, wants_gradient


def look_of(tensor: Tensor) -> Any:
    """What an operator sees of a tensor, beside its memory."""
    layout = tensor.stride() if tensor.layout == torch.strided else tensor.layout
    return tuple(tensor.shape), layout, tensor.dtype, tensor.requires_grad, type(tensor)
