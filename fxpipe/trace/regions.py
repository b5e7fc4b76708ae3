"""Groups of operators of an exported graph that are enclosed in one node each, as the operators
could not be cut into different stages, or run one by one.

::

    rows = nonzero(x > 0)        the number of rows depends on values: this operator and those that
    y = linear(x[rows])          use its result become one node, up to where a tensor has a known
    x.index_add(0, rows, y)      size again

    _vmap_increment_nesting      operators between these two see one row of many, as under
    _vmap_decrement_nesting      torch.vmap: they become one node together (so with torch.func.jvp)

Such a group becomes a module, which takes all tensors that it needs as inputs, parameters too.

    k = linear(x)                in-place writes to memory that the group uses keep their place in
    k[:, :3] = 0                 the order of the graph: between operators of the group, or ahead of
    k[k < 0] *= 0.1              one that writes to the same memory, they become part of it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, getitem
from typing import Any

import networkx as nx
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fxpipe.ir._torch import TRANSFORM_BEGINS, TRANSFORM_ENDS
from fxpipe.ir.graph import WHOLE
from fxpipe.trace import whole
from fxpipe.trace.blame import NotWhole
from fxpipe.trace.memory import MemoryAccesses

aten = torch.ops.aten

_COUNTS = {
    *(aten.bincount, aten.nonzero, aten.masked_select, aten.unique_dim, aten.unique_consecutive),
}
"""Operators whose results have a size that depends on values, whatever they are given."""

_KEPT = "stack_trace", "nn_module_stack"
# For each kind of group: why it is one node, and how the user can make several nodes of it.
_TRANSFORMED = (
    "it is one call of torch.vmap or torch.func.jvp",
    "call it for its parts, one after the other",
)
_SIZES = "sizes within it depend on values of tensors", whole.WITHOUT_VALUES

Attributes = dict[str, Any]
"""The modules that the nodes of a graph call, and the tensors that they get, by target."""


def enclose_transforms(graph: fx.Graph, attributes: Attributes) -> None:
    """Make one node of the operators from the one that opens a ``torch.vmap``, or a
    ``torch.func.jvp``, to the one that closes it; what is nested is part of the outer one."""
    depth = 0
    regions: list[list[Any]] = []
    for node in graph.nodes:
        if node.target in TRANSFORM_BEGINS:
            if not depth:
                regions.append([])
            depth += 1
        if depth and node.op != "get_attr":
            regions[-1].append(node)
        if node.target in TRANSFORM_ENDS:
            depth -= 1
    for number, nodes in enumerate(regions):
        name = f"{TRANSFORM_BEGINS[nodes[0].target]}_{number}"
        _enclose(graph, attributes, nodes, name, _TRANSFORMED)


def enclose_unknown_sizes(graph_module: fx.GraphModule, runs: Iterable[Callable[[], Any]]) -> None:
    """Make one node of all operators that give or take tensors whose size depends on values.

    The node then takes and gives tensors of known sizes only.

    Args:
        runs: functions that run the graph, each at another batch size; the shapes of what the new
            node gives are learned from these runs.

    Raises:
        NotWhole: if the sizes of the node's results do not follow from the sizes of its inputs.
    """
    graph = graph_module.graph
    attributes = {
        n.target: attrgetter(n.target)(graph_module)
        for n in graph.nodes
        if n.op in ("get_attr", "call_module")
    }
    parts: dict[nn.Module, str] = {}
    several = list(runs)
    for number, nodes in enumerate(_of_unknown_sizes(graph, MemoryAccesses(graph_module, several))):
        name = f"values_{number}"
        for node in nodes:
            if node.op == "call_module" and not set(nodes).issuperset(node.users):
                # How large its results are is learned by itself, and they would leave as a list.
                raise NotWhole(attributes[node.target], "sizes around it depend on values")
        part = _enclose(graph, attributes, nodes, name, _SIZES)
        graph_module.add_submodule(name, part)
        parts[part] = name
    graph_module.recompile()
    for name, call in whole.seen(parts, several).items():
        graph_module.add_submodule(name, whole.Whole(call))


def has_size_by_values(node: fx.Node) -> bool:
    """Whether a number, or the size of a tensor, that an operator gives depends on values.

    The export may know that size all the same, by what is done with the tensor later: of
    ``h * torch.bincount(labels, minlength=5)``, where ``h`` has five columns, that there are five
    counts. The operator needs values then, too, and those that use its result do not.
    """
    return bool(sized_by_values(node))


def sized_by_values(node: fx.Node) -> list[fx.Node]:
    """The nodes whose sizes depend on values: the node itself or, of a part of the model that is a
    graph within the graph, such as what runs under ``torch.no_grad``, nodes of that graph."""
    graphs = [_graph_of(each) for each in node.all_input_nodes]
    if inner := [n for graph in graphs if graph for e in graph.nodes for n in sized_by_values(e)]:
        return inner
    kind = getattr(node.target, "overloadpacket", None)
    return [node] if kind in _COUNTS or free_unbacked_symbols(node.meta.get("val")) else []


def _graph_of(node: fx.Node) -> fx.Graph | None:
    """The graph that a node reads from an attribute of its module, to give it to an operator."""
    if node.op != "get_attr" or node.graph.owning_module is None:
        return None
    value = attrgetter(str(node.target))(node.graph.owning_module)
    return value.graph if isinstance(value, fx.GraphModule) else None


def _of_unknown_sizes(graph: fx.Graph, uses: MemoryAccesses) -> list[list[fx.Node]]:
    """The nodes that give or take a value of unknown size, or give one whose size depends on
    values, in connected groups. A group also has the nodes on paths between its members, so that
    every other node can run either before the whole group or after it, and the nodes that write to
    the same memory. The nodes of each group are made to follow each other in the graph."""
    unknown = {n for n in graph.nodes if free_unbacked_symbols(n.meta.get("val"))}
    together: nx.Graph[fx.Node] = nx.Graph()
    together.add_nodes_from(node for node in graph.nodes if has_size_by_values(node))
    for node in graph.nodes:
        if node.op != "output":
            together.add_edges_from((s, node) for s in node.all_input_nodes if s in unknown)
    before = uses.predecessors()
    while True:
        groups = [set(group) for group in nx.connected_components(together)]
        for group in groups:
            more = uses.inseparable(group) | _between(before, group)
            more |= _taking_parts(group)
            nx.add_path(together, [*group, *(more - group)])
        is_same = nx.number_connected_components(together) == len(groups)
        if is_same and sum(map(len, groups)) == len(together):
            break
    return _one_after_the_other(graph, groups, before)


def _taking_parts(group: set[fx.Node]) -> set[fx.Node]:
    """The nodes that take one tensor each out of what an operator of a group gives: the group is to
    give tensors, no tuples."""
    operators = (node for node in group if node.op == "call_function")
    return {user for node in operators for user in node.users if user.target is getitem}


def _between(before: dict[fx.Node, set[fx.Node]], group: set[fx.Node]) -> set[fx.Node]:
    """The nodes of a group, and all nodes that have to come after one of them and before another,
    by the nodes that have to come before each node of a graph, in the graph's order."""
    after, ahead = set(group), set(group)
    for node, earlier in before.items():
        if not after.isdisjoint(earlier):
            after.add(node)
    for node in reversed(before):
        if node in ahead:
            ahead |= before[node]
    return after & ahead


