"""What is derived from a tensor is told from what is not, and from views of the tensor."""

from __future__ import annotations

import torch

from fxpipe.trace.derived import Derived


def test_what_is_computed_from_a_tensor_is_derived_from_it_and_its_views_are_not() -> None:
    weight, x, sums = torch.ones(4, 4), torch.ones(4), torch.zeros(4)
    with Derived([weight]) as derived:
        copy, view, product = weight.clone(), weight.t(), weight @ x
        twice, other = 2 * product, 2 * x
        sums.add_(product)
    assert all(map(derived.has, (copy, product, twice, sums)))
    assert not any(map(derived.has, (weight, view, x, other)))


def test_memory_of_a_derived_tensor_may_be_used_again() -> None:
    """A tensor gets the memory of one that is freed ahead of it."""
    weight = torch.ones(4096)
    with Derived([weight]) as derived:
        for _ in range(100):  # the allocator may join what is freed with what lies ahead of it
            made = 2 * weight
            place = made.data_ptr()
            del made
            other = torch.ones(4096)
            if other.data_ptr() == place:
                break
    assert other.data_ptr() == place
    assert not derived.has(other)
