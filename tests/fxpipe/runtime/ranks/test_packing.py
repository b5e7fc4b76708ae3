"""Values as a description and bytes, and back."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from fxpipe.runtime.ranks.packing import Constant, Strided, packed, unpacked
from tests.zoo import same

CPU = torch.device("cpu")
DENSE = torch.randn(2, 3, 4, 5)


def travelled(values):
    """The values after a journey: nothing is shared with what was sent."""
    description, parts = packed(values, CPU)
    there = [torch.empty(size, dtype=torch.uint8) for size in description.sizes]
    for part, received in zip(parts, there, strict=True):
        received.copy_(part)
    return unpacked(pickle.loads(pickle.dumps(description)), there)


@pytest.mark.parametrize(
    "tensor",
    [
        DENSE,
        DENSE.to(memory_format=torch.channels_last),
        DENSE.permute(3, 1, 0, 2),
        DENSE[:, :, 0],  # with holes
        DENSE[1:, ::2, :, 1:3],
        torch.randn(3, 1).expand(3, 4),  # repeats its memory
        torch.tensor(2.0).expand(2, 2),
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.ones(3, dtype=torch.bool),
        torch.randn(4, dtype=torch.bfloat16),
        torch.randn(2, 2, dtype=torch.complex64).mT,
        torch.arange(5)[::2],
    ],
    ids=lambda t: f"{t.dtype}{list(t.shape)}{list(t.stride())}".replace("torch.", ""),
)
def test_a_tensor_arrives_with_its_bits_and_strides(tensor):
    (found,) = travelled((tensor,))
    assert same(found, tensor) and found.stride() == tensor.stride()


def test_a_dense_tensor_is_not_copied_to_be_sent():
    for tensor in (DENSE, DENSE.to(memory_format=torch.channels_last), DENSE[1]):
        assert packed(tensor, CPU)[1][0].data_ptr() == tensor.data_ptr()


def test_what_repeats_its_memory_is_sent_once():
    assert packed(torch.ones(()).expand(1000), CPU)[1][0].numel() == 4


def test_windows_that_overlap_arrive_as_a_tensor_of_their_own():
    windows = torch.arange(6.0).unfold(0, 4, 1)
    assert same(travelled(windows), windows)


def test_conjugates_and_gradients_survive():
    conjugate = torch.randn(3, dtype=torch.complex64).conj()
    assert same(travelled(conjugate), conjugate.resolve_conj())
    assert travelled(nn.Parameter(torch.ones(2))).requires_grad
    assert not travelled(torch.ones(2)).requires_grad


def test_nesting_numbers_and_constants_arrive():
    values = {"a": (1, 2.5, None), "b": [True, "c", torch.float16, -(2**62), 2**70, float("inf")]}
    assert same(travelled(values), values)
    several = (1, 1.0, True, torch.Size([1, 2]))
    assert [type(leaf) for leaf in travelled(several)] == [int, float, bool, torch.Size]


def test_descriptions_of_alike_values_are_equal_and_of_others_are_not():
    description = packed((torch.ones(2), 1, "a"), CPU)[0]
    assert description == packed((torch.zeros(2), 7, "a"), CPU)[0]
    others = [(torch.ones(3), 1, "a"), (torch.ones(2), 1.0, "a"), (torch.ones(2), 1, "b")]
    assert all(packed(other, CPU)[0] != description for other in others)
    assert Constant(bool, True) != Constant(int, 1)


@pytest.mark.parametrize(
    "tensor", [torch.eye(2).to_sparse(), nn.Parameter(torch.eye(2)).to_sparse()]
)
def test_a_tensor_that_is_more_than_its_memory_is_refused(tensor):
    with pytest.raises(TypeError, match=r"layout torch\.sparse_coo cannot go to"):
        packed(tensor, CPU)


def test_what_arrives_may_be_detached_in_place_as_a_view_may_not():
    for tensor in torch.ones(2, 3), torch.ones(3, 2).t(), torch.ones(2, 1).expand(2, 3):
        (arrived,) = travelled([tensor])
        assert arrived.detach_() is arrived
        assert arrived.stride() == tensor.stride() and torch.equal(arrived, tensor)


@pytest.mark.parametrize(
    ("values", "is_alone"),
    [
        ((DENSE,), True),
        ((torch.randn(4, 8)[2:],), True),  # it begins within its memory
        ((torch.randn(1, 8)[:, None],), True),
        ((torch.ones(32, dtype=torch.bool),), True),
        (DENSE, False),
        ([DENSE], False),
        ((DENSE, DENSE), False),
        ((DENSE, None), False),
        ((2.0,), False),
        ((), False),
        ((torch.ones(7),), False),  # too short for a mark
        ((DENSE.permute(3, 1, 0, 2),), False),
        ((DENSE[:, :, 0],), False),
        ((torch.randn(3, 1).expand(3, 40),), False),
        ((torch.randn(8, dtype=torch.complex64),), False),
    ],
)
def test_a_tensor_travels_alone_if_its_memory_can_be_sent_as_it_is(values, is_alone):
    description, _ = packed(values, CPU)
    assert (description.alone is not None) == is_alone
    if is_alone:
        assert description.alone.is_of(values)
        assert values[0].is_contiguous()  # as gloo asks for


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(3, 2, 4, 5),),
        (DENSE.double(),),
        (DENSE.clone().requires_grad_(),),
        (torch._neg_view(DENSE),),
        (DENSE, DENSE),
        [DENSE],
        None,
    ],
)
def test_what_is_not_the_tensor_that_is_expected_alone(other):
    assert Strided.of(DENSE).is_of((torch.zeros_like(DENSE),))
    assert not Strided.of(DENSE).is_of(other)
