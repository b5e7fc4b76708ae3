"""A model is run for the check without effect on it, and what the run has made is freed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxpipe.meaning.asked import Asked
from fxpipe.meaning.runs import ModelRuns
from fxpipe.meaning.stirred import in_place_of_zeros, stirred


class Deep(nn.Module):
    """A chain of so many operators."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth, self.weight = depth, nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        for _ in range(self.depth):
            x = torch.sin(x)
        return x


def test_an_autograd_graph_that_is_deeper_than_the_stack_is_freed():
    """PyTorch frees a node that Python has seen within the node before it: the process would end
    with a segmentation fault."""
    runs = ModelRuns(Deep(200_000), lambda tensors: (tuple(tensors), {}), {0: "x"}, Asked())
    values, history = runs.ran([torch.randn(1, 4)])
    assert isinstance(values, Tensor) and values.shape == (1, 4)
    assert len(history[1]) == 200_003  # the chain, the product, the weight and the input


def test_autocast_keeps_no_copies_of_the_values_that_have_taken_the_place_of_zeros():
    """Within one autocast a weight is cast once, and the copy is used again."""
    layer, x = nn.Linear(3, 3, bias=False), torch.ones(1, 3)
    nn.init.zeros_(layer.weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert not layer(x).any()
        with stirred(in_place_of_zeros(layer)):
            assert layer(x).any()
        assert not layer(x).any()


def test_what_a_run_is_warned_of_is_not_said(recwarn):
    class Spread(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.std(0) + nn.functional.mse_loss(x, x.new_zeros(4, 1))

    runs = ModelRuns(Spread(), lambda tensors: (tuple(tensors), {}), {0: "x"}, Asked())
    runs.ran([torch.randn(1, 4)])
    assert not recwarn.list
