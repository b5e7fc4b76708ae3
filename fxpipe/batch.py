"""Which dimension of each input and output is the batch's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxpipe.graph import VALUE
from fxpipe.structure import children
from fxpipe.trace import bound_arguments
from passes.fakes import FakeInterpreter
from passes.microbatch import Dims


class BatchError(ValueError):
    """The batch dimension of an input or output is not what it has to be, or cannot be found."""


def input_dims(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], in_dims: Any = None
) -> list[int | None]:
    """The batch dimension of each tensor among the inputs, in the order of pytree leaves.

    Args:
        in_dims: None to infer; an int for all tensors; or, for the arguments in the order of the
            signature, a tuple of ints, Nones (shared by all micro-batches) or nested likewise; or a
            dict of these by argument name, the others being inferred.

    Inferred is 0, except for tensors without dimensions, and those whose first has one element
    while others have more: these are shared.

    Raises:
        BatchError: if batch sizes differ, a dimension does not exist, or in_dims does not fit.
    """
    arguments = bound_arguments(model, args, kwargs).arguments
    named = []
    for name, value in arguments.items():
        said = _of_argument(in_dims, list(arguments), name)
        leaves = broadcast(said, value, name)
        named += [(path, leaf, dim) for path, leaf, dim in leaves if isinstance(leaf, Tensor)]
    sizes = {t.shape[0] for _, t, dim in named if dim is INFER and t.ndim}
    dims = [_dim(tensor, dim, sizes) for _, tensor, dim in named]
    batches: dict[int, str] = {}
    for (name, tensor, _), dim in zip(named, dims, strict=True):
        if dim is None:
            continue
        if not -tensor.ndim <= dim < tensor.ndim:
            raise BatchError(
                f"in_dims says that dimension {dim} of {name} is the batch, but its shape is "
                f"{tuple(tensor.shape)}"
            )
        batches.setdefault(tensor.shape[dim], f"{name} {tuple(tensor.shape)}")
    if len(batches) > 1:
        (one, first), (two, second), *_ = batches.items()
        raise BatchError(
            f"the batch size differs between inputs: {one} in {first}, {two} in {second}; give "
            "in_dims, with the batch dimension of each input, or None for one that all "
            "micro-batches share"
        )
    return [
        dim if dim is None else dim % tensor.ndim
        for (_, tensor, _), dim in zip(named, dims, strict=True)
    ]


INFER = object()
"""In place of a dimension: find it out."""


def _of_argument(in_dims: Any, names: Sequence[str], name: str) -> Any:
    if in_dims is None:
        return INFER
    if isinstance(in_dims, int):
        return in_dims
    if isinstance(in_dims, Mapping):
        unknown = set(in_dims) - set(names)
        if unknown:
            raise BatchError(
                f"in_dims names {sorted(unknown)[0]!r}, but the arguments are {', '.join(names)}"
            )
        return in_dims.get(name, INFER)
    if len(in_dims) != len(names):
        raise BatchError(
            f"in_dims has {len(in_dims)} entries for {len(names)} arguments ({', '.join(names)})"
        )
    return in_dims[names.index(name)]


def _dim(tensor: Tensor, dim: Any, sizes: set[int]) -> int | None:
    if dim is not INFER:
        return dim  # type: ignore[no-any-return]
    is_shared = tensor.ndim == 0 or (tensor.shape[0] == 1 and len(sizes) > 1)
    return None if is_shared else 0


def broadcast(dims: Any, value: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every leaf of a value with its path, and the dimension that a prefix of its tree says."""
    parts = None if isinstance(value, _Slot) else children(value)
    if parts is None:
        yield path, value, dims
        return
    for key, part in parts.items():
        below = f"{path}.{key}" if isinstance(key, str) else f"{path}[{key}]"
        if dims is None or dims is INFER or isinstance(dims, int):
            yield from broadcast(dims, part, below)
        elif isinstance(dims, Mapping):
            yield from broadcast(dims.get(key, INFER), part, below)
        elif isinstance(key, int) and len(dims) == len(parts):
            yield from broadcast(dims[key], part, below)
        else:
            raise BatchError(
                f"{dims!r} does not fit {path or 'the value'}, a {type(value).__name__} of "
                f"{', '.join(map(str, parts))}"
            )


