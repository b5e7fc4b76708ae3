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
from collections.abc import Sequence

from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import STREAM
from fxpipe.runtime.streams import COMPUTE
from passes.to_pipeline.cells import CARRIERS, Cell, cell_of, cells, outgoing
from passes.to_pipeline.dependencies import may_have_gradient
from passes.verify.errors import VerifyError

GATES = (ops.wait, ops.fork, ops.join, ops.recompute)
ORDER = (ops.wait, ops.recompute, ops.fork)
"""The gates that values pass as they leave a cell, in order. In the backward the fork comes first,
so that nothing is run again before the next micro-batch is done; and a stage is run again ahead of
the wait for the gradient, while this is still being copied."""


def check_backward(graph: fx.Graph) -> None:
    """Check that at every stage the backwards of the micro-batches come in one order, the last one
    first. Raises :class:`VerifyError` for a graph in which they may not."""
    found = cells(graph)
    for cell, nodes in found.items():
        calls = [n for n in nodes if n.op == "call_module" or n.target is ops.checkpoint]
        if not calls or not any(STREAM in node.meta for node in nodes):
            continue  # a cell of a graph without streams, which is run without gradients
        if not _values(nodes):
            continue  # nothing that the stage computes is used, so that it has no backward
        _check_exit(cell, nodes, calls)
        following = (cell[0] + 1, cell[1])
        if following in found:
            _check_order(cell, nodes, found[following])


def _check_exit(cell: Cell, nodes: Sequence[fx.Node], calls: Sequence[fx.Node]) -> None:
    """Check the gates of a cell's exit: all that leaves passes each of them, in their order."""
    leaving = _values(nodes)
    passed: list[list[fx.Node]] = [_gates_of(node, cell) for node in leaving]
    gates = list(dict.fromkeys(gate for each in passed for gate in each))
    for gate in gates:
        for node, own in zip(leaving, passed, strict=True):
            if gate not in own:
                raise VerifyError(
                    "all values that leave a cell pass its gates together, so that no gradient "
                    f"enters before all have come: this one passes by {gate.name}",
                    node,
                    gate,
                )
    if len(leaving) > 1 and not gates:
        raise VerifyError(
            "several values leave the cell, and no gate lets their gradients enter together",
            leaving[0],
        )
    own = [gate for gate in gates if gate.target in ORDER]
    if sorted(own, key=lambda gate: ORDER.index(gate.target)) != own:
        raise VerifyError(
            "values leave a cell by a wait, a recompute and a fork, in this order", own[-1], own[0]
        )
    is_checkpointed = any(call.target is ops.checkpoint for call in calls)
    again = [gate for gate in gates if gate.target is ops.recompute]
    if is_checkpointed != bool(again) or len(again) > 1:
        raise VerifyError(
            "a checkpointed stage is run again by one recompute, which all that leaves it passes",
            (again or calls)[-1],
        )
    if again and again[0].args[1] is not _handle(calls[-1]):
        raise VerifyError("the part of a stage that ran last is run again first", again[0])


def _values(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The values of a cell that are used outside of it; phonies are none."""
    return [node for node in outgoing(nodes) if node.args[1:] != (1,) or not _is_of_fork(node)]


def _is_of_fork(node: fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.target is ops.fork


def _handle(call: fx.Node) -> fx.Node | None:
    return next((user for user in call.users if user.args[1:] == (1,)), None)


def _gates_of(node: fx.Node, cell: Cell) -> list[fx.Node]:
    """The gates of a cell's exit that a value has passed, in the order of the forward."""
    gates: list[fx.Node] = []
    while cell_of(node) == cell:
        if node.target in GATES:
            if _is_entry(node):
                break
            gates.append(node)
        elif node.target is not operator.getitem:
            break
        before = node.args[0]
        if node.target is operator.getitem or isinstance(before, fx.Node):
            assert isinstance(before, fx.Node)
            node = before
        else:
            inner = [each for each in _flat(before) if cell_of(each) == cell]
            if not inner:
                break
            chains = [_gates_of(each, cell) for each in inner]
            return _common(chains) + gates[::-1]
    return gates[::-1]


def _common(chains: Sequence[list[fx.Node]]) -> list[fx.Node]:
    return [gate for gate in chains[0] if all(gate in chain for chain in chains[1:])]


def _is_entry(gate: fx.Node) -> bool:
    """Whether a gate is one of those by which values arrive."""
    if gate.target is ops.wait:
        return str(gate.args[2]).endswith(COMPUTE)
    values = gate.args[0]
    inner = _flat(values)
    return gate.target is ops.join and all(_is_arriving(node) for node in inner)


def _is_arriving(node: fx.Node) -> bool:
    while node.target is operator.getitem:
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]
    return node.target in CARRIERS or (node.target in GATES and _is_entry(node))


def _flat(values: object) -> list[fx.Node]:
    if isinstance(values, fx.Node):
        return [values]
    return [each for part in values for each in _flat(part)] if isinstance(values, tuple) else []


def _check_order(cell: Cell, nodes: Sequence[fx.Node], following: Sequence[fx.Node]) -> None:
    forks = [node for node in nodes if node.target is ops.fork]
    joins = [node for node in following if node.target is ops.join and _fork_of(node) in forks]
    microbatch, stage = cell
    late = (
        f"the backward of micro-batch {microbatch} at stage {stage} is not made to come after that "
        f"of micro-batch {microbatch + 1}"
    )
    if not joins:
        node = (forks or _values(nodes))[-1]
        raise VerifyError(late, following[0], node, "a join of the fork's phony")
    join = joins[0]
    arriving = [node for node in following if _is_awaited_tensor(node)]
    entering = [node for node in arriving if may_have_gradient(node)]
    if _is_entry(join):
        missed = [node for node in entering if any(user is not join for user in node.users)]
        if missed:
            raise VerifyError(late, missed[0], join, f"{missed[0].name} among the join's values")
        return
    if entering:
        raise VerifyError(late, join, entering[0], "the join where these values arrive")
    for node in _values(following):
        if join not in _gates_of(node, (microbatch + 1, stage)):
            raise VerifyError(late, node, join, f"{node.name} among the join's values")


def _fork_of(join: fx.Node) -> object:
    phony = join.args[1]
    return phony.args[0] if isinstance(phony, fx.Node) and phony.args else None


def _is_awaited_tensor(node: fx.Node) -> bool:
    """Whether a node is a value for which the compute stream has waited as it arrived."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.target is ops.wait and _is_entry(source)
