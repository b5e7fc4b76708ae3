"""Lists with one element for each row, such as the images and the targets of a detection model.

Such a list is cut between its elements, and each element goes to a micro-batch as it is. An element
may be a tensor or hold several tensors (a dict of boxes and labels). All elements are nested alike,
but the tensors at one place of them may have different sizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import BoundArguments
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir._torch import pytree
from fxpipe.ir.structure import Structure, children, map_tensors
from fxpipe.ir.tensors import is_shape
from fxpipe.meaning.errors import BatchError
from fxpipe.meaning.said import INFER, Input, named_inputs
from fxpipe.runtime.microbatch import LISTED, InDim, Parts
from fxpipe.trace import bound_arguments


class Column:
    """The tensors at one place of all elements of a list, such as the boxes of each row; or whole
    elements, with any tensors in them. Code that handles a call's tensors takes a column for one
    tensor, whose first dimension is the list."""

    ndim = 1
    layout = torch.strided

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.tensors = list(tensors)

    @property
    def shape(self) -> tuple[int]:
        """The number of rows."""
        return (len(self.tensors),)

    @property
    def is_meta(self) -> bool:
        """Whether the tensor of some row is on "meta", and so has no values."""
        return any(tensor.is_meta for tensor in Structure.of(self.tensors)[0])

    def narrow(self, dim: int, start: int, length: int) -> Column:
        """``length`` rows, from row ``start`` on."""
        return Column(self.tensors[start : start + length])

    def clone(self) -> Column:
        """A copy of every row."""
        return self.map(Tensor.clone)

    def detach(self) -> Column:
        """The rows without their history."""
        return self.map(Tensor.detach)

    def map(self, function: Callable[[Tensor], Tensor]) -> Column:
        """What a function makes of the tensors of every row."""
        return Column([map_tensors(function, row) for row in self.tensors])


def is_column(value: Any) -> bool:
    """Whether it is a column."""
    return isinstance(value, Column)


@dataclass(frozen=True)
class _RowList:
    """The structure of a list with one element for each row."""

    kind: type
    element: Structure
    columns: int  # the number of tensors in each element

    def fill(self, columns: Sequence[Column]) -> Any:
        """The list, with the tensors of these columns."""
        rows = zip(*(column.tensors for column in columns), strict=True)
        return self.kind([self.element.fill(row) for row in rows])


@dataclass(frozen=True)
class Listed:
    """A call in whose arguments one or more lists have an element for each row.

    Its *values* are the columns of these lists and the tensors outside of them, in the order of the
    arguments.
    """

    bound: BoundArguments
    spec: pytree.TreeSpec
    leaves: list[_RowList | Structure]
    """The structures of the lists, and of the arguments outside of them, which hold the values."""
    inputs: list[Input]
    """The values, with their names, and what ``in_dims`` says of them."""
    dims: list[int | None]
    """The batch dimension of each value: 0 for a column."""
    rows: int
    """The batch size, which is the length of the lists."""

    @staticmethod
    def of(
        model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Sequence[Input]
    ) -> Listed | None:
        """Take a call apart; None if it has no such list, or lists of several lengths.

        Args:
            inputs: the tensors of the call, with what ``in_dims`` says of each.

        Raises:
            BatchError: if ``in_dims`` says of a list that it has an element for each row, and it
                has not.
        """
        bound = bound_arguments(model, args, kwargs)
        named = {id(each.tensor): each for each in reversed(inputs)}  # by its first place

        def is_rows(value: Any) -> bool:
            said = [named[id(t)].said for t in Structure.of(value)[0]] if _is_list(value) else [0]
            return all(s is INFER or s == LISTED for s in said) and _are_alike(value)

        def is_leaf(value: Any) -> bool:
            return is_shape(value) or is_rows(value)

        flat, spec = pytree.tree_flatten(dict(bound.arguments), is_leaf=is_leaf)
        leaves: list[_RowList | Structure] = []
        found: list[Input] = []
        lengths = set()
        for value in flat:
            if not is_rows(value):
                tensors, structure = Structure.of(value)
                leaves.append(structure)
                found += [named[id(tensor)] for tensor in tensors]
                continue
            elements = [Structure.of(element) for element in value]
            columns = [
                Column(column) for column in zip(*(each for each, _ in elements), strict=True)
            ]
            leaves.append(_RowList(type(value), elements[0][1], len(columns)))
            first = [named[id(tensor)] for tensor in elements[0][0]]
            names = [re.sub(r"\[0\]", "[*]", each.name, count=1) for each in first]
            made: list[Any] = list(columns)
            found += [Input(n, c, e.said) for n, c, e in zip(names, made, first, strict=True)]
            lengths.add(len(value))
        _refuse_what_is_no_list(inputs, found, lengths)
        if len(lengths) != 1 or lengths == {1}:
            return None
        (rows,) = lengths
        dims = [_dim(each, rows) for each in found]
        return Listed(bound, spec, leaves, found, dims, rows)

    @property
    def is_likely(self) -> bool:
        """Whether the elements of the lists are more likely to be the rows than the first
        dimensions of tensors are: the tensors within the lists differ in their first size, and no
        tensor beside the lists has another number of rows."""
        columns = [value for value in self.values if isinstance(value, Column)]
        tensors = [tensor for column in columns for tensor in column.tensors]
        is_alone = all(
            dim is not None or not value.ndim
            for value, dim in zip(self.values, self.dims, strict=True)
        )
        return is_alone and len({tensor.shape[:1] for tensor in tensors}) > 1

    @property
    def values(self) -> list[Any]:
        """The columns of the lists and the tensors outside of them."""
        return [each.tensor for each in self.inputs]

    def by_name(self, values: Sequence[Any]) -> dict[str, Any]:
        """The arguments by name, with these values."""
        remaining = iter(values)
        filled = [
            leaf.fill([next(remaining) for _ in range(leaf.columns)])
            if isinstance(leaf, _RowList)
            else leaf.fill([next(remaining) for part in leaf.parts for _ in part.holes])
            for leaf in self.leaves
        ]
        found: dict[str, Any] = pytree.tree_unflatten(filled, self.spec)
        return found

    def call(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call, positional and named ones, with these values."""
        bound = BoundArguments(self.bound.signature, self.by_name(values))
        return bound.args, bound.kwargs

    def part(self, start: int, rows: int, *, cut_tensors: bool = True) -> Any:
        """The call with ``rows`` rows, from row ``start`` on.

        ``cut_tensors`` says whether the tensors outside of lists are cut as well; else they are
        passed on with all rows.
        """
        pairs = zip(self.values, self.dims, strict=True)
        return self.call(
            [
                value.narrow(dim, start, rows)
                if dim is not None and (cut_tensors or isinstance(value, Column))
                else value
                for value, dim in pairs
            ]
        )

    def in_dims(self, rows: int) -> list[InDim]:
        """The batch dimension of each tensor of a call with ``rows`` rows: LISTED for a tensor in
        one of the lists."""
        remaining = iter(self.dims)
        found: list[InDim] = []
        for leaf in self.leaves:
            if isinstance(leaf, _RowList):
                found += [LISTED] * (rows * leaf.columns)
                for _ in range(leaf.columns):
                    next(remaining)
            else:
                found += [next(remaining) for part in leaf.parts for _ in part.holes]
        return found

    @property
    def names(self) -> str:
        """The names of the lists, for messages: "images and targets"."""
        columns = (each.name for each in self.inputs if isinstance(each.tensor, Column))
        return " and ".join(dict.fromkeys(name.split("[*]")[0] for name in columns))

    @property
    def names_have(self) -> str:
        """The names of the lists, with "has" for one of them, and "have" for several."""
        return f"{self.names} {'have' if ' and ' in self.names else 'has'}"


