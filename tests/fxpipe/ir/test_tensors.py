import pytest
import torch

from fxpipe.ir.tensors import overlap, tensor_bytes


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
