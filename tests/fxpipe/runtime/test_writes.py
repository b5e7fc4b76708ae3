"""Writes are noticed, however they are made."""

from __future__ import annotations

import pytest
import torch

from fxpipe.runtime.writes import Writes, same_values

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
