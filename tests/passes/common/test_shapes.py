"""The bytes of what goes from stage to stage, for micro-batches of any size."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import nn

from passes.common.shapes import TensorShape, shape_of, shapes_of, shapes_of_gradient
from tests.zoo import after

HALF, F32 = Fraction(1, 2), torch.float32


@pytest.mark.parametrize(
    "shape, part, expected",
    [
        (TensorShape(F32, (8, 3), (0,)), HALF, 4 * 3 * 4),
        (TensorShape(F32, (8, 3), (0,)), Fraction(9, 8), 9 * 3 * 4),
        (TensorShape(F32, (8, 3), ()), HALF, 8 * 3 * 4),  # as large for each micro-batch
        (TensorShape(F32, (8, 8), (0, 1)), HALF, 4 * 4 * 4),  # every row with every row
        (TensorShape(torch.int64), None, 8),
        (TensorShape(F32, (8, 3), (0,)), None, None),
        (TensorShape(F32, (3, 3), (0,)), HALF, None),  # a row and a half
        (TensorShape(F32, (8, 3), None), Fraction(1), 8 * 3 * 4),
        (TensorShape(F32, (8, 3), None), HALF, None),
    ],
)
def test_dimensions_that_grow_have_the_micro_batchs_part_of_the_rows(shape, part, expected):
    assert shape.bytes(part) == expected


def test_a_dimension_that_repeats_the_same_memory_counts_once():
    assert shape_of(torch.ones(3, 1).expand(3, 5)) == TensorShape(F32, (3, 1))


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        hidden = self.a(x)
        place = hidden.argmax(1)
        return self.b(hidden) + place[:, None]


def test_a_gradient_has_the_shapes_of_those_tensors_that_can_have_one():
    gm = after("split", Several(), (torch.ones(8, 3),), ["b"], chunks=2)
    shapes = {str(node): (shapes_of(node), shapes_of_gradient(node)) for node in gm.graph.nodes}
    wide = TensorShape(F32, (8, 4), (0,), requires_grad=True)
    assert shapes["a"] == ((wide,), (wide,))
    assert shapes["argmax"] == ((TensorShape(torch.int64, (8,), (0,)),), ())
