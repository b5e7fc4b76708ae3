"""The walk over an autograd graph, from the nodes of results to those of leaves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

Node = Any
"""A node of an autograd graph: ``tensor.grad_fn``, or the accumulation into a leaf, which has the
leaf as its ``variable``."""


def reached(starts: Iterable[Node]) -> Iterator[Node]:
    """The nodes that a backward from these visits, each once, in an order that the graph alone
    determines: those nearer to the starts come first."""
    nodes = list(dict.fromkeys(starts))
    seen = set(nodes)
    for node in nodes:  # the list grows while it is walked
        yield node
        for function, _ in node.next_functions:
            if function is not None and function not in seen:
                seen.add(function)
                nodes.append(function)
