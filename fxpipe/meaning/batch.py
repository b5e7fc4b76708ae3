"""Which dimension of each input and output is the batch's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from fxpipe.ir._torch import pytree
from fxpipe.ir.errors import AnotherStrategy
from fxpipe.ir.graph import ALIAS, LARGER, RANDOM, VALUE
from fxpipe.ir.structure import Structure, children, leaves, map_tensors
from fxpipe.runtime.microbatch import ANY, SUM, Dims, first_rows
from fxpipe.trace import bound_arguments, called, canonical, parameters_put_back, untouched
from fxpipe.trace.isolation import on_one_device
from passes.to_stages.rows import larger_values, values_with


class BatchError(AnotherStrategy, ValueError):
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
    while others have more: these are shared. Where more than one size is left, tables of positions,
    say, may be among the inputs: the model is run, and the batch is the size of which it also takes
    one more. Tensors of other sizes are shared.

    Raises:
        BatchError: if batch sizes differ, a dimension does not exist, or in_dims does not fit.
    """
    inputs = _inputs(model, args, kwargs, in_dims)
    sizes = {
        each.tensor.shape[0]: None for each in inputs if each.said is INFER and each.tensor.ndim
    }
    guesses = _guesses(model, args, kwargs, inputs, sizes)
    if len(guesses) == 1 and _agree(inputs, guesses[0]):
        return guesses[0]
    rows: dict[int, _Input] = {}
    for each, dim in zip(inputs, _dims(inputs, sizes), strict=True):
        if dim is not None and (each.tensor.shape[dim] != 1 or each.said is not INFER):
            rows.setdefault(each.tensor.shape[dim], each)
    (one, first), (two, second), *_ = rows.items()
    tried = {0: ", and the model takes no other size of either", 1: ""}.get(
        len(guesses), ", and the model takes other sizes of both"
    )
    raise BatchError(
        f"the batch size differs between inputs: {one} in {first}, {two} in {second}{tried}; give "
        "in_dims, with the batch dimension of each input, or None for one that all micro-batches "
        f"share{_packed(rows)}"
    )


