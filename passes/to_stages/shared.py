"""Shared: a parameter with several uses becomes one value of the graph, so that stages on different
devices can share it.

::

    before     embed (weight) ─ ... ─ head (weight)          a weight that two modules share

    after      weight ─ share ─┬─ embed ─ ... ─ head         one value with two users
                               └───────────────┘

So a tied weight may be used by stages on different devices: it lives in the stage of its first
user, goes to the others through copies and portals, and its gradients come back the same way. And
the gradients of all uses in one micro-batch meet at ``share``, in the order of the model's own
backward, before the parameter gets their sum. Without ``share``, each gradient would be added to
the parameter's as it comes, mixed with those of other micro-batches, and the sum would round
otherwise than the model's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx, nn

from fxpipe import ops
from fxpipe.ir.autograd import leaf_of
from fxpipe.ir.cost import Cost
from fxpipe.ir.graph import (
    COST,
    NO_BACKWARD,
    SHARED,
    VALUE,
    WORKSPACE,
    WRITES_STATE,
    attribute,
    stage_nodes,
)
from fxpipe.ir.workspace import NodeWorkspace
from passes.common.deferrable import is_deferrable
from passes.common.fakes import FakeInterpreter, backward_edges, fake_mode


@dataclass(frozen=True)
class Shared:
    """Model graph with fake values (pass "alias") → the same, in which each parameter that has
    several uses is a value with several users.

    A use is a node that needs the parameter, or an edge of the autograd graph that leads to it. So
    a module that is called twice has parameters with several uses, and so have two modules that
    share a weight, and a recurrent module that uses its weights at each step. A parameter that the
    forward writes to stays as it is: all its uses are in one stage (pass "alias"), and autograd
    lets nobody write in place to what ``share`` gives.

    ``training``: whether there is a backward; if not, the value gets no gradient.
    """

    name: ClassVar[str] = "shared"
    training: bool = True

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        # Of several paths of one parameter the first one counts.
        paths = {id(p): path for path, p in reversed(_parameters(gm))}
        interpreter = FakeInterpreter(gm, fake_mode(gm.graph))
        written = {
            id(attribute(gm, path))
            for node in gm.graph.nodes
            for path in node.meta.get(WRITES_STATE, ())
        }
        several = (_by_nodes(gm) | _by_edges(interpreter)) - written
        shared: dict[int, fx.Node] = {}

        def share(parameter: nn.Parameter, user: fx.Node) -> fx.Node:
            """The ``share`` node of a parameter; it is made ahead of the parameter's first user."""
            if id(parameter) not in shared:
                with gm.graph.inserting_before(user):
                    path = paths[id(parameter)]
                    name = path.replace(".", "_")
                    source = gm.graph.create_node("get_attr", path, name=name)
                    args = (source,)
                    node = gm.graph.create_node(
                        "call_function", ops.share, args, name=f"{name}_shared"
                    )
                value = interpreter.fake(parameter)
                node.meta = {
                    VALUE: value if self.training else value.detach(),
                    COST: Cost(),
                    SHARED: True,
                }
                shared[id(parameter)] = node
            return shared[id(parameter)]

        for node in list(stage_nodes(gm.graph)):
            before = node.all_input_nodes
            for source in node.all_input_nodes:
                if source.op == "get_attr":
                    value = attribute(gm, str(source.target))
                    if id(value) in several:
                        node.replace_input_with(source, share(value, node))
            if node.op == "call_module":
                module = gm.get_submodule(str(node.target))
                own = {name: p for name, p in _parameters(module) if id(p) in several}
                if own:
                    _give(node, {name: share(p, node) for name, p in own.items()})
            if WORKSPACE in node.meta and node.all_input_nodes != before:
                # The gradient of a value that others have as well does not wait for a second half.
                later = is_deferrable(gm, node)
                node.meta[WORKSPACE] = replace(node.meta[WORKSPACE], is_deferrable=later)
        for node in gm.graph.find_nodes(op="get_attr"):
            if not node.users:
                gm.graph.erase_node(node)
        for node in shared.values():
            if all(NO_BACKWARD in user.meta for user in node.users):
                # The model leaves such a parameter without a gradient, where ``share`` would give
                # it one of zeros.
                node.meta[NO_BACKWARD] = True
        if shared:
            gm.recompile()
        return gm


def _give(node: fx.Node, values: dict[str, fx.Node]) -> None:
    """Make a node that calls a module one that runs it with these values for some parameters.

    ``values`` are by the parameters' names in the module. The node keeps its name, by which users
    and saved profiles know it.
    """
    with node.graph.inserting_before(node):
        module = node.graph.create_node("get_attr", node.target, name=f"{node.name}_module")
    node.op, node.target, node.args = "call_function", ops.call, (module, values, *node.args)
    if WORKSPACE in node.meta:  # its gradients are by the tensors that it is given
        needed: NodeWorkspace = node.meta[WORKSPACE]
        gradients = (0,) * len(values) + needed.gradients
        node.meta[WORKSPACE] = replace(needed, gradients=gradients)


def _parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(remove_duplicate=False))


def _by_nodes(gm: fx.GraphModule) -> set[int]:
    """The parameters that several nodes need."""
    uses: Counter[int] = Counter()
    for node in stage_nodes(gm.graph):
        needed = {
            id(attribute(gm, str(source.target)))
            for source in node.all_input_nodes
            if source.op == "get_attr"
        }
        if node.op == "call_module":
            needed |= {id(p) for p in gm.get_submodule(str(node.target)).parameters()}
        uses.update(needed)
    return {id(p) for _, p in _parameters(gm) if uses[id(p)] > 1}


def _by_edges(interpreter: FakeInterpreter) -> set[int]:
    """The parameters that several edges of the autograd graph lead to."""
    gm: Any = interpreter.module
    # The fakes are kept as long as their ids are compared: the id of a freed one is used again.
    fakes = [(interpreter.fake(p), p) for _, p in _parameters(gm)]
    originals = {id(fake): id(p) for fake, p in fakes}
    # Recurrent modules keep lists of their weights, and run on the real ones.
    originals |= {id(p): id(p) for _, p in fakes}
    values = [node.meta.get(VALUE) for node in gm.graph.output_node().all_input_nodes]
    leaves = (leaf for edge in backward_edges(values) if (leaf := leaf_of(edge)) is not None)
    edges = Counter(originals.get(id(leaf), 0) for leaf in leaves)
    return {parameter for parameter, count in edges.items() if count > 1}