def _one_after_the_other(
    graph: fx.Graph, groups: Sequence[set[fx.Node]], before: Mapping[fx.Node, set[fx.Node]]
) -> list[list[fx.Node]]:
    """Sort the nodes of a graph so that those of each group follow each other, where the last of
    them stands: nodes in between that have to come after one of the group are moved behind it.

    Returns the groups, and the nodes of each, in the graph's order.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    members = {node: [node] for node in position}
    for group in groups:
        ordered = sorted(group, key=position.__getitem__)
        members |= dict.fromkeys(ordered, ordered)
    order: nx.DiGraph[fx.Node] = nx.DiGraph()
    for node, earlier in before.items():
        last = members[node][-1]
        order.add_node(last)
        order.add_edges_from((members[n][-1], last) for n in earlier if members[n][-1] is not last)
    stands_for = list(nx.lexicographical_topological_sort(order, position.__getitem__))
    output = graph.output_node()
    for last in stands_for:
        for node in members[last]:
            if node is not output:
                output.prepend(node)
    chosen = {max(group, key=position.__getitem__) for group in groups}
    return [members[last] for last in stands_for if last in chosen]


def _enclose(
    graph: fx.Graph,
    attributes: Attributes,
    nodes: Sequence[fx.Node],
    name: str,
    why: tuple[str, str],
) -> nn.Module:
    """Replace nodes, which follow each other in the graph but for reads of the model's tensors, by
    one node that calls a module of this name; return the module.

    The module takes tensors only, and gives a list of tensors: sizes that it needs are computed
    again inside, from the tensors that have them. ``why`` is kept in the metadata of the node, for
    messages.
    """
    enclosed, inside = set(nodes), fx.Graph()
    inputs: list[fx.Node] = []
    copies: dict[fx.Node, fx.Node] = {}

    def find_inputs(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source in enclosed or source in copies:
                continue
            if isinstance(source.meta.get("val"), Tensor):
                inputs.append(source)
                copies[source] = inside.placeholder(source.name)
            else:
                find_inputs(source)

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            for source in node.all_input_nodes:
                copied(source)
            copies[node] = inside.node_copy(node, copies.__getitem__)
        return copies[node]

    for node in nodes:
        find_inputs(node)
    results = [node for node in nodes if not enclosed.issuperset(node.users)]
    made = [copied(node) for node in nodes]
    inside.output([copy for copy, node in zip(made, nodes, strict=True) if node in results])
    module = attributes[name] = fx.GraphModule(attributes, inside, name)

    last = nodes[-1]
    with graph.inserting_after(last):
        call = graph.create_node("call_module", name, tuple(inputs), name=name)
    call.meta = {key: last.meta[key] for key in _KEPT if key in last.meta} | {WHOLE: why}
    at = call
    for i, node in enumerate(results):
        with graph.inserting_after(at):
            at = graph.call_function(getitem, (call, i))
        at.meta = dict(node.meta)
        node.replace_all_uses_with(at, delete_user_cb=lambda user: user not in enclosed)
    for node in reversed(nodes):
        graph.erase_node(node)
    return module