def _packed(rows: dict[int, _Input]) -> str:
    """What to do if several rows of an input belong to each of another."""
    (few, _), (many, packed) = sorted(list(rows.items())[:2], key=itemgetter(0))
    if not few or many % few:
        return ""
    shape = ", ".join(map(str, (few, many // few, *packed.tensor.shape[1:])))
    return (
        f"; or, if {many // few} rows of {packed.name} belong together, give it as ({shape}) to a "
        f"module that calls the model with {packed.name}.flatten(0, 1)"
    )


def other_input_dims(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dims: Sequence[int | None],
    in_dims: Any = None,
) -> list[int | None] | None:
    """Other batch dimensions than those inferred, where with these the model takes no other size.

    A tensor that is for all rows may happen to be as large as the batch. If with one of them
    shared, and only with that one, the model takes another size, it is shared from now on.
    """
    inputs = _inputs(model, args, kwargs, in_dims)
    inferred = [i for i, each in enumerate(inputs) if each.said is INFER and dims[i] is not None]
    if len(inferred) < 2 or _takes_another_size(model, args, kwargs, inputs, dims):
        return None
    others = ([None if k == i else dim for k, dim in enumerate(dims)] for i in inferred)
    good = [o for o in others if _takes_another_size(model, args, kwargs, inputs, o)]
    if len(good) != 1:
        return None
    _FOUND.setdefault(model, {})[_key(inputs)] = good[0]
    return good[0]


def _inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], in_dims: Any
) -> list[_Input]:
    """The tensors among the inputs, and what ``in_dims`` says of each."""
    arguments = bound_arguments(model, args, kwargs).arguments
    inputs = []
    for name, value in arguments.items():
        said = _of_argument(in_dims, list(arguments), name)
        tensors, structure = Structure.of(value)
        slots = [_Slot() for _ in tensors]
        _say(said, structure.fill(slots), name)
        inputs += [_Input(s.path, t, s.said) for t, s in zip(tensors, slots, strict=True)]
    return inputs


@dataclass(frozen=True)
class _Input:
    """A tensor among the inputs, and what has been said of its batch dimension."""

    name: str
    tensor: Tensor
    said: Any

    def __str__(self) -> str:
        return f"{self.name} {tuple(self.tensor.shape)}"

    @property
    def dim(self) -> int | None:
        """What has been said, counted from the front."""
        return _from_the_front("in_dims", self.said, self.name, self.tensor)


def _from_the_front(what: str, dim: Any, name: str, tensor: Tensor) -> int | None:
    """What ``in_dims`` or ``out_dims`` says of a tensor, counted from the front."""
    if dim is None:
        return None
    if not isinstance(dim, int):
        raise BatchError(
            f"{what} says {dim!r} for {name}, which is a tensor: give the dimension that is the "
            "batch, or None"
        )
    if not -tensor.ndim <= dim < tensor.ndim:
        raise BatchError(
            f"{what} says that dimension {dim} of {name} is the batch, but its shape is "
            f"{tuple(tensor.shape)}"
        )
    return dim % tensor.ndim


def _dims(inputs: Sequence[_Input], batches: Container[int]) -> list[int | None]:
    """The first dimensions, where their size is one of these, and what has been said."""
    return [
        (0 if each.tensor.ndim and each.tensor.shape[0] in batches else None)
        if each.said is INFER
        else each.dim
        for each in inputs
    ]


_FOUND: WeakKeyDictionary[nn.Module, dict[Any, list[int | None]]] = WeakKeyDictionary()
"""What has been tried out, by the names of the tensors."""


def _key(inputs: Sequence[_Input]) -> Any:
    return tuple((each.name, each.tensor.ndim, each.said) for each in inputs)


def _guesses(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: Sequence[_Input],
    sizes: dict[int, None],
) -> list[list[int | None]]:
    """What the batch dimensions may be.

    Where first dimensions have several sizes, those of which the model also takes another. One row
    may be for all, so a size of one is the batch's only if no other is.
    """
    found = _FOUND.setdefault(model, {})
    key = _key(inputs)
    if key in found and _agree(inputs, found[key]):
        return [found[key]]
    many = [size for size in sizes if size != 1]
    plain = _dims(inputs, many or sizes)
    if many == list(sizes) and len(many) < 2:
        return [plain]
    good: list[list[int | None]] = []
    for some in (many, [1]):
        guesses = [_dims(inputs, [size]) for size in some if size in sizes]
        good = good or [g for g in guesses if _takes_another_size(model, args, kwargs, inputs, g)]
    if len(good) == 1:
        found[key] = good[0]
    elif len(many) == 1:  # nothing speaks against it
        found[key] = plain
        return [plain]
    return good


def _agree(inputs: Sequence[_Input], dims: Sequence[int | None]) -> bool:
    """Whether all batch dimensions are of one size."""
    pairs = zip(inputs, dims, strict=True)
    return len({each.tensor.shape[dim] for each, dim in pairs if dim is not None}) <= 1


def _takes_another_size(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: Sequence[_Input],
    dims: Sequence[int | None],
) -> bool:
    """Whether the model runs with one more along these dimensions, and its outputs follow."""
    pairs = zip(inputs, dims, strict=True)
    size = next((each.tensor.shape[d] for each, d in pairs if d is not None), 0)
    if not size or not _agree(inputs, dims):
        return False

    def shapes(batch: int) -> list[torch.Size]:
        remaining = iter(dims)

        def resized(tensor: Tensor) -> Tensor:
            dim = next(remaining)
            return tensor.clone() if dim is None else first_rows(tensor, dim, batch)

        some, named = map_tensors(resized, canonical(model, args, kwargs))
        with (
            on_one_device(model, inputs[0].tensor.device),  # it may have been placed already
            untouched(model),
            parameters_put_back(model),
            torch.no_grad(),
        ):
            outputs, _ = Structure.of(called(model, some, named))
        return [tensor.shape for tensor in outputs]

    try:
        return any(
            (one, two) == (size, size + 1)
            for shape, another in zip(shapes(size), shapes(size + 1), strict=True)
            for one, two in zip(shape, another, strict=True)
        )
    except Exception:  # whatever the model says of sizes that do not fit
        return False


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
    if not isinstance(in_dims, tuple | list):
        raise BatchError(
            f"in_dims is {in_dims!r}: give a dimension for all arguments, a tuple with one for "
            "each, or a dict from their names"
        )
    if len(in_dims) != len(names):
        raise BatchError(
            f"in_dims has {len(in_dims)} entries for {len(names)} arguments ({', '.join(names)})"
        )
    return in_dims[names.index(name)]


def broadcast(dims: Any, value: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every leaf of a value with its path, and the dimension that a prefix of its tree says."""
    parts = None if isinstance(value, _Slot) else children(value)
    if parts is None:
        yield path, value, dims
        return
    for key, part in parts.items():
        below = f"{path}.{key}" if isinstance(key, str) else f"{path}[{key}]"
        if dims is None or dims is INFER or dims == SUM or isinstance(dims, int):
            yield from broadcast(dims, part, below)
        elif isinstance(dims, Mapping) and dims.keys() <= parts.keys():
            yield from broadcast(dims.get(key, INFER), part, below)
        elif isinstance(dims, tuple | list) and isinstance(key, int) and len(dims) == len(parts):
            yield from broadcast(dims[key], part, below)
        else:
            raise BatchError(
                f"{dims!r} does not fit {path or 'the value'}, a {type(value).__name__} of "
                f"{', '.join(map(str, parts))}"
            )


class _Slot:
    """The place of a tensor in the inputs or outputs."""

    path: str = "an output"
    said: Any = INFER


def _say(dims: Any, value: Any, path: str) -> None:
    """Tell each slot within a value where it is, and what a prefix of the value's tree says."""
    for where, slot, dim in broadcast(dims, value, path):
        if isinstance(slot, _Slot):
            slot.path, slot.said = where, dim


def output_dims(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    in_dims: Sequence[int | None],
    out_dims: Any,
    rebuild: Any,
    larger: Any = None,
    run: Callable[[int, int], Any] | None = None,
) -> list[Dims]:
    """For each node that a graph returns, the batch dimension of every tensor in its value.

    Found out by running the graph on fake tensors at two batch sizes. ``out_dims`` overrides; it is
    a prefix of what ``rebuild`` makes of the graph's output, the model's own structure. Where the
    graph is for one size only, ``larger`` is what the model gives for a row more. Which outputs
    without a batch are sums over the rows is found out by ``run``: the model for so many rows, so
    many times over.

    Raises:
        BatchError: for an output whose shape does not depend on the batch and ``out_dims`` does not
            say what to do, or a dimension that does not exist.
    """
    output = gm.graph.output_node()
    if all(VALUE in node.meta for node in output.all_input_nodes):  # pass "alias" has run it
        one = {node: node.meta[VALUE] for node in output.all_input_nodes}
    else:
        one = values_with(gm, inputs, in_dims, 0)
    slots = {
        node: pytree.tree_map(lambda leaf: _Slot(), one[node]) for node in output.all_input_nodes
    }
    structure = rebuild(fx.map_arg(output.args[0], slots.__getitem__))
    if larger is None and all(LARGER in node.meta for node in output.all_input_nodes):
        other = {node: node.meta[LARGER] for node in output.all_input_nodes}  # pass "rows" has
    elif larger is None:
        other = larger_values(gm, inputs, in_dims)
    else:
        found_at = {id(slot): leaf for slot, leaf in _side_by_side(structure, larger)}
        other = pytree.tree_map(lambda slot: found_at[id(slot)], slots)
    _say(INFER if out_dims is None else out_dims, structure, "output")
    has_batch = any(dim is not None for dim in in_dims)  # else there is one micro-batch
    varying = _varying(gm.graph, in_dims)
    batch = next((v.shape[d] for v, d in zip(inputs, in_dims, strict=True) if d is not None), 0)
    summed = functools.cache(lambda: sums(run, batch) if run is not None and batch else set())
    found: list[Dims] = []
    for node in output.all_input_nodes:
        parts = [pytree.tree_leaves(values[node]) for values in (slots, one, other)]
        dims = tuple(
            ANY
            if node not in varying and leaf[0].said is INFER
            else _output_dim(*leaf, summed=summed, has_batch=has_batch)
            for leaf in zip(*parts, strict=True)
        )
        found.append(dims[0] if len(dims) == 1 else dims)
    return found


def _side_by_side(slots: Any, output: Any) -> Iterator[tuple[Any, Any]]:
    """The leaves of two values of one structure."""
    for (path, slot), (other, leaf) in zip(leaves(slots), leaves(output), strict=True):
        if path != other:
            raise BatchError(f"the output has {path or 'one value'} for some batch sizes, not all")
        yield slot, leaf


def _varying(graph: fx.Graph, in_dims: Sequence[int | None]) -> set[fx.Node]:
    """The nodes whose values may differ between micro-batches; others come of what is shared."""
    dims = iter(in_dims)
    varying: set[fx.Node] = set()
    for node in graph.nodes:
        is_batch = node.op == "placeholder" and next(dims) is not None
        may_change = node.op == "call_module" or RANDOM in node.meta or ALIAS in node.meta
        if is_batch or may_change or not varying.isdisjoint(node.all_input_nodes):
            varying.add(node)
    return varying


def sums(run: Callable[[int, int], Any], batch: int) -> set[str]:
    """The outputs, by their paths, that are sums over the rows: of the same rows several times
    they are several times as large, to the precision of their dtype.

    What else grows with the rows grows by less, such as contrastive losses by the logarithm of
    their number: of two rows that of four would be twice as large as well, and that of eight is
    three times as large, where a sum is four times. Of what is random there is no telling: a loss
    near zero may be four times another one by chance.
    """
    rows, times = min(batch, 2), 4
    try:
        runs = [list(leaves(run(rows, count), "output")) for count in (1, 1, times)]
    except Exception:  # whatever the model says of sizes that do not fit
        return set()
    return {
        path
        for (path, one), (_, again), (_, more) in zip(*runs, strict=False)
        if all(isinstance(each, Tensor) and each.ndim == 0 for each in (one, again, more))
        if bool(one != 0) and torch.equal(one, again) and _is_multiple(more, one, times)
    }


def _is_multiple(more: Tensor, one: Tensor, times: int) -> bool:
    rounding = torch.finfo(one.dtype).eps if one.dtype.is_floating_point else 0.0
    return bool((more / one - times).abs() <= times * max(4 * rounding, 1e-3))


def _output_dim(
    slot: _Slot, one: Any, other: Any, *, summed: Callable[[], set[str]], has_batch: bool
) -> int | str | None:
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
    if slot.said == SUM:
        return SUM
    if slot.said is not INFER:
        return _from_the_front("out_dims", slot.said, slot.path, one)
    if one.ndim == 0 and slot.path in summed():
        return SUM
    if one.ndim == 0 or not has_batch:
        return None
    differing = [i for i in range(one.ndim) if one.shape[i] != other.shape[i]]
    if len(differing) == 1:
        return differing[0]
    if not differing and not one.numel():
        return ANY  # there is nothing in it that a micro-batch could have made otherwise
    shape = tuple(one.shape)
    if differing:
        raise BatchError(
            f"dimensions {differing} of {slot.path}, {shape}, all depend on the batch size, and "
            "what a pipeline computes is that of each micro-batch by itself: give out_dims with "
            "one of these dimensions for it, to join them along that, or chunks=1"
        )
    raise BatchError(
        f"{slot.path} has shape {shape} whatever the batch size, so it is not clear what to make "
        "of the micro-batches' outputs: give out_dims, with None for it to be averaged over the "
        'micro-batches, "sum" for it to be added up, or the dimension along which they are joined'
    )
