"""Whether the operators of a graph treat all rows alike, whatever their number and their places.

::

    h.softmax(-1)         the same for the first row and for the last one, of three rows and of four
    h[: len(h) // 4]      of three rows it is none: a sample of four rows shows what it does
    h * (arange(n) < 3)   of three rows it is all of them

Where all operators treat rows alike, a sample of three rows shows whether they mix rows. It is not
assumed that they do not: an attention may well go over the rows, and shows it.

Of most graphs one can say more: rows stay apart (:func:`keeps_rows_apart`).

::

    linear of (rows, 8)        goes over the last dimension, in which there are no rows
    attention of (1, rows, 8)  may go over the rows
    (rows, 1) - (rows,)        gives (rows, rows): each row has something of each other row

Such a graph gives for two rows what it gives for each of them.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

_ELEMENTS = {
    *(aten.add, aten.sub, aten.mul, aten.div, aten.neg, aten.pow, aten.rsqrt, aten.sqrt, aten.exp),
    *(aten.relu, aten.gelu, aten.silu, aten.tanh, aten.sigmoid, aten.hardswish, aten.leaky_relu),
    *(aten.add_, aten.sub_, aten.mul_, aten.div_, aten.relu_, aten.silu_),
    *(aten.to, aten.clone, aten.contiguous, aten.detach, aten.alias, aten.dropout),
}
"""Operators that compute each element by itself. A sum of two tensors has elements of both at the
same place; a tensor that is no input has no dimension of the batch, so that all rows get the same
numbers of it."""

_ROWS = {
    *(aten.linear, aten.matmul, aten.layer_norm, aten.rms_norm, aten.embedding),
    *(aten.scaled_dot_product_attention, aten.group_norm, aten.batch_norm),
}
"""Operators that make vectors of vectors, by products, norms and tables. A dimension of the batch
may be among those that they go over, which then shows."""

_SHAPES = {
    *(aten.view, aten.reshape, aten.flatten, aten.unsqueeze, aten.squeeze, aten.expand),
    *(aten.transpose, aten.permute, aten.t),
}
"""Operators that give the same elements in another shape."""

_ALONG = {
    aten.softmax: (1, "dim"),
    aten.mean: (1, "dim"),
    aten.slice: (1, "dim"),
    aten.select: (1, "dim"),
    aten.cat: (1, "dim"),
    aten.chunk: (2, "dim"),
    aten.split: (2, "dim"),
}
"""Operators that go along dimensions, with the place and the name of the argument that says which.
That of the batch must not be among them."""

_PICTURES = {
    *(aten.conv1d, aten.conv2d, aten.conv3d),
    *(aten.max_pool2d, aten.avg_pool2d, aten.adaptive_avg_pool2d),
}
"""Operators that go over places in a picture. Only the first dimension may be that of the batch."""


def treats_rows_alike(graph: fx.Graph) -> bool:
    """Whether all operators of an exported graph treat all rows alike, and each of its outputs has
    rows.

    Args:
        graph: a graph of ATen's operators, whose values have a symbol for the number of rows.
    """
    return all(_is_alike(node) for node in graph.nodes)


def _is_alike(node: fx.Node) -> bool:
    if node.op == "output":
        return all(any(_dims(value)) for value in _values(node.args))
    if node.op in ("placeholder", "get_attr"):
        return node.op == "placeholder" or isinstance(node.meta.get("val"), Tensor)
    if node.op != "call_function":
        return False
    values = [node.meta.get("val"), *_values((node.args, node.kwargs))]
    if all(isinstance(value, Tensor) and not any(_dims(value)) for value in values):
        return True  # it is computed without rows
    if node.target is operator.getitem:
        return isinstance(node.meta.get("val"), Tensor)
    if node.target is aten.sym_size.int:
        return all(getattr(user.target, "overloadpacket", None) in _SHAPES for user in node.users)
    kind = getattr(node.target, "overloadpacket", None)
    if kind in _ELEMENTS or kind in _ROWS or kind in _SHAPES:
        return True
    if kind in _PICTURES:
        return not any(any(_dims(value)[1:]) for value in _values(node.args))
    if kind is aten.slice and node.args[2:] == (0, sys.maxsize):  # x[:]
        return True
    if kind in _ALONG:
        place, name = _ALONG[kind]
        along = node.args[place] if len(node.args) > place else node.kwargs.get(name, 0)
        dims = along if isinstance(along, list | tuple) else [along]
        return not any(
            not isinstance(dim, int) or _has_rows_along(dim, value)
            for value in _values(node.args)
            for dim in dims
        )
    return False


def _has_rows_along(dim: int, value: Any) -> bool:
    """Whether a tensor has rows in a dimension; one that is without it, in any dimension: ``cat``
    takes an empty tensor of one dimension together with others."""
    dims = _dims(value)
    return dims[dim] if -len(dims) <= dim < len(dims) else any(dims)


def keeps_rows_apart(graph: fx.Graph) -> bool:
    """Whether no operator of an exported graph computes a row from other rows, as far as shapes
    show it: each value has rows in one dimension at most, and no operator goes over that one.

    Args:
        graph: a graph that treats rows alike.
    """
    return all(_keeps_apart(node) for node in graph.nodes)


def _keeps_apart(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if sum(_dims(value)) > 1:
        return False
    if node.op != "call_function":
        return True
    if not any(map(_rows, (value, *_values((node.args, node.kwargs))))):
        return True
    kind = getattr(node.target, "overloadpacket", None)
    # Of one row ``squeeze`` takes away the dimension of rows, where it takes away all dimensions of
    # size 1.
    if node.target is aten.squeeze.default:
        return False
    if kind in _ROWS:
        return _goes_over_others(node, kind)
    if kind in _RESHAPES:
        # Then a row is a contiguous piece of the elements, and stays one.
        given = next(iter(_values(node.args[:1])))
        return _rows(given) == _rows(value) == [0]
    return True


_RESHAPES = {aten.view, aten.reshape, aten.flatten, aten.unsqueeze, aten.squeeze}


def _goes_over_others(node: fx.Node, kind: Any) -> bool:
    """Whether an operator that makes vectors of vectors goes over dimensions without rows."""
    first, *others = _values(node.args)
    of_others = [value for value in (*others, *_values(node.kwargs)) if _rows(value)]
    if kind is aten.scaled_dot_product_attention:
        return all(_rows_before(value, 2) for value in (first, *of_others))
    if kind is aten.matmul:
        return _rows_before(first, 2 if of_others else 1) and (
            all(_rows_before(value, 2) for value in of_others)
        )
    if kind is aten.embedding:
        return not _rows(first)
    if of_others:
        return False
    if kind in (aten.batch_norm, aten.group_norm):
        return _rows(first) == [0]
    shape: Any = node.args[1]
    return _rows_before(first, 1 if kind is aten.linear else len(shape))


def _rows_before(value: Any, count: int) -> bool:
    """Whether rows are not among the last dimensions of a value, of which there are ``count``."""
    return all(dim < value.ndim - count for dim in _rows(value))


def _rows(value: Any) -> list[int]:
    """The dimensions of a tensor whose sizes depend on the number of rows."""
    return [dim for dim, has_rows in enumerate(_dims(value)) if has_rows]


def _values(args: Any) -> Iterator[Any]:
    """The values of the nodes among some arguments."""
    found: list[fx.Node] = []
    fx.node.map_arg(args, found.append)
    return (node.meta.get("val") for node in found)


def _dims(value: Any) -> list[bool]:
    """For each dimension of a tensor, whether its size depends on the number of rows."""
    return [not isinstance(size, int) for size in value.shape] if isinstance(value, Tensor) else []
