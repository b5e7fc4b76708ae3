"""The check of a loss function that is given the output and a target."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe


def given(loss: Callable[..., Tensor], x: Tensor, target: Any, **more: Any) -> list[str]:
    """The warnings of a step with this loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    pipe = fxpipe.compile(model, ["cpu", "cpu"], chunks=4, loss_fn=loss, **more)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.step(x, target=target)
    return [str(each.message).split(".")[0] for each in caught]


def test_what_samples_alone_are_warned_of_is_not_said() -> None:
    def of_list(output: Tensor, target: list[float]) -> Tensor:
        return F.mse_loss(output.squeeze(1), torch.tensor(target))

    assert given(of_list, torch.randn(8, 6), [float(i) for i in range(8)]) == []


def test_a_number_that_a_single_row_does_not_have_is_not_warned_of() -> None:
    def scaled(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target).square() / target.std()).mean()

    found = given(scaled, torch.randn(16, 6), torch.randn(16, 1))
    assert len(found) == 1 and found[0].startswith("the loss is neither a mean")


def test_what_the_micro_batches_of_a_step_are_warned_of_is_said() -> None:
    found = given(F.mse_loss, torch.randn(8, 6), torch.randn(8), loss_weight="rows")
    assert [each for each in found if each.startswith("Using a target size (torch")]
    found = given(F.mse_loss, torch.randn(8, 6), torch.randn(8), check=False)
    assert [each for each in found if each.startswith("Using a target size (torch")]


class WithPenalty(nn.Module):
    """A model that leaves a penalty for its loss in an attribute, as variational models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)
        self.penalty: Any = 0.0
        self.penalties: list[Tensor] = []
        self.rate = 0.1

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.penalty = hidden.square().mean()
        self.penalties.clear()
        self.penalties.append(self.penalty)
        return self.second(hidden)

    def with_penalty(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + self.rate * self.penalty

    def with_penalties(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + self.rate * sum(self.penalties)

    def with_its_own(self, output: Tensor, target: Tensor) -> Tensor:
        self.penalty = output.square().mean()
        return F.mse_loss(output, target) + self.rate * self.penalty

    def without(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * self.rate


@pytest.mark.filterwarnings("ignore:.*sets penalt")
@pytest.mark.parametrize("name", ["penalty", "penalties"])
def test_a_loss_that_reads_what_the_forward_sets_is_refused(name: str) -> None:
    model = WithPenalty()
    pipe = fxpipe.compile(model, ["cpu"], chunks=4, loss_fn=getattr(model, f"with_{name}"))
    with pytest.raises(fxpipe.BatchError, match=f"loss_fn reads {name}, which WithPenalty sets"):
        pipe.step(torch.randn(8, 6), target=torch.randn(8, 1))


@pytest.mark.filterwarnings("ignore:.*sets penalt")
def test_it_is_refused_where_the_model_has_no_such_attribute_before_a_call() -> None:
    model = WithPenalty()
    del model.penalty
    pipe = fxpipe.compile(model, ["cpu"], chunks=4, loss_fn=model.with_penalty)
    with pytest.raises(fxpipe.BatchError, match="loss_fn reads penalty, which WithPenalty sets"):
        pipe.step(torch.randn(8, 6), target=torch.randn(8, 1))


@pytest.mark.filterwarnings("ignore:.*sets penalt")
@pytest.mark.parametrize("name", ["with_its_own", "without"])
def test_a_loss_may_read_what_it_has_set_itself_and_what_the_forward_leaves(name: str) -> None:
    model = WithPenalty()
    pipe = fxpipe.compile(model, ["cpu"], chunks=4, loss_fn=getattr(model, name))
    pipe.step(torch.randn(8, 6), target=torch.randn(8, 1))
