"""Verify: the pass proves that all values that cross stages are copied and waited for, and that the
backward is in order, or raises an error that names the node where it is not so.

::

    every value that crosses stages is carried by a copy or a portal,
    waits on both sides, leaves by one gate and enters by one gate,
    and a phony orders the backwards of adjacent micro-batches: fork (i, j) ─ ─ join (i + 1, j)

The pass changes nothing in the graph. Run it after passes of your own.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import STREAM
from fxpipe.ir.printing import format_node
from fxpipe.runtime.streams import COMPUTE, COPY
from passes.to_pipeline.cells import CARRIERS, Cell, cell_of, cells


class VerifyError(ValueError):
    """A pipeline graph does not keep its promises; the message says which, and shows the node."""


@dataclass(frozen=True)
class Verify:
    """Pipeline graph → the same.

    Raises :class:`VerifyError` for the first node that breaks one of the promises above.
    """

    name: ClassVar[str] = "verify"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        gm.graph.lint()
        found = cells(gm.graph)
        for node in gm.graph.nodes:
            for source in node.all_input_nodes:
                _check_crossing(node, source)
            if node.target is ops.portal_blue:
                _check_portal(node)
        for (microbatch, stage), nodes in found.items():
            if (following := (microbatch + 1, stage)) in found:
                _check_order(nodes, found[following], (microbatch, stage))
        return gm


def _fail(node: fx.Node, promise: str) -> None:
    raise VerifyError(f"{promise}:\n    {format_node(node)}")


def _check_crossing(node: fx.Node, source: fx.Node) -> None:
    here, there = cell_of(node), cell_of(source)
    if here == there or here is None:
        return
    if there is not None and node.target is ops.join and here[1] == there[1]:
        return  # the phony, from the same stage
    if node.target not in CARRIERS:
        is_from_caller = source.op in ("placeholder", "get_attr") or source.target is ops.bring
        if there is not None or not is_from_caller:
            _fail(node, f"{source.name} comes from elsewhere, and only a copy may bring it")
        return
    if STREAM in node.meta and not all(_is_awaited(user) for user in _taken(node)):
        _fail(node, "what it brings is used without a wait of the compute stream")
    if there is None:
        return
    if there[0] != here[0]:
        _fail(node, f"{source.name} belongs to another micro-batch")
    if there[1] >= here[1]:
        _fail(node, f"{source.name} comes from stage {there[1]}, which is no earlier one")
    if STREAM in node.meta and not _passes_wait(source, COPY):
        _fail(node, f"{source.name} leaves its stage without a wait for the copy stream")


def _taken(node: fx.Node) -> list[fx.Node]:
    """The users of the values that a carrier brings; in place of a ``getitem`` node, its users."""
    found = []
    for user in node.users:
        found += list(user.users) if user.target is operator.getitem else [user]
    return found


def _is_awaited(user: fx.Node) -> bool:
    return user.target is ops.wait and str(user.args[2]).endswith(COMPUTE)


def _passes_wait(node: fx.Node, role: str) -> bool:
    """Whether a value has passed, within its cell, a wait of the stream that has this role."""
    while cell_of(node) is not None:
        if node.target is ops.wait:
            return str(node.args[2]).endswith(role)
        inputs = [n for n in node.all_input_nodes if cell_of(n) == cell_of(node)]
        if not inputs:
            return False
        node = inputs[0]
    return False


def _check_portal(blue: fx.Node) -> None:
    """Check that the portal is moved once and taken out once, on its way through gates."""
    moves = takers = 0
    # Each node that gives the portal, with the portal's place in the tuple that the node gives.
    front: list[tuple[fx.Node, int | None]] = [(blue, None)]
    while front:
        node, place = front.pop()
        for user in node.users:
            if user.target is operator.getitem:
                index = user.args[1]
                if node.target is ops.fork and index == 0:
                    front.append((user, place))
                elif node.target is not ops.fork and index == place:
                    front.append((user, None))
            elif user.target is ops.portal_copy:
                moves += 1
                front.append((user, None))
            elif user.target is ops.portal_orange:
                takers += 1
            elif isinstance(user.args[0], tuple):
                front.append((user, user.args[0].index(node)))
            else:
                front.append((user, place))
    if (moves, takers) != (1, 1):
        _fail(blue, f"a portal is moved and taken out once each, not {moves} and {takers} times")


def _check_order(nodes: list[fx.Node], following: list[fx.Node], cell: Cell) -> None:
    forks = {node for node in nodes if node.target is ops.fork}
    joins = [node for node in following if node.target is ops.join]
    for join in joins:
        phony = join.args[1]
        if isinstance(phony, fx.Node) and phony.args[0] in forks:
            return
    _fail(
        following[0],
        f"the backward of micro-batch {cell[0]} at stage {cell[1]} is not made to come after that "
        f"of micro-batch {cell[0] + 1}",
    )
