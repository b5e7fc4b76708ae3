"""The order of the backwards of a pipeline graph, which autograd runs.

::

    forward     stage (i, j) ── recompute ── fork ── (leaves)
                                              └─ ─ phony ─ ─ ┐
                                       (arrives) ── wait ── join ── stage (i + 1, j)

    backward    stage (i + 1, j) ── join ── phony ── fork ── recompute ── stage (i, j)

Autograd runs the backward of a node when the gradients of all its results have come, so that each
edge of the graph along which gradients flow is an edge of happens-before, the other way round. The
backward of stage j for micro-batch i comes after that for micro-batch i + 1 if

1. all that leaves cell (i, j) has passed the fork, behind which the stage, and what runs it again,
   lie in the backward;
2. the stage of cell (i + 1, j) lies behind the join of the fork's phony: all that arrives with a
   gradient passes the join. Where nothing that arrives has a gradient there is no such place; then
   all that leaves passes the join, and the stage's backward, whose nodes were made later than those
   of micro-batch i, is run first, since autograd runs what was made last first.

That autograd keeps to these pictures is held by ``tests/passes/verify/test_autograd_pictures.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Never

from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import STREAM
from fxpipe.runtime.streams import COMPUTE
from passes.to_pipeline.cells import Cell
from passes.to_pipeline.dependencies import may_have_gradient
from passes.verify.errors import VerifyError

AGAIN = (ops.checkpoint, ops.selective, ops.offloaded)
"""The calls of a stage whose activations have to be made, or brought, for the backward."""
GATES = (ops.wait, ops.fork, ops.join, ops.recompute)
ORDER: dict[object, int] = {ops.wait: 0, ops.recompute: 1, ops.fork: 2}
"""The gates that values pass as they leave a cell, in order. In the backward the fork comes first,
so that nothing is run again before the next micro-batch is done; and a stage is run again ahead of
the wait for the gradient, while this is still being copied."""


def check_backward(graph: fx.Graph, cells: Mapping[Cell, Sequence[fx.Node]]) -> None:
    """Check that at every stage the backwards of the micro-batches come in one order, the last one
    first. ``cells`` are the nodes of each cell of the graph, in order.

    Raises :class:`VerifyError` for a graph in which they may come in another order.
    """
    is_checkpointed = any(
        graph.find_nodes(op="call_function", target=target, sort=False) for target in AGAIN
    )
    if not is_checkpointed and not graph.find_nodes(op="call_module", sort=False):
        return  # a step graph, in which each backward is a node
    for brought in graph.find_nodes(op="call_function", target=ops.bring, sort=False):
        if brought.all_input_nodes[0].op == "get_attr":
            raise VerifyError(
                "the gradient that this brings back is added to those of the parameter's own "
                "stage in the order in which they come: the parameter has to be lent",
                brought,
            )
    found = {cell: _CellContents.of(cell, nodes) for cell, nodes in cells.items()}
    for (microbatch, stage), own in found.items():
        if not own.calls or not own.has_streams:
            continue  # a cell of a graph without streams, which is run without gradients
        if not own.leaving:
            continue  # nothing that the stage computes is used, so that it has no backward
        _check_exit(own)
        following = found.get((microbatch + 1, stage))
        if following is not None:
            _check_order(own, following)


@dataclass(slots=True)
class _CellContents:
    """The nodes of a cell that matter for the order of backwards.

    Args:
        cell: the micro-batch and the stage.
        first: the cell's first node.
        calls: those that run the stage.
        forks, joins: those that order backwards.
        items: those that take an element out of what another node gives.
        leaving: those whose values are used outside of the cell; phonies are none of them.
        has_streams: whether nodes are noted on streams.
        inside: all nodes of the cell.
        gates: by a node of the cell, the gates of the cell's exit that its value has passed, as far
            as somebody has asked.
    """

    cell: Cell
    first: fx.Node
    inside: Set[fx.Node]
    calls: list[fx.Node] = field(default_factory=list)
    forks: list[fx.Node] = field(default_factory=list)
    joins: list[fx.Node] = field(default_factory=list)
    items: list[fx.Node] = field(default_factory=list)
    leaving: list[fx.Node] = field(default_factory=list)
    has_streams: bool = False
    gates: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)

    @staticmethod
    def of(cell: Cell, nodes: Sequence[fx.Node]) -> _CellContents:
        """Find the nodes of a cell that matter."""
        inside = set(nodes)
        found = _CellContents(cell, nodes[0], inside)
        for node in nodes:
            function = node.target
            if function is operator.getitem:
                found.items.append(node)
            elif function is ops.fork:
                found.forks.append(node)
            elif function is ops.join:
                found.joins.append(node)
            elif function in AGAIN or node.op == "call_module":
                found.calls.append(node)
                found.has_streams = STREAM in node.meta
            if not inside.issuperset(node.users) and not _is_phony(node):
                found.leaving.append(node)
        return found


def _check_exit(own: _CellContents) -> None:
    """Check the gates of a cell's exit: all that leaves passes each of them, in their order."""
    leaving = own.leaving
    passed = [_gates_of(node, own) for node in leaving]
    gates = passed[0]
    if any(each != gates for each in passed):
        _raise_for_passing_by(leaving, passed)
    if len(leaving) > 1 and not gates:
        raise VerifyError(
            "several values leave the cell, and no gate lets their gradients enter together",
            leaving[0],
        )
    ranks = [ORDER[gate.target] for gate in gates if gate.target in ORDER]
    if sorted(ranks) != ranks:
        raise VerifyError(
            "values leave a cell by a wait, a recompute and a fork, in this order",
            gates[-1],
            gates[0],
        )
    checkpointed = [call for call in own.calls if call.target in AGAIN]
    again = [gate for gate in gates if gate.target is ops.recompute]
    if bool(checkpointed) != bool(again) or len(again) > 1:
        raise VerifyError(
            "a checkpointed stage is run again, and an offloaded one brought back, by one "
            "recompute, which all that leaves it passes",
            (again or own.calls)[-1],
        )
    if again and again[0].args[1] is not _handle(checkpointed[-1]):
        raise VerifyError(
            "of the parts of a stage that are run again, the one that ran last is so first",
            again[0],
        )