def _is_list(value: Any) -> bool:
    return type(value) in (list, tuple) and len(value) > 0


def _are_alike(value: Any) -> bool:
    """Whether all elements of a list have tensors and equal constants, nested alike."""
    (first, structure), *others = [Structure.of(element) for element in value]
    if not first or structure.opens_objects:
        return False
    constants = structure.constants()
    try:
        return all(structure.fits(s) and bool(constants == s.constants()) for _, s in others)
    except Exception:  # a comparison of the user's own
        return False


def _dim(each: Input, rows: int) -> int | None:
    if isinstance(each.tensor, Column):
        return 0
    if each.said is not INFER:
        return each.dim
    return 0 if each.tensor.ndim and each.tensor.shape[0] == rows else None


def _refuse_what_is_no_list(
    inputs: Sequence[Input], found: Sequence[Input], lengths: set[int]
) -> None:
    for each in found:
        if each.said == LISTED and not isinstance(each.tensor, Column):
            raise BatchError(
                f'in_dims says "list" for {each.name}, which is in no list whose elements are '
                "built alike, one for each row: give such a list, or the dimension that is the "
                "batch"
            )
    if any(each.said == LISTED for each in inputs) and len(lengths) > 1:
        raise BatchError(
            f"the lists have {' and '.join(map(str, sorted(lengths)))} elements: "
            'lists with one element for each row (in_dims="list") have to be of one length; give '
            "None in in_dims for a list that all micro-batches share"
        )


