"""How each tensor that a graph returns is put together from the micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, fx

from fxpipe.ir._torch import pytree
from fxpipe.ir.graph import ALIAS, PART, RANDOM, VALUE
from fxpipe.meaning.errors import BatchError
from fxpipe.meaning.listed import is_of_a_row
from fxpipe.meaning.loss import own_loss
from fxpipe.meaning.said import INFER, Slot, broadcast, from_the_front, say
from fxpipe.meaning.weights import dim_of
from fxpipe.runtime.microbatch import ANY, LISTED, SUM, Dim, Dims, InDim
from passes.to_stages.rows import values_of


def output_dims(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    in_dims: Sequence[InDim],
    out_dims: Any,
    rebuild: Callable[[Any], Any],
    found: Mapping[str, Dim],
    loss_weight: Any = None,
    unclear: Callable[[str], None] = lambda path: None,
) -> list[Dims]:
    """For each node that a graph returns, how every tensor in its value is put together.

    Args:
        out_dims: the option of :func:`fxpipe.compile`, a prefix of the tree of the model's output.
        rebuild: makes the structure that the model returns from the graph's output.
        found: how the check has found that outputs are put together, by the outputs' paths.
        loss_weight: the option of :func:`fxpipe.compile`, if it is about a loss that the model
            returns; else None.
        unclear: called with the path of each output that depends on the batch and of which the
            user says nothing; it raises an error, or warns, if that may be a mean or a sum.

    Raises:
        BatchError: for a dimension that does not exist, or an output that nothing is known of.
    """
    output = gm.graph.output_node()
    nodes = output.all_input_nodes
    if all(VALUE in node.meta for node in nodes):  # pass "alias" has run it
        values = {node: node.meta[VALUE] for node in nodes}
    else:
        env = values_of(gm, inputs)
        values = {node: env[node] for node in nodes}
    slots = {node: pytree.tree_map(lambda leaf: Slot(), values[node]) for node in nodes}
    structure = rebuild(fx.map_arg(output.args[0], slots.__getitem__))
    say(INFER if out_dims is None else out_dims, structure, "output")
    if loss_weight is not None and isinstance(loss := own_loss(structure, Slot), Slot):
        loss.said_of_loss = dim_of(loss_weight)
    varying = _varying(gm.graph, in_dims)
    result: list[Dims] = []
    # A result may occur at several paths, such as the batch size in an object's shapes.
    places = broadcast(None, structure, "output")
    paths = {path for path, leaf, _ in places if isinstance(leaf, Slot)}
    for node in nodes:
        own = pytree.tree_leaves(slots[node])
        leaves = zip(own, pytree.tree_leaves(values[node]), _part(node, len(own)), strict=True)
        for slot in own if node in varying else ():
            if slot.said is INFER:
                unclear(slot.path)
        dims = tuple(
            LISTED
            if is_of_a_row(slot.path, found)
            else ANY
            if node not in varying and slot.said is INFER
            else _dim(slot, value, part if node in varying else None, found)
            for slot, value, part in leaves
        )
        result.append(dims[0] if len(dims) == 1 else dims)
    for path, dim in found.items():
        if dim == SUM and path not in paths:
            raise BatchError(
                f"{path} is a number that depends on the batch size, and a constant of the graph: "
                "return it as a tensor, or give chunks=1"
            )
    return result


def _part(node: fx.Node, count: int) -> list[Any]:
    """The leaves of a node's value for a micro-batch, if that is known (pass "rows")."""
    leaves = pytree.tree_leaves(node.meta.get(PART))
    return leaves if len(leaves) == count else [None] * count


def _varying(graph: fx.Graph, in_dims: Sequence[InDim]) -> set[fx.Node]:
    """The nodes whose values may differ between micro-batches. All others are computed from inputs
    that the micro-batches share."""
    dims = iter(in_dims)
    varying: set[fx.Node] = set()
    for node in graph.nodes:
        is_batch = node.op == "placeholder" and next(dims) is not None
        may_change = node.op == "call_module" or RANDOM in node.meta or ALIAS in node.meta
        if is_batch or may_change or not varying.isdisjoint(node.all_input_nodes):
            varying.add(node)
    return varying


def _dim(slot: Slot, value: Any, part: Any, found: Mapping[str, Dim]) -> Dim:
    if not isinstance(value, Tensor):
        if any(isinstance(each, Tensor) for each in getattr(value, "__dict__", {}).values()):
            raise BatchError(
                f"{slot.path} is a {type(value).__name__}, whose tensors cannot be seen: register "
                "the class with torch.export.register_dataclass, or as a pytree node"
            )
        return found.get(slot.path)
    if slot.said == SUM:
        return SUM
    if slot.said is INFER and slot.said_of_loss is not INFER and not value.ndim:
        return cast("Dim", slot.said_of_loss)
    if slot.said is not INFER:
        said = from_the_front("out_dims", slot.said, slot.path, value.shape)
        if said is not None and isinstance(part, Tensor) and part.ndim == value.ndim:
            _check_grows(slot.path, said, value.shape, part.shape)
        return said
    if slot.path in found:
        dim = found[slot.path]
        return ANY if dim is None and not value.numel() else dim
    if isinstance(part, Tensor) and part.ndim == value.ndim:
        shapes = zip(value.shape, part.shape, strict=True)
        differing = [d for d, (one, other) in enumerate(shapes) if one != other]
        return differing[0] if len(differing) == 1 else None
    return None


def _check_grows(path: str, dim: int, shape: Sequence[int], part: Sequence[int]) -> None:
    """Raise BatchError if a dimension that ``out_dims`` calls the batch's is of the same size for
    a part of the rows: micro-batches put together along it would be another output."""
    if shape[dim] != part[dim]:
        return
    growing = [d for d, sizes in enumerate(zip(shape, part, strict=True)) if len(set(sizes)) > 1]
    which = f"dimension {growing[0]} does" if growing else "none does"
    raise BatchError(
        f"out_dims says that dimension {dim} of {path} is the batch, but its size, {shape[dim]}, "
        f"does not depend on the number of rows ({which}): give that dimension, or None for an "
        "output without a batch"
    )
