"""Outputs are compared a piece at a time: what that needs does not grow with the outputs."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.ir import tensors
from fxpipe.meaning.compare import difference, joined_difference, reading
from fxpipe.trace import checks

PIECE = 10


class Largest(TorchDispatchMode):
    """Notes how many elements the largest tensor has that an operator makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
            self.elements = max(self.elements, made.numel())
        return made


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(tensors, "PIECE", PIECE)


@pytest.mark.parametrize("made", [torch.randn(8, 9), torch.randint(5, (8, 9))])
@pytest.mark.parametrize("compared", [difference, lambda *t: checks.difference(*t, 1e-5)])
def test_no_tensor_is_made_that_is_as_large_as_what_is_compared(compared, made):
    other = made.clone()
    with Largest() as seen:
        assert not compared(made, other)
    assert seen.elements <= PIECE < made.numel()


def test_a_difference_in_any_piece_counts():
    whole = torch.zeros(25)
    for place in (0, 12, 24):
        other = whole.clone()
        other[place] = 2.0
        found = difference(whole, other)
        assert (found.largest, found.scale, found.share) == (2.0, 2.0, 1 / 25)
        assert checks.difference(whole, other, 1e-5) is not None


def test_a_number_that_is_none_is_apart_from_all_numbers():
    whole, other = torch.zeros(25), torch.zeros(25)
    whole[3] = other[3] = float("nan")
    assert not difference(whole, other)
    whole[14] = float("nan")
    assert difference(whole, other)


@pytest.mark.parametrize("whole", [torch.randn(8, 9), torch.randint(5, (8, 9))])
def test_parts_are_compared_without_being_joined(whole):
    parts = [part.clone() for part in whole.split([3, 5])]
    with Largest() as seen:
        assert reading(whole, parts, [3, 5]).dims == (0,)
    assert seen.elements <= PIECE


def test_parts_differ_from_the_whole_as_what_they_are_joined_to_does():
    whole = torch.randn(4, 9, dtype=torch.float64)
    parts = [whole[:, :2].clone(), whole[:, 2:2].clone(), whole[:, 2:].clone() * 100]
    parts[2][1, 3] = torch.nan
    apart = joined_difference(whole, parts, 1)
    joined = difference(whole, torch.cat(parts, 1))
    assert (apart.scale, apart.share) == (joined.scale, joined.share)
    assert not joined_difference(whole, list(whole.split([2, 7], 1)), 1, errors=0.0)
    assert joined_difference(whole, parts[:2], 1).share == 1  # a part is missing