def output_dims(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    in_dims: Sequence[int | None],
    out_dims: Any,
    rebuild: Any,
) -> list[Dims]:
    """For each node that a graph returns, the batch dimension of every tensor in its value.

    Found out by running the graph on fake tensors at two batch sizes. ``out_dims`` overrides; it is
    a prefix of what ``rebuild`` makes of the graph's output, the model's own structure.

    Raises:
        BatchError: for an output whose shape does not depend on the batch and ``out_dims`` does not
            say what to do, or a dimension that does not exist.
    """
    output = gm.graph.output_node()
    if all(VALUE in node.meta for node in output.all_input_nodes):  # pass "alias" has run it
        one = {node: node.meta[VALUE] for node in output.all_input_nodes}
    else:
        one = _values(gm, inputs, in_dims, 0)
    other = _values(gm, inputs, in_dims, 1)
    slots = {
        node: pytree.tree_map(lambda leaf: _Slot(), one[node]) for node in output.all_input_nodes
    }
    structure = rebuild(fx.map_arg(output.args[0], slots.__getitem__))
    out_dims = INFER if out_dims is None else out_dims
    for path, slot, dim in broadcast(out_dims, structure, "output"):
        if isinstance(slot, _Slot):
            slot.path, slot.said = path, dim
    found: list[Dims] = []
    for node in output.all_input_nodes:
        leaves = [pytree.tree_leaves(values[node]) for values in (slots, one, other)]
        dims = tuple(_output_dim(*leaf) for leaf in zip(*leaves, strict=True))
        found.append(dims[0] if len(dims) == 1 else dims)
    return found


class _Slot:
    """The place of one leaf in the output."""

    path: str = "an output"
    said: Any = INFER


def _values(
    gm: fx.GraphModule, inputs: Sequence[Any], in_dims: Sequence[int | None], more: int
) -> dict[fx.Node, Any]:
    """The fake values of what a graph returns, at this batch size or one of a few more."""
    interpreter = FakeInterpreter(gm)
    interpreter.garbage_collect_values = False
    fakes = []
    for value, dim in zip(inputs, in_dims, strict=True):
        if dim is not None:
            shape = list(value.shape)
            shape[dim] += more
            value = torch.empty(shape, dtype=value.dtype, device=value.device)
        fakes.append(interpreter.fake(value))
    with interpreter.mode, torch.no_grad():
        interpreter.run(*fakes)
    return {node: interpreter.env[node] for node in gm.graph.output_node().all_input_nodes}


def _output_dim(slot: _Slot, one: Any, other: Any) -> int | None:
    if not isinstance(one, Tensor):
        if any(isinstance(each, Tensor) for each in getattr(one, "__dict__", {}).values()):
            raise BatchError(
                f"{slot.path} is a {type(one).__name__}, whose tensors cannot be seen: make it "
                "known with torch.export.register_dataclass or as a pytree node"
            )
        if slot.said is INFER and one != other:
            raise BatchError(
                f"{slot.path} is {one!r} and depends on the batch size, so it would be that of a "
                "micro-batch: give out_dims with None for it if it does not matter, or chunks=1"
            )
        return None
    if slot.said is not INFER:
        if slot.said is not None and not -one.ndim <= slot.said < one.ndim:
            raise BatchError(
                f"out_dims says {slot.said} for {slot.path}, whose shape is {tuple(one.shape)}"
            )
        return None if slot.said is None else slot.said % one.ndim
    if one.ndim == 0:
        return None
    differing = [i for i in range(one.ndim) if one.shape[i] != other.shape[i]]
    if len(differing) == 1:
        return differing[0]
    shape = tuple(one.shape)
    if differing:
        raise BatchError(
            f"dimensions {differing} of {slot.path}, {shape}, all depend on the batch size: "
            "micro-batches cannot be put together; use chunks=1"
        )
    raise BatchError(
        f"{slot.path} has shape {shape} whatever the batch size, so it is not clear what to make "
        "of the micro-batches' outputs: give out_dims, with None for it to be averaged over the "
        "micro-batches, or the dimension along which they are joined"
    )
