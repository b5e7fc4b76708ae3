"""Which rows a sample takes: rows that differ by what may be left out of a loss."""

from __future__ import annotations

import itertools

import pytest
import torch

from fxpipe.meaning.sample import (
    GIVEN,
    LEVELS,
    MIXED,
    OF_LABELS,
    OF_PARTS_APART,
    WHOLE,
    count_of_rows,
    sampled,
)


def missing_in(*rows, batch=64, width=4):
    x = torch.randn(batch, width)
    x[list(rows), 1:] = torch.nan
    return x


@pytest.mark.parametrize("level", LEVELS[:-1])
@pytest.mark.parametrize("seed", range(3))
def test_the_first_row_has_values_missing_if_any_has(level, seed):
    (found,) = sampled([missing_in(9)], [0], (1, 3), level, seed)
    assert found.isnan().sum(1).tolist() == [3, 0, 0, 0]


def test_rows_as_they_are_stay_the_first_ones():
    x = missing_in(9)
    (found,) = sampled([x], [0], (1, 3), GIVEN, 0)
    torch.testing.assert_close(found, x[:4])


def test_rows_as_they_are_differ_by_a_count_that_is_given():
    x = missing_in(9)
    (found,) = sampled([x], [0], (1, 3), GIVEN, 0, [count_of_rows(x.isnan(), 0)])
    assert sorted(found.isnan().sum(1).tolist()) == [0, 0, 0, 3]


@pytest.mark.parametrize("seed", range(3))
def test_whole_rows_differ_by_the_smallest_of_their_integers(seed):
    labels = torch.randint(1, 5, (64, 4))
    labels[7, 2:] = 0
    (found,) = sampled([labels], [0], (1, 3), WHOLE, seed)
    assert (found == 0).any()


HELD = [torch.bool, torch.uint8, torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.complex64]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(8,), (8, 3), (8, 0)])
@pytest.mark.parametrize("dtype", HELD)
def test_rows_of_every_dtype_make_samples(dtype, shape, level):
    x = (torch.arange(8 * 3).reshape(8, 3) % 2).float().expand(8, 3)[:, : shape[-1] % 8]
    example = (x if len(shape) > 1 else torch.tensor([1.0, 1, 0, 1, 1, 0, 1, 1])).to(dtype)
    for seed in range(5):
        (found,) = sampled([example], [0], (1, 3), level, seed, has_twins=True)
        assert (found.dtype, found.shape) == (dtype, (4, *shape[1:]))


def test_rows_of_one_length_get_different_ones():
    (found,) = sampled([torch.full((8,), 5)], [0], (1, 3), MIXED, 0)
    assert 4 in found and set(found.tolist()) <= {3, 4, 5}  # shorter ones, as rows may be full


@pytest.mark.parametrize("kept", [[], [0], [0, 5], [0, 1, 2, 5]])
@pytest.mark.parametrize("numbers", [[1, 0, 0, 1, 1, 0, 1, 0], [3, 3, 3, 3, 3, 3, 3, 3]])
def test_whole_numbers_of_rows_may_be_missing(numbers, kept):
    """The number of a row that has none is NaN, which is equal to nothing: not even to the largest
    of all, which it is said to be."""
    labels = torch.full((8, 1), torch.nan)
    labels[kept, 0] = torch.tensor(numbers, dtype=torch.float)[kept]
    for level, seed in itertools.product((WHOLE, MIXED), range(4)):
        (found,) = sampled([labels], [0], (1, 3), level, seed)
        assert found.shape == (4, 1) and not found.isinf().any()


def test_in_one_sample_the_first_and_the_last_row_have_different_labels():
    labels = torch.zeros(16, dtype=torch.long)
    labels[3] = 1
    (found,) = sampled([labels], [0], (1, 3), MIXED, OF_LABELS)
    assert found[0] != found[-1]


def test_each_of_two_counts_has_rows_that_differ_by_it():
    both = [missing_in(9), missing_in(30)]
    for seed in range(3):
        for found in sampled(both, [0, 0], (1, 3), MIXED, seed):
            assert found.isnan().sum() == 3


def test_rows_that_belong_together_stay_together():
    numbers = torch.arange(64).reshape(64, 1)
    x, found = sampled([missing_in(9), numbers], [0, 0], (1, 3), WHOLE, 0)
    assert found[x.isnan().any(1)].flatten().tolist() == [9]


def test_a_row_of_which_all_is_missing_is_not_taken_for_that():
    missing = torch.zeros(8, 3, dtype=torch.bool)
    missing[2], missing[5, 0] = True, True
    assert count_of_rows(missing, 0).argmax() == 5 or count_of_rows(missing, 0)[2] < 1
    assert count_of_rows(missing[[2, 1]], 0).tolist() == [3, 0], "unless there is no other"


@pytest.mark.parametrize("one", [torch.tensor(1.0), torch.tensor([1.0])])
@pytest.mark.parametrize("seed", range(3))
def test_a_single_number_that_is_one_is_taken_for_no_mask(one, seed):
    """A temperature, a weight of a term or a count that is 0 would be another model's."""
    _, found = sampled([missing_in(9), one], [0, None], (1, 3), WHOLE, seed)
    assert found.shape == one.shape and float(found) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.long, torch.bool])
@pytest.mark.parametrize("seed", OF_PARTS_APART)
def test_of_equal_values_all_stay_in_the_first_part_and_few_in_the_other(dtype, seed):
    """What any row, or all rows, have in a column differs for parts of several rows, too."""
    (found,) = sampled([torch.ones(8, 40, dtype=dtype)], [0], (3, 4), MIXED, seed)
    assert found.unique().tolist() == [0, 1] and bool((found == 1).any(1).all())
    first, second = found[:3], found[3:]
    assert bool((first == 1).all()) and bool((second == 0).all(0).any())
