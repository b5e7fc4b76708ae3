"""Constants: what a model makes anew in each call, it returns as a new tensor in each call.

::

    def forward(self, x):                        before    anchors ─┬─ add
        anchors = torch.arange(4.0)                        b(x) ────┘    return add, anchors
        return self.b(x) + anchors, anchors
                                                 after     return add, clone(anchors)

Symbolic tracing makes ``anchors`` once, and the graph has it as a constant. The caller, or a loss,
may write to what a call returns: without the copy it would write to the constant, and all later
calls would compute with that.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxpipe.ir.graph import MADE, VALUE
from fxpipe.ir.tensors import memory_of, tensors_of
from passes.common.fakes import FakeInterpreter, fake_mode
from passes.to_stages.alias import Alias


@dataclass(frozen=True)
class CopiedConstants:
    """Model graph after pass "alias" → the same, which returns copies of the tensors that share
    memory with a constant that the model makes in each call. If there are any, pass "alias" is run
    once more, so that the new nodes have fake values, too.

    Args:
        inputs: example inputs of the model, one for each placeholder.
        training: whether there is a backward.
    """

    name: ClassVar[str] = "constants"
    inputs: tuple[Any, ...]
    training: bool = True

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        memories = _memories_of_constants(gm)
        output = gm.graph.output_node()
        copies: dict[fx.Node, Any] = {}
        with gm.graph.inserting_before(output):
            for node in output.all_input_nodes if memories else ():
                value = node.meta[VALUE]
                if not memories.isdisjoint(map(memory_of, tensors_of(value))):
                    copies[node] = _copied(node, value)
        if not copies:
            return gm
        output.args = fx.map_arg(output.args, lambda node: copies.get(node, node))
        gm.recompile()
        return Alias(self.inputs, self.training)(gm)


def _memories_of_constants(gm: fx.GraphModule) -> set[int]:
    """The memories of the fakes of all constants that the model makes in each call."""
    named = gm.named_buffers(remove_duplicate=False)
    made = [buffer for path, buffer in named if path.rpartition(".")[2].startswith(MADE)]
    if not made:
        return set()
    run = FakeInterpreter(gm, fake_mode(gm.graph))
    return {memory_of(run.fake(each)) for each in made}


def _copied(node: fx.Node, value: Any) -> Any:
    """What copies the value of a node: a node, or for several tensors a list of nodes."""
    if isinstance(value, Tensor):
        return node.graph.create_node(
            "call_function", torch.clone, (node,), name=f"{node.name}_anew"
        )
    if not isinstance(value, list | tuple):
        return node
    parts = [node.graph.call_function(operator.getitem, (node, i)) for i in range(len(value))]
    copies = map(_copied, parts, value)
    return list(copies) if isinstance(value, list) else tuple(copies)
