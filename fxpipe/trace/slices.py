"""Slices of everything, which indexing has left in an exported graph, are taken out.

::

    x[:, i]      exported    x ── slice(0, all) ── select(1, i)
                 eager       x ── select(1, i)

PyTorch takes no slice where an index is ``:``, but records one while a model is exported. It would
cost a call forward, and one backward that fills a tensor of zeros and copies all of the gradient: a
loop over time of a hundred steps has hundreds of them. A slice whose result is no step of an index
stays, since ``x[:]`` by itself is another tensor than ``x``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_STEPS = {_aten.select.int, _aten.slice.Tensor, _aten.unsqueeze.default, _aten.index.Tensor}
"""What else an index is made of: a number, a range, None, and a tensor."""


_DEFAULTS = 0, None, None, 1  # of the dimension, the first element, the end and the step


def without_whole_slices(graph: fx.Graph) -> None:
    """Take the slices of everything out of a graph that the next steps of an index follow."""
    for node in graph.find_nodes(op="call_function", target=_aten.slice.Tensor):
        source: Any
        source, *limits = node.args
        given: list[Any] = [*limits, *_DEFAULTS[len(limits) :]]
        _, start, stop, step = given
        is_whole = start in (0, None) and stop in (None, sys.maxsize) and step == 1
        if is_whole and node.users and all(user.target in _STEPS for user in node.users):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