Bind = Callable[[tuple[Any, ...], dict[str, Any]], list[Any]]


def in_parts(model: nn.Module, bind: Bind, chunks: int, in_dims: Any = None) -> Bind:
    """A function of the arguments of a call that returns the inputs of the pipeline graph for
    ``chunks`` micro-batches.

    Args:
        bind: the same for the graph of one micro-batch.
        in_dims: the option of :func:`fxpipe.compile`.
    """

    def of_all(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        listed = Listed.of(model, args, kwargs, named_inputs(model, args, kwargs, in_dims))
        if listed is None:
            raise TypeError("these inputs are nested otherwise than when the model was traced")
        rows = listed.rows // chunks
        parts = [bind(*listed.part(i * rows, rows, cut_tensors=False)) for i in range(chunks)]
        dims = listed.in_dims(rows)
        if chunks == 1:
            return parts[0]
        columns = zip(dims, zip(*parts, strict=True), strict=True)
        return [Parts(column) if dim == LISTED else column[0] for dim, column in columns]

    return of_all


def of_one_shape(values: Sequence[Any], names_have: str) -> None:
    """Raise BatchError if micro-batches have tensors of different shapes or dtypes at one place,
    since an exported graph is right for one of these only. ``names_have`` are the lists' names, and
    the verb (:attr:`Listed.names_have`)."""
    for parts in (value.values for value in values if isinstance(value, Parts)):
        kinds = list(dict.fromkeys((tuple(part.shape), part.dtype) for part in parts))
        if len(kinds) > 1:
            raise BatchError(
                f"{names_have} one element for each row, and the micro-batches have tensors of "
                f"shapes {kinds[0][0]} and {kinds[1][0]} at one place of these lists: the graph "
                "that torch.export makes of the model is for one of them only; pad them to one "
                "shape, or give chunks=1"
            )


# ------------------------------------------------------------------------------------- outputs


def rows_of(output: Any, rows: int, start: int = 0, path: str = "output") -> Iterator[Any]:
    """The leaves of an output for ``rows`` rows, with their paths. In a list with an element for
    each row, the paths have the row's number, counted from ``start``: ``output[*3].boxes``."""
    parts = children(output)
    if parts is None:
        yield path, output
        return
    is_rows = type(output) is list and len(output) == rows and not is_a_row(path)
    for key, part in parts.items():
        below = f"{path}.{key}" if isinstance(key, str) else f"{path}[{key}]"
        below = f"{path}[*{start + key}]" if is_rows else below
        yield from rows_of(part, rows, start, below)


def is_a_row(path: str) -> bool:
    """Whether the output at a path is in a list of rows."""
    return "[*" in path


def any_row(path: str) -> str:
    """A path without the row's number, so that it is the same for all rows: ``output[*].boxes``."""
    return re.sub(r"\[\*\d+\]", "[*]", path)


def is_of_a_row(path: str, found: Any) -> bool:
    """Whether the output at a path is in a list of rows. ``path`` has an index, as in
    ``output[3].boxes``; ``found`` has paths of :func:`any_row`, as ``output[*].boxes``."""
    indices = re.finditer(r"\[\d+\]", path)
    return any(f"{path[: i.start()]}[*]{path[i.end() :]}" in found for i in indices)
