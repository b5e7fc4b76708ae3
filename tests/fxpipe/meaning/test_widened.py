"""A loss that is computed in less than single precision is told a mean or a sum all the same."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.meaning.widened import Widened

TWO = ["cpu", "cpu"]
LOW = [torch.bfloat16, torch.float16]
LABELS = torch.arange(32) * 7 % 10
TARGET = {"y": LABELS, "n": torch.tensor(32.0)}


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 10))


def told(loss_fn, dtype, settings=None, **options) -> tuple[list[str], Tensor, Tensor]:
    """What a step in a precision warns of, its loss, and that of the whole batch."""
    model = classifier().to(dtype)
    x = torch.randn(32, 8).to(dtype)
    with (
        warnings.catch_warnings(record=True) as caught,
        settings or nullcontext(),
        fxpipe.compile(model, TWO, chunks=4, loss_fn=loss_fn, **options) as pipe,
    ):
        warnings.simplefilter("always")
        loss = pipe.step(x, target=TARGET)
        expected = loss_fn(model(x), TARGET).detach()
    found = [str(each.message) for each in caught if each.category is fxpipe.BatchWarning]
    return found, loss, expected


def sum_by_a_number(output: Tensor, target: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output, target["y"], reduction="sum") / target["n"]


def widened_mean(output: Tensor, target: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output, target["y"]).float()


def narrowed_sum(output: Tensor, target: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.bfloat16(), target["y"], reduction="sum") / target["n"]


def masked_mean(output: Tensor, target: dict[str, Tensor]) -> Tensor:
    """Nearly a mean over the rows: some count a twentieth more than others."""
    losses = F.cross_entropy(output, target["y"], reduction="none")
    weights = 1 + 0.05 * (target["y"] > 4).to(losses)
    return (losses * weights).sum() / weights.sum()


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
@pytest.mark.parametrize("loss_fn", [sum_by_a_number, widened_mean, narrowed_sum])
def test_what_a_loss_is_does_not_hang_on_the_precision_that_it_is_computed_in(loss_fn, dtype):
    texts, loss, expected = told(loss_fn, dtype)
    assert texts == []
    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0)


@pytest.mark.parametrize("loss_fn", [sum_by_a_number, widened_mean])
def test_nor_on_autocast(loss_fn):
    texts, loss, expected = told(
        lambda output, target: loss_fn(output @ torch.eye(10), target),
        torch.float32,
        torch.autocast("cpu", torch.bfloat16),
    )
    assert texts == []
    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0)


@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
def test_a_mean_that_rows_contribute_to_unequally_is_not_taken_for_one_over_the_rows(dtype):
    (text,), *_ = told(masked_mean, dtype)
    assert "neither a mean over the rows nor a sum" in text


def test_nor_under_autocast():
    (text,), *_ = told(
        lambda output, target: masked_mean(output @ torch.eye(10), target),
        torch.float32,
        torch.autocast("cpu", torch.bfloat16),
    )
    assert "neither a mean over the rows nor a sum" in text


class Projected(nn.Module):
    """A loss with parameters in the precision of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(10, 10).bfloat16()

    def forward(self, output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return sum_by_a_number(self.head(output), target)


def test_parameters_of_a_loss_may_be_in_low_precision():
    texts, loss, expected = told(Projected(), torch.bfloat16)
    assert texts == []
    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0)


def test_a_loss_that_takes_one_precision_only_is_checked_in_it():
    def loss_fn(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        if output.dtype != torch.bfloat16:
            raise TypeError("this kernel is for bfloat16")
        return F.cross_entropy(output, target["y"], reduction="sum") / 32

    texts, loss, expected = told(loss_fn, torch.bfloat16)
    assert texts == []
    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0)


class OwnLoss(nn.Module):
    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.body, self.reduction = classifier(), reduction

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.body(x), y, reduction=self.reduction).float()
        return loss / 32 if self.reduction == "sum" else loss


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_that_a_model_returns_is_told_a_mean_or_a_sum(reduction, dtype):
    model, x = OwnLoss(reduction).to(dtype), torch.randn(32, 8).to(dtype)
    with (
        warnings.catch_warnings(),
        fxpipe.compile(model, TWO, chunks=4) as pipe,
    ):
        warnings.simplefilter("error", fxpipe.BatchWarning)
        loss = pipe.step(x, LABELS)
    torch.testing.assert_close(loss, model(x, LABELS).detach(), rtol=0.02, atol=0)


def test_operators_compute_in_single_precision_at_least():
    a, b = torch.randn(4, 4), torch.randn(4, 4).bfloat16()
    wide = b.float()
    with Widened() as mode:
        assert torch.equal(b @ b, wide @ wide)
        assert torch.equal(a.half() + b, a + wide)
        assert torch.zeros(2, dtype=torch.float16).dtype == torch.float32
        assert (a.double() @ wide.double()).dtype == torch.float64
        assert mode.met
    with Widened() as mode:
        assert torch.equal(a @ a, a @ a)
        assert not mode.met


def test_what_is_written_to_keeps_its_precision():
    state = torch.ones(3).bfloat16()
    with Widened():
        state.mul_(0.5).add_(torch.ones(3))
        state[1] = torch.tensor(4.0)
    assert state.dtype == torch.bfloat16
    assert state.tolist() == [1.5, 4.0, 1.5]


def test_a_backward_computes_in_single_precision_and_gives_each_parameter_a_gradient_of_its_own():
    layer, x = nn.Linear(8, 8).bfloat16(), torch.randn(4, 8, requires_grad=True)
    wide = nn.Linear(8, 8)
    wide.load_state_dict(layer.state_dict())
    with Widened():
        layer(x).square().sum().backward()
    found, x.grad = x.grad, None
    wide(x).square().sum().backward()
    assert torch.equal(found, x.grad)
    for own, other in zip(layer.parameters(), wide.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad.bfloat16())
