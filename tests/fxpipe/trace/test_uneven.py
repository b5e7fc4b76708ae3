"""Inputs without a pattern have the kinds of those in whose place they are."""

from __future__ import annotations

import torch

from fxpipe.trace.uneven import uneven


def test_values_differ_and_are_the_same_each_time():
    ones = torch.ones(3, 4, dtype=torch.bfloat16), torch.ones(8)
    for one, other, given in zip(uneven(ones), uneven(ones), ones, strict=True):
        assert torch.equal(one, other) and one.unique().numel() > 2
        assert one.dtype == given.dtype and one.shape == given.shape


def test_a_mask_has_some_of_both():
    (mask,) = uneven([torch.ones(8, dtype=torch.bool)])
    assert mask.dtype == torch.bool and 0 < mask.sum() < 8


def test_integers_and_what_is_sparse_stay():
    given = [torch.arange(3), torch.eye(3).to_sparse()]
    assert all(one is other for one, other in zip(uneven(given), given, strict=True))
