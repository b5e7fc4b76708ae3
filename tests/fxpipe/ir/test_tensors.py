import itertools

import pytest
import torch

from fxpipe.ir.tensors import in_memory_of_others, overlap, overlapping, tensor_bytes


def test_bytes_of_any_pytree():
    value = {"a": torch.zeros(3), "b": [torch.zeros(2, dtype=torch.int64), None, 5]}
    assert tensor_bytes(value) == 3 * 4 + 2 * 8


@pytest.mark.parametrize(
    ("one", "other", "do_overlap"),
    [
        (lambda x: x, lambda x: x[:, :2], True),
        (lambda x: x[0], lambda x: x[:, 3], True),
        (lambda x: x[0], lambda x: x[1:, 3], False),
        (lambda x: x[:, :3], lambda x: x[:, 3:], False),
        (lambda x: x[:, ::2], lambda x: x[:, 1::2], False),
        (lambda x: x[:2], lambda x: x[2:], False),
        (lambda x: x[:0], lambda x: x, False),
        (lambda x: x[0, 0].expand(5), lambda x: x.T, True),
        (lambda x: x, lambda x: x.clone(), False),
        (lambda x: x.view(torch.int32), lambda x: x, True),
    ],
)
def test_views_overlap_if_they_have_an_element_in_common(one, other, do_overlap):
    x = torch.zeros(4, 6)
    assert overlap(one(x), other(x)) == overlap(other(x), one(x)) == do_overlap


def test_of_many_views_of_one_memory_the_pairs_that_overlap_are_found():
    x = torch.zeros(6, 4)
    views = {"rows 0-2": x[:2], "rows 1-5": x[1:5], "row 5": x[5], "a column": x[:, 0], "x": x}
    names = {id(each): name for name, each in views.items()}
    pairs = {frozenset(names[id(each)] for each in pair) for pair in overlapping(views.values())}
    apart = {frozenset(pair) for pair in [("rows 0-2", "row 5"), ("rows 1-5", "row 5")]}
    every = {frozenset(pair) for pair in itertools.combinations(views, 2)}
    assert pairs == every - apart


def test_a_tensor_that_several_groups_have_is_in_no_others_memory():
    shared, alone, tied = torch.zeros(2), torch.zeros(3), torch.zeros(4)
    groups = [[shared, tied, tied[:2]], [shared, alone], [tied[2:]]]
    found = in_memory_of_others(groups)
    assert found == {id(tied), id(groups[2][0])}
