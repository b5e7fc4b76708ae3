"""Nodes that call a module with values in place of some of its parameters (``ops.call``), as pass
"shared" makes them; pass "random" gives a seed to those that draw random numbers::

    y = call(module, {"weight": shared}, x)
    y = seeded(seed, module, {"weight": shared}, x)        the same, by a module of fxpipe's
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import attribute
from fxpipe.runtime.random import unseeded


def given_values(node: fx.Node) -> tuple[fx.Node, Mapping[str, Any]] | None:
    """The node of the module that a node calls with values in place of some of its parameters, and
    these values by the parameters' names; None for a node that does not."""
    args: Any = node.args
    if node.op == "call_module" and node.graph.owning_module is not None:
        if unseeded(attribute(node.graph.owning_module, str(node.target))) is not ops.call:
            return None
        args = args[1:]
    elif node.target is not ops.call:
        return None
    return args[0], args[1]
