"""Finds nodes that cost the same, so that pass "cost" has to run only one of them.

::

    h.0.mlp ─ h.1.mlp ─ h.2.mlp       the same module class and settings, shapes, dtypes, layouts
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.ir._torch import pytree
from fxpipe.ir.graph import VALUE
from fxpipe.ir.tensors import memory_of, tensors_of


def signature(gm: fx.GraphModule, node: fx.Node) -> Any:
    """A key on which the cost of a node depends: nodes with equal keys cost the same.

    None for a call of a module that is not PyTorch's, whose cost may depend on anything.
    """
    target: Any = node.target
    if node.op == "call_module":
        module = gm.get_submodule(str(node.target))
        if not all(type(m).__module__.startswith("torch.nn.") for m in module.modules()):
            return None
        state = tuple(_look(t) for t in (*module.parameters(), *module.buffers()))
        target = type(module), repr(module), module.training, state
    values = pytree.tree_leaves(
        fx.map_arg((node.args, node.kwargs), lambda n: (_is_state(n), n.meta[VALUE]))
    )
    memories: dict[int, int] = {}  # numbers the memories, so that the key tells which are shared
    look = []
    for value in values:
        if isinstance(value, Tensor):
            look.append((_look(value), memories.setdefault(memory_of(value), len(memories))))
        else:
            look.append((repr(value), -1))
    _, structure = pytree.tree_flatten((node.args, node.kwargs))
    given = node.meta.get(VALUE)
    wants_gradient = tuple(t.requires_grad for t in tensors_of(given))
    return node.op, target, tuple(look), str(structure), wants_gradient


def _look(tensor: Tensor) -> Any:
    layout = tensor.stride() if tensor.layout == torch.strided else tensor.layout
    return tuple(tensor.shape), layout, tensor.dtype, tensor.requires_grad, type(tensor)


def _is_state(node: fx.Node) -> bool:
    return node.op == "get_attr"
