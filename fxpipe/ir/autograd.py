"""The walk over an autograd graph, from the nodes of results to those of leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

Node = Any
"""A node of an autograd graph: ``tensor.grad_fn``, or the accumulation into a leaf, which has the
leaf as its ``variable``."""


Edge = tuple[Node | None, int]
"""The node that a gradient goes to, None if it goes nowhere, and the gradient's number there."""


_ACCUMULATION: Any = type(get_gradient_edge(torch.empty(0, device="cpu", requires_grad=True)).node)


def leaf_of(node: Node) -> Tensor | None:
    """The leaf into whose ``.grad`` a node accumulates; None for any other node.

    It is told by the node's type: an autograd function of the user's may have a ``variable``, too.
    """
    return node.variable if type(node) is _ACCUMULATION else None


def leaves_reached(
    starts: Iterable[Node], ends: type | None = None, met: list[Node] | None = None
) -> list[Tensor]:
    """The leaves that a backward from these nodes visits, each once, in the order of
    :func:`reached`. The walk goes past no node of the type ``ends``; those go into ``met``.

    It is a loop of its own, since the loss of each micro-batch is walked through. Each node that it
    looks at costs PyTorch an object of Python.
    """
    nodes = list(dict.fromkeys(starts))
    seen = set(nodes)
    leaves = []
    for node in nodes:  # the list grows while it is walked
        kind = type(node)
        if kind is _ACCUMULATION:
            leaves.append(node.variable)
        elif kind is not ends:
            for function, _ in node.next_functions:
                if function is not None and function not in seen:
                    seen.add(function)
                    nodes.append(function)
        elif met is not None:
            met.append(node)
    return leaves


def next_edges(node: Node) -> Sequence[Edge]:
    """Where the gradients go that a node gives."""
    edges: Sequence[Edge] = node.next_functions
    return edges


def reached(
    starts: Iterable[Node], edges: Callable[[Node], Sequence[Edge]] = next_edges
) -> Iterator[Node]:
    """The nodes that a backward from these visits, each once, in an order that the graph alone
    determines: those nearer to the starts come first.

    ``edges``: where the gradients go that a node gives, if some of the nodes are to be left out.
    """
    nodes = list(dict.fromkeys(starts))
    seen = set(nodes)
    for node in nodes:  # the list grows while it is walked
        yield node
        for function, _ in edges(node):
            if function is not None and function not in seen:
                seen.add(function)
                nodes.append(function)