def _raise_for_passing_by(leaving: list[fx.Node], passed: list[list[fx.Node]]) -> Never:
    """Raise the error about a value that passes by a gate which another one has passed."""
    for gate in dict.fromkeys(gate for each in passed for gate in each):
        for node, each in zip(leaving, passed, strict=True):
            if gate not in each:
                raise VerifyError(
                    "all values that leave a cell pass its gates together, so that no gradient "
                    f"enters before all have come: this one passes by {gate.name}",
                    node,
                    gate,
                )
    raise VerifyError("the values that leave a cell pass its gates in one order", leaving[0])


def _is_phony(node: fx.Node) -> bool:
    if node.args[1:] != (1,):
        return False
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.target is ops.fork


def _handle(call: fx.Node) -> fx.Node | None:
    return next((user for user in call.users if user.args[1:] == (1,)), None)


def _gates_of(node: fx.Node, own: _CellContents) -> list[fx.Node]:
    """The gates of a cell's exit that a value has passed, in the order of the forward."""
    if node not in own.gates:
        own.gates[node] = _found_gates(node, own)
    return own.gates[node]


def _found_gates(node: fx.Node, own: _CellContents) -> list[fx.Node]:
    values = node.args[0] if node.args else None
    if node.target is operator.getitem:
        if isinstance(values, fx.Node) and values in own.inside:
            return _gates_of(values, own)
        return []
    if node.target not in GATES or _is_entry(node, own):
        return []
    inner = [each for each in _flat(values) if each in own.inside]
    return [*_common([_gates_of(each, own) for each in inner]), node]


def _common(chains: Sequence[list[fx.Node]]) -> list[fx.Node]:
    first = chains[0] if chains else []
    if all(chain == first for chain in chains):
        return first
    return [gate for gate in first if all(gate in chain for chain in chains)]


def _is_entry(gate: fx.Node, own: _CellContents) -> bool:
    """Whether a gate is one of those by which values arrive: a wait of the compute stream, or a
    join ahead of the stage. What a join takes does not tell: a value that passes by the stage
    arrives and leaves, and may be joined at either end.
    """
    if gate.target is ops.wait:
        return _is_awaiting(gate)
    return gate.target is ops.join and (not own.calls or gate < own.calls[0])


def _is_awaiting(wait: fx.Node) -> bool:
    return str(wait.args[2]).endswith(COMPUTE)


def _flat(values: object) -> list[fx.Node]:
    if isinstance(values, fx.Node):
        return [values]
    if not isinstance(values, tuple):
        return []
    found = []
    for part in values:
        if isinstance(part, fx.Node):
            found.append(part)
        else:
            found += _flat(part)
    return found


def _check_order(own: _CellContents, following: _CellContents) -> None:
    joins = [node for node in following.joins if _fork_of(node) in own.forks]
    microbatch, stage = own.cell
    late = (
        f"the backward of micro-batch {microbatch} at stage {stage} is not made to come after that "
        f"of micro-batch {microbatch + 1}"
    )
    if not joins:
        node = (own.forks or own.leaving)[-1]
        raise VerifyError(late, following.first, node, "a join of the fork's phony")
    join = joins[0]
    entering = [n for n in following.items if _is_awaited(n) and may_have_gradient(n)]
    if _is_entry(join, following):
        missed = [node for node in entering if any(user is not join for user in node.users)]
        if missed:
            raise VerifyError(late, missed[0], join, f"{missed[0].name} among the join's values")
        return
    if entering:
        raise VerifyError(late, join, entering[0], "the join where these values arrive")
    for node in following.leaving:
        if join not in _gates_of(node, following):
            raise VerifyError(late, node, join, f"{node.name} among the join's values")


def _fork_of(join: fx.Node) -> object:
    phony = join.args[1]
    return phony.args[0] if isinstance(phony, fx.Node) and phony.args else None


def _is_awaited(item: fx.Node) -> bool:
    """Whether an element is a value for which the compute stream has waited as it arrived."""
    source = item.args[0]
    return isinstance(source, fx.Node) and source.target is ops.wait and _is_awaiting(source)
