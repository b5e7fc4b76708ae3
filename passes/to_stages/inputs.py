"""Inputs: a model that writes to its inputs works on copies, which are written back to the caller's
tensors when all micro-batches have been run.

::

    before     x ─ relu_ ─ y                   relu_ writes to x

    after      x ─ clone ─ relu_ ─┬─ y
                                  └─ write_back (to x)

The model works on a copy of the input, so that a checkpointed stage can be run again on what the
caller gave. The copy is written back to the input once all micro-batches have been run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import ONCE, WRITES, WRITTEN, stage_nodes
from passes.to_stages.alias import Alias


class InputError(ValueError):
    """A model writes to an input in a way that cannot be split into micro-batches."""


@dataclass(frozen=True)
class WrittenInputs:
    """Model graph after pass "alias" → the same, in which inputs that are written to are copied
    first and written back. If there are any, pass "alias" is run once more, so that the new nodes
    have fake values, too.

    Args:
        inputs: example inputs of the model, one for each placeholder.
        in_dims: the batch dimension of each; None for one that all micro-batches share.
        chunks: how many micro-batches there will be; None if that is not known yet.

    Raises :class:`InputError` where an input that all micro-batches share is written to.
    """

    name: ClassVar[str] = "inputs"
    inputs: tuple[Any, ...]
    in_dims: tuple[int | None, ...]
    chunks: int | None = None

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        placeholders = gm.graph.find_nodes(op="placeholder")
        by_name = {node.name: dim for node, dim in zip(placeholders, self.in_dims, strict=True)}
        written = {
            name: node
            for node in stage_nodes(gm.graph)
            for name in node.meta.get(WRITES, ())
            if name in by_name
        }
        for node in placeholders:
            # One tensor for two arguments is one in the graph, which uses the first of them only.
            if node.name in written and node.users:
                if by_name[node.name] is None and self.chunks != 1:
                    raise InputError(
                        f"{written[node.name].name!r} writes to the input {node.name!r}, which has "
                        "no batch dimension: every micro-batch would see what those before it have "
                        "written; clone it in the model, give its batch dimension in in_dims, or "
                        "use chunks=1"
                    )
                _write_back(node, by_name[node.name])
        if not written:
            return gm
        gm.recompile()
        return Alias(self.inputs)(gm)


def _write_back(node: fx.Node, dim: int | None) -> None:
    graph = node.graph
    node.meta[WRITTEN] = True
    with graph.inserting_after(node):
        own = graph.create_node("call_function", torch.clone, (node,), name=f"{node.name}_own")
    node.replace_all_uses_with(own, delete_user_cb=lambda user: user is not own)
    with graph.inserting_before(graph.output_node()):
        back = graph.create_node(
            "call_function", ops.write_back, (node, dim, (own,)), name=f"{node.name}_back"
        )
    back.meta[ONCE] = True
