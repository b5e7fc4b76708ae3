"""Checks: what a model checks of its values is checked in the earliest stage that can do so.

::

    before     stage 0                      stage 1           stage 2
               ids ─┬─ embedding ────────── linear ────────── linear_1
                    └─ max ────────────────────────────────── lt ─ assert

    after      ids ─┬─ embedding ────────── linear ────────── linear_1
                    └─ max ─ lt ─ assert

Nothing uses what a check gives, so a cut may leave it to any stage. In a late one it would come too
late: what it guards against (an index out of range) would fail first, with an error that says less,
or all stages would have worked in vain. A check of the model's inputs belongs to the first stage,
any other one to the stage in which the last of the values that it begins from is made. Within a
stage it keeps its place in the program.

What is computed for checks alone goes with them, if it is in a later stage. Where that begins from
one value, nothing more is sent than before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx, nn

from fxpipe.ir.checks import is_check
from fxpipe.ir.graph import ALIAS, RANDOM, STAGE, WRITES, WRITES_STATE, attribute, stage_nodes
from passes.partition.problem import together


@dataclass(frozen=True)
class EarlyChecks:
    """Model graph with ``meta["stage"]`` → the same, in which checks of values, and the nodes that
    serve nothing else, are in the earliest stages possible.

    The graph stays as it is if a stage would be left without nodes.
    """

    name: ClassVar[str] = "checks"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        stages = {node: node.meta[STAGE] for node in stage_nodes(gm.graph)}
        moved = stages | _early(_for_checks(gm), stages)
        if set(moved.values()) == set(stages.values()):
            for node, stage in moved.items():
                node.meta[STAGE] = stage
        return gm


def _early(nodes: list[fx.Node], stages: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """The stages to which nodes move that only checks use, from the stages where all nodes are.

    A check moves to the earliest stage that has its values. A node that is used moves no further
    than it has to.
    """
    earliest = dict(stages)
    for node in nodes:
        earliest[node] = max((earliest.get(n, 0) for n in node.all_input_nodes), default=0)
    moved: dict[fx.Node, int] = {}
    for node in reversed(nodes):
        users = [moved[user] for user in node.users]
        moved[node] = min(stages[node], *users) if users else earliest[node]
    for maker, part in together(nodes):  # several results of one node are taken apart where it is
        moved[part] = moved[maker]
    return moved


def _for_checks(gm: fx.GraphModule) -> list[fx.Node]:
    """The checks of a graph, and the nodes that nothing but checks use, in the graph's order."""
    found: dict[fx.Node, None] = {}
    for node in reversed(list(stage_nodes(gm.graph))):
        is_for_checks = found.keys() >= node.users.keys() if node.users else _checks(gm, node)
        if is_for_checks and _may_move(gm, node):
            found[node] = None
    return list(reversed(found))


def _checks(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node whose value is not used is a check, or a region of checks only: a part of the
    model that runs without gradients, say, and is a graph within the graph."""
    return is_check(node) or any(
        len(_for_checks(part)) == len(list(stage_nodes(part.graph)))
        for part in _attributes(gm, node)
        if isinstance(part, fx.GraphModule)
    )


def _may_move(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node can be in another stage than the cut has put it into. It cannot if it shares
    memory that is written to, draws random numbers, or has parameters, which live in its stage."""
    return (
        node.op in ("call_function", "call_method")
        and not any(key in node.meta for key in (ALIAS, RANDOM, WRITES, WRITES_STATE))
        and not any(map(_has_parameters, _attributes(gm, node)))
    )


def _has_parameters(value: Any) -> bool:
    """Whether it is a parameter, or a module with parameters. Of a module that is not a graph, it
    is not known what it does."""
    if isinstance(value, fx.GraphModule):
        return any(True for _ in value.parameters())
    return isinstance(value, nn.Parameter | nn.Module)


def _attributes(gm: fx.GraphModule, node: fx.Node) -> list[Any]:
    """The tensors and modules that a node is given from the attributes of the graph module."""
    return [attribute(gm, str(n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
