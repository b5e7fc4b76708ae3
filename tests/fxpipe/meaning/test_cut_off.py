"""A backward that is not the derivative of its forward, as the forward has detached something."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.meaning.cut_off import CutOff
from tests.zoo import gradients, loop, loss_of, same

X = torch.randn(12, 4)


class Assign(nn.Module):
    """Assigns each row to a cluster, with the gradient of a soft assignment: of the row's own, or
    of one that is normalised over the batch."""

    def __init__(self, soft):
        super().__init__()
        self.scores, self.head, self.soft = nn.Linear(4, 8), nn.Linear(8, 4), soft

    def forward(self, x):
        scores = self.scores(x)
        hard = F.one_hot(scores.argmax(1), 8).float()
        soft = self.soft(scores.softmax(1))
        return self.head(hard + soft - soft.detach())


def of_the_batch(soft):
    return soft / soft.sum(0, keepdim=True)


def without_gradients(soft):
    with torch.no_grad():
        total = soft.sum(0)
    return soft / total


@pytest.mark.parametrize("soft", [of_the_batch, without_gradients])
def test_rows_that_see_each_other_in_the_backward_only_are_refused(soft):
    pipe = fxpipe.compile(Assign(soft), ["cpu"] * 2, chunks=3)
    with pytest.raises(fxpipe.BatchError, match="depends on which rows go through the backward"):
        pipe(X)


def test_a_straight_through_gradient_of_each_row_is_that_of_the_loop():
    model = Assign(lambda soft: soft)
    expected = loop(model, (X,), chunks=3)
    model.zero_grad()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3) as pipe:
        output = pipe(X)
        loss_of(output).backward()
    assert same((output.detach(), gradients(model)), expected)


def test_what_is_detached_or_computed_without_gradients_is_noticed():
    hidden, parameter = nn.Linear(4, 4)(X), nn.Linear(4, 4).weight

    def found(run):
        with CutOff() as cut_off:
            run()
        return cut_off.found

    assert found(hidden.detach) and found(torch.no_grad()(lambda: hidden * 2))
    assert not found(lambda: hidden * 2) and not found(X.detach)
    assert not found(parameter.detach), "its gradient is added up over all rows anyway"
