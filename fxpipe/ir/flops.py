"""The work of operators: their FLOPs, also those of kernels that PyTorch does not count, and the
bytes that they move; and which of them are products, whose results are worth keeping."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
    shape_wrapper,
)

from fxpipe.ir._torch import schema_of
from fxpipe.ir.tensors import tensor_bytes, tensors_of


def _uninitialised(
    given: Sequence[Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
    work: Sequence[int],
    products: Sequence[int],
) -> Tensor:
    return given[0].new_empty(shape, dtype=dtype)


made = torch.library.custom_op("fxpipe::made", _uninitialised, mutates_args=())
"""An uninitialised tensor, made from those that are given by operators that do not run: stands for
their work. ``work`` has their FLOPs, the bytes that they read and write, and their number;
``products`` has the same for those of them that are products, and the bytes of their results."""
made.register_fake(_uninitialised)


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    heads = query[1]
    count: Any = sdpa_flop_count
    return count(query, _of_heads(key, heads), _of_heads(value, heads))


def _attention_backward_flops(
    gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any
) -> Any:
    heads = query[1]
    count: Any = sdpa_backward_flop_count
    return count(gradient, query, _of_heads(key, heads), _of_heads(value, heads))


def _of_heads(shape: Any, heads: int) -> Any:
    """The shape of keys or values as if each query head had its own (grouped-query attention)."""
    return (shape[0], heads, *shape[2:])


def _recurrent_flops(x: Any, of_inputs: Any, of_states: Any, *_: Any, **__: Any) -> int:
    """Of one layer: each step multiplies its inputs and its state by a matrix each."""
    steps, rows, _ = x
    matrices: int = math.prod(of_inputs) + math.prod(of_states)
    return 2 * int(steps) * int(rows) * matrices


def _recurrent_backward_flops(*args: Any, **_: Any) -> int:
    return 2 * _recurrent_flops(*args)  # the gradients of inputs and states, and of the matrices


def _grouped_flops(one: Any, other: Any, *_: Any, **__: Any) -> int:
    """Of products of matrices of which one has a part of its rows, or of its columns, for each of
    several groups: all parts together are that matrix. Only where both have a matrix for each group
    is there a product of whole matrices for each."""
    batches = one[0] if len(one) == len(other) == 3 else 1
    return 2 * int(batches) * int(one[-2]) * int(one[-1]) * int(other[-1])


def _grouped_backward_flops(*args: Any, **_: Any) -> int:
    return 2 * _grouped_flops(*args)  # the gradients of both matrices


_OF_KERNELS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    torch.ops.aten.mkldnn_rnn_layer: _recurrent_flops,
    torch.ops.aten.mkldnn_rnn_layer_backward: _recurrent_backward_flops,
    torch.ops.aten._grouped_mm: _grouped_flops,
    "transformers.grouped_mm_fallback": _grouped_flops,
    "transformers.grouped_mm_fallback_backward": _grouped_backward_flops,
    torch.ops.fxpipe.made: lambda _, __, ___, work, *____, **_____: work[0],
}
"""Formulas for the CPU's kernels of attention and of LSTMs, for the products of a mixture of
experts, and for what stands for work: PyTorch does not know them. Of those products PyTorch's
operator is, on fake tensors, for bfloat16 only; for other dtypes transformers has one of its own,
which is given by its name, since it exists once transformers has been imported."""
FORMULAS = {
    **flop_registry,
    **{name: shape_wrapper(f) for name, f in _OF_KERNELS.items()},  # type: ignore[no-untyped-call]
}
"""The FLOPs of operators, by PyTorch's formulas. ``FlopCounterMode``, which counts with them, would
first look whether it can take each operator apart, so that pass "cost" would run other operators
than pass "alias" does, and share none of its fake results."""


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """The FLOPs of an operator that has been given these arguments."""
    formula = _formula(func.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _formula(packet: Any) -> Any:
    """The formula for an operator; None if there is none."""
    return FORMULAS.get(packet) or FORMULAS.get(str(packet))


def is_product(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator that is given these arguments is a product (of matrices, a convolution,
    an attention): it computes far more than it writes, and its result depends on its arguments
    alone. An attention with dropout is none, since it draws random numbers."""
    is_one, place = _product(func)
    if not is_one or place is None:
        return is_one
    return not (args[place] if place < len(args) else kwargs.get(_DROPOUT, 0.0))


_DROPOUT = "dropout_p"


@functools.cache
def _product(func: Any) -> tuple[bool, int | None]:
    """Whether an operator is a product if it draws no random numbers; and the place, among its
    arguments, of the probability that it draws some; None if it never does."""
    packet = getattr(func, "overloadpacket", None)
    if packet is None or _formula(packet) is None or packet is torch.ops.fxpipe.made:
        return False, None
    schema = schema_of(func)
    names = [argument.name for argument in schema.arguments]
    if schema.is_mutable:
        return False, None
    return True, names.index(_DROPOUT) if _DROPOUT in names else None


LOOKUPS = {
    torch.ops.aten.embedding.default,
    torch.ops.aten._embedding_bag.default,
    torch.ops.aten._embedding_bag_forward_only.default,
}
"""Operators that read some rows of a table: those that indices name."""


def moved(func: Any, args: Any, kwargs: Any, result: Any) -> int | None:
    """The bytes that an operator reads and writes. None for one that moves none: a view; or a
    query, such as ``prim.device``, which gives no tensor."""
    if func.is_view or func is torch.ops.aten._unsafe_view.default:
        return None
    made = bool(tensors_of(result))
    written = [] if made else _written(func, args, kwargs)  # some operators on lists only write
    if not made and not written:
        return None
    return tensor_bytes((args, kwargs, result, written)) - _not_read(func, args)


def _not_read(func: Any, args: Any) -> int:
    """The bytes of the tensors that an operator is given that it does not read."""
    if func not in LOOKUPS:
        return 0
    table, indices, *_ = args
    size = tensor_bytes(table)
    return max(size - int(indices.numel()) * (size // max(len(table), 1)), 0)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operator writes to."""
    described = schema_of(func).arguments
    given = {each.name: value for each, value in zip(described, args, strict=False)} | kwargs
    return [given[each.name] for each in described if each.is_write and each.name in given]
