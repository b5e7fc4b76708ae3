"""Follows the values of a graph from node to node, and checks each node against the promises of the
vocabulary (:mod:`fxpipe.ops`).

::

    node                                        what is known of its value
    x_mb0 = x_parts[0]                          x of micro-batch 0, on the caller's stream
    copy_s1_mb0 = copy((x_mb0,), 'caller', ...) x of micro-batch 0, arriving at lane 1
    wait_s1_mb0 = wait(copy_s1_mb0, ...)        x of micro-batch 0, on the compute stream of lane 1
    stage_1_mb0 = stage_1(x_s1_mb0)             a stage takes what its lane's compute stream has

Nothing is run: a node is visited once, and each of its arguments is looked at once. The promises
about values are:

1. a node uses values that are ready on its stream: another stream's value has been waited for, and
   another device's has been copied. (Waits and copies keep the memory of what they are given until
   their stream has used it, so a value that is ready is also still there.)
2. a node uses values of its own micro-batch, and a stage the values that it takes its names from;
3. all micro-batches are treated alike;
4. nodes that use the same memory, one of which writes to it, are ordered (:mod:`.effects`);
5. a portal is moved once and opened once.

The rules for single functions are in a file for each subject: :mod:`~passes.verify.parts`,
:mod:`~passes.verify.links`, :mod:`~passes.verify.gates`, :mod:`~passes.verify.shards`, and, for a
training step, :mod:`~passes.verify.actions`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fxpipe import ops
from passes.to_rank.project import edge_of
from passes.verify import actions, gates, links, parts, shards
from passes.verify.errors import VerifyError
from passes.verify.visit import RULES, Visit

_WITH_RULES = actions, gates, links, parts, shards  # files that register rules as they are imported


def follow(visit: Visit) -> Iterator[fx.Node]:
    """Visit all nodes of a graph. Yields a node whose value another rank has not sent yet, and goes
    on once it has."""
    known = visit.known
    for node in visit.gm.graph.nodes:
        key = node.target if node.op == "call_function" else node.op
        if key is ops.arrived:
            while _must_wait(visit, node):
                yield node
        for each in node.all_input_nodes:
            if each not in known:
                raise VerifyError("it uses a value that is not computed ahead of it", node, each)
        visit.begin(node)
        known[node] = (RULES.get(key) or RULES[node.op])(visit, node)


def check_end(visit: Visit) -> None:
    """Check what can be checked only once all nodes have been visited."""
    _check_names(visit)
    _check_uses(visit)
    actions.check_actions(visit)


def _must_wait(visit: Visit, node: fx.Node) -> bool:
    if visit.is_one_of_several:
        return False
    (received,) = node.all_input_nodes
    return edge_of(received) not in visit.exchange.arrivals


def _check_names(visit: Visit) -> None:
    """Check that no two nodes have one name."""
    by_name = {node.name: node for node in visit.known}
    if len(by_name) == len(visit.known):
        return
    for node in visit.known:
        if by_name[node.name] is not node:
            raise VerifyError(
                f"another node has the name {node.name}, too", by_name[node.name], node
            )


def _check_uses(visit: Visit) -> None:
    """Check that what stages give is used, and that each portal is moved and opened once."""
    for name, giver in visit.given_by.items():
        if name not in visit.taken:
            raise VerifyError(f"the stage gives {name}, which nobody uses", giver)
    for blue, uses in visit.portals.items():
        moves = sum(node.target is ops.portal_copy for node in uses)
        takers = len(uses) - moves
        if (moves, takers) != (1, 1):
            raise VerifyError(
                f"a portal is moved and taken out once each, not {moves} and {takers} times",
                blue,
            )
