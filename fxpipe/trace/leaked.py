"""Parameters that a graph has as constants, since an object holds them that no twin can have.

::

    self.extra = Extra(self.first.weight)       an object with a __del__, say, which is not copied
    F.linear(x, self.extra.weight)              in the twin it has the model's own parameter

An exporter makes a constant of a tensor that is no parameter of the model that it exports, and the
parameter would get no gradient by that constant. No run of the twin tells: its own parameter is
another one.
"""

from __future__ import annotations

from torch import Tensor, fx, nn

from fxpipe.ir.errors import TraceError
from fxpipe.ir.graph import attribute
from fxpipe.ir.tensors import memory_of
from fxpipe.trace.premises import Reads
from fxpipe.trace.snapshots import tensors_in


def refuse_leaked(model: nn.Module, reads: Reads, gm: fx.GraphModule) -> None:
    """Raise TraceError if a graph of a model's twin has a constant in place of a parameter.

    Args:
        reads: the attributes of the twin that have been read.
        gm: the graph of the twin.
    """
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    held = {
        memory_of(tensor): (name, type(module).__name__, names[id(tensor)])
        for (module, name), state in reads.items()
        for tensor in tensors_in(state)
        if id(tensor) in names
    }
    if not held:
        return
    for node in gm.graph.find_nodes(op="get_attr"):
        value = attribute(gm, str(node.target))
        if isinstance(value, Tensor) and not value.requires_grad and memory_of(value) in held:
            name, owner, parameter = held[memory_of(value)]
            raise TraceError(
                f"the forward of {owner} uses the parameter {parameter} by its attribute {name}, "
                "an object that is not copied for the trace, so that the parameter would get no "
                "gradient by this use: read it from its module, or give it to the module as an "
                "attribute of its own"
            )
