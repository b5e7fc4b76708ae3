"""Whether graphs differ only by numbers that they compute with: such a number may be a tensor.

::

    scale * x               mul(x, 3)  and  mul(x, 4)       a tensor serves as well
    for _ in range(n):      three nodes, and four           what is computed depends on the number
    x[:, n]                 a number that has to be known   no operand
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxpipe.ir._torch import pytree

_ARITHMETIC = {"add", "sub", "rsub", "mul", "div", "truediv", "pow", "remainder", "mod"}


def differ_by_operands(one: fx.Graph, other: fx.Graph) -> bool:
    """Whether two graphs compute the same but for numbers that are operands of arithmetic, at one
    place or more."""
    ours, theirs = list(one.nodes), list(other.nodes)
    if len(ours) != len(theirs):
        return False
    places = [{node: i for i, node in enumerate(nodes)} for nodes in (ours, theirs)]
    differs = False
    for node, like in zip(ours, theirs, strict=True):
        parts, spec = _parts(node, places[0])
        others, other_spec = _parts(like, places[1])
        if (node.op, node.target, spec) != (like.op, like.target, other_spec):
            return False
        if all(type(a) is type(b) and a == b for a, b in zip(parts, others, strict=True)):
            continue
        pairs = zip(parts, others, strict=True)
        if _name(node) not in _ARITHMETIC or not all(
            a == b or _are_numbers(a, b) for a, b in pairs
        ):
            return False
        differs = True
    return differs


def _parts(node: fx.Node, places: dict[fx.Node, int]) -> tuple[list[Any], Any]:
    """The arguments of a node in one list, with places of nodes in place of the nodes."""
    arguments = fx.map_arg((node.args, node.kwargs), lambda each: _At(places[each]))
    parts, spec = pytree.tree_flatten(arguments)
    return list(parts), spec


class _At(int):
    """The place of a node in its graph: equal places stand for the same node of two graphs."""


def _are_numbers(*values: Any) -> bool:
    return all(type(value) in (int, float) for value in values)


def _name(node: fx.Node) -> str:
    """The name of what a node calls: "mul" for ``operator.mul``, ``torch.mul``, ``x.mul_`` and the
    operators ``mul.Tensor`` and ``mul.Scalar``."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return str(name).partition(".")[0].strip("_")
