"""Writes are noticed, however they are made."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxpipe.ir._torch import TorchDispatchMode
from fxpipe.ir.tensors import memory_of
from fxpipe.runtime.writes import (
    Writes,
    same_values,
    statistics_written_by,
    values_put_back,
    written_by,
)

WAYS = {
    "in place": lambda t: t.add_(1),
    "by item": lambda t: t.__setitem__(0, 2.0),
    "into a view": lambda t: t[1:].mul_(2),
    "out=": lambda t: torch.add(t, 1, out=t),
    "data": lambda t: t.data.copy_(torch.zeros(3)),
    "several at once": lambda t: torch._foreach_add_([t], 1.0),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_write_is_noticed_ahead_of_it_and_once(way):
    a, b = torch.ones(3), torch.ones(3)
    seen = []
    with Writes({"a": a, "b": b}, lambda key, tensor: seen.append((key, tensor.clone()))):
        WAYS[way](b)
        WAYS[way](b)
    ((key, before),) = seen
    assert key == "b"
    assert torch.equal(before, torch.ones(3))
    assert not torch.equal(b, torch.ones(3))


@pytest.mark.parametrize("way", WAYS)
def test_values_are_put_back_also_where_tensors_share_memory_or_have_none_of_one_piece(way):
    whole, sparse = torch.ones(5), torch.eye(2).to_sparse()
    part = whole[1:4]
    with values_put_back([part, whole, sparse, torch.ones(1, device="meta")]):
        WAYS[way](part)
        whole.zero_()
    assert torch.equal(whole, torch.ones(5))


def test_what_is_only_read_is_not():
    a = torch.ones(3)
    with Writes({"a": a}, lambda key, tensor: pytest.fail("it was read")):
        (a + 1).mul_(2).copy_(a)
        a.sum()


@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo, torch.sparse_csr])
def test_values_of_any_layout_are_compared(layout: torch.layout) -> None:
    dense = torch.eye(3)
    tensor = dense if layout == torch.strided else dense.to_sparse(layout=layout)
    copy = tensor.clone()
    assert same_values(tensor, copy)
    tensor.mul_(2)
    assert not same_values(tensor, copy)


class Noted(TorchDispatchMode):
    """Notes the tensors that operators are known to write to."""

    def __init__(self):
        super().__init__()
        self.written = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.written += written_by(func, args, kwargs or {})
        self.written += statistics_written_by(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


aten = torch.ops.aten
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
NORMS = {
    "F.batch_norm": lambda m, v: F.batch_norm(X, m, v, training=True),
    "F.instance_norm": lambda m, v: F.instance_norm(torch.stack([X, X * 2], -1), m, v),
    "native": lambda m, v: torch.native_batch_norm(X, None, None, m, v, True, 0.1, 1e-5),
    "legit": lambda m, v: aten._native_batch_norm_legit(X, None, None, m, v, True, 0.1, 1e-5),
    "with_update": lambda m, v: aten._batch_norm_with_update(X, None, None, m, v, 0.1, 1e-5),
    "update_stats": lambda m, v: torch.batch_norm_update_stats(X, m, v, 0.1),
}


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_is_known_to_write_to_its_running_statistics(norm, is_inference):
    with torch.inference_mode(is_inference):
        mean, variance = torch.zeros(3), torch.ones(3)
        before = mean.clone(), variance.clone()
        with Noted() as noted:
            NORMS[norm](mean, variance)
    assert not torch.equal(mean, before[0]) and not torch.equal(variance, before[1])
    assert {memory_of(mean), memory_of(variance)} <= set(map(memory_of, noted.written))


def test_a_norm_that_is_not_trained_only_reads_its_statistics():
    mean, variance = torch.zeros(3), torch.ones(3)
    with Noted() as noted:
        F.batch_norm(X, mean, variance)
        F.instance_norm(X[..., None], mean, variance, use_input_stats=False)
        aten._batch_norm_no_update(X, None, None, mean, variance, 0.1, 1e-5)
    assert not noted.written
