"""A tensor of which each micro-batch has a part, until somebody computes with it."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from fxpipe.runtime.apart import Apart, all_whole
from fxpipe.runtime.microbatch import Parts

ROWS = torch.arange(20.0).view(5, 4)


def apart(dim: int = 0, sizes: tuple[int, ...] = (2, 2, 1)) -> Apart:
    rows = ROWS if dim == 0 else ROWS.t()
    return Apart(Parts(tuple(part.clone() for part in rows.split(sizes, dim)), dim))


def test_it_says_what_it_is_without_being_joined() -> None:
    tensor = apart()
    assert (tensor.shape, tensor.dtype, tensor.device.type) == ((5, 4), torch.float32, "cpu")
    assert tensor.numel() == 20 and tensor.ndim == 2 and not tensor.requires_grad
    assert tensor.is_in_parts


def test_a_call_that_cuts_the_same_rows_gets_the_parts() -> None:
    tensor = apart()
    parts = tensor.cut(0, 3)
    assert isinstance(parts, Parts) and [len(part) for part in parts.values] == [2, 2, 1]
    assert tensor.is_in_parts


@pytest.mark.parametrize(("dim", "chunks"), [(0, 2), (1, 3), (None, 3)])
def test_another_call_gets_the_whole(dim: int | None, chunks: int) -> None:
    tensor = apart()
    assert torch.equal(tensor.cut(dim, chunks), ROWS)
    assert not tensor.is_in_parts


def test_parts_of_other_sizes_than_a_call_cuts_are_joined() -> None:
    assert torch.equal(apart(sizes=(1, 2, 2)).cut(0, 3), ROWS)


def test_rows_may_be_in_any_dimension() -> None:
    tensor = apart(dim=1)
    assert tensor.shape == (4, 5) and isinstance(tensor.cut(1, 3), Parts)
    assert torch.equal(tensor + 0, ROWS.t())


def test_whoever_computes_with_it_gets_plain_tensors() -> None:
    order = torch.tensor([3, 0, 0, 1, 4])
    chosen = apart().index_select(0, order)
    assert type(chosen) is torch.Tensor and torch.equal(chosen, ROWS[order])
    assert torch.equal(torch.cat([ROWS, apart()]), torch.cat([ROWS, ROWS]))
    assert apart().tolist() == ROWS.tolist() and repr(apart()) == repr(ROWS)
    assert (apart().numpy() == ROWS.numpy()).all() and float(apart()[0, 1]) == 1


def test_what_is_written_to_it_or_to_a_view_of_it_is_there_for_the_next_call() -> None:
    tensor = apart()
    tensor.zero_()
    tensor[:, 1:3].fill_(7)
    seen = tensor.cut(0, 3)
    assert isinstance(seen, torch.Tensor) and seen.sum() == 5 * 2 * 7


def test_copies_are_plain_tensors() -> None:
    file = io.BytesIO()
    torch.save(apart(), file)
    file.seek(0)
    for copied in (copy.deepcopy(apart()), torch.load(file), apart().clone()):
        assert type(copied) is torch.Tensor and torch.equal(copied, ROWS)


def test_states_among_outputs_are_joined_and_lists_of_rows_stay() -> None:
    rows = Parts((ROWS[:2], ROWS[2:]))
    joined = all_whole({"state": Parts((ROWS[:2], ROWS[2:]), 0), "list": rows, "n": 3})
    assert torch.equal(joined["state"], ROWS) and joined["list"] is rows and joined["n"] == 3
