"""Loss functions whose values are put together right, and whose gradients may not be."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe

OTHER = "their gradients do not make its gradient"


class Normalized(torch.autograd.Function):
    """Hands its input on, and divides the gradient by its norm over all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.norm()


class Doubled(torch.autograd.Function):
    """Hands its input on, and doubles the gradient of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def balanced(output: Tensor, target: Tensor) -> Tensor:
    a, b = F.mse_loss(output, target), F.l1_loss(output, target)
    return a + b * (a / b).detach()


def relative(output: Tensor, target: Tensor) -> Tensor:
    a, b = F.mse_loss(output, target), F.l1_loss(output, target)
    return a / a.detach() + b / b.detach()


def normalized(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(Normalized.apply(output), target)


def whitened(output: Tensor, target: Tensor) -> Tensor:
    output.register_hook(lambda grad: grad / grad.std())
    return F.mse_loss(output, target)


def compared_without_gradient(output: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():
        a, b = F.mse_loss(output, target), F.l1_loss(output, target)
        by = a / b
    return F.mse_loss(output, target) + F.l1_loss(output, target) * by


def focal(output: Tensor, target: Tensor) -> Tensor:
    each = F.mse_loss(output, target, reduction="none").mean(1)
    return (each * (-each).exp().detach()).mean()


def policy(output: Tensor, target: Tensor) -> Tensor:
    logs = output.log_softmax(1)
    return -((logs - logs.detach()).exp() * target).mean()


def straight_through(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output + (output.round() - output).detach(), target)


def doubled(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(Doubled.apply(output), target)


def clipped(output: Tensor, target: Tensor) -> Tensor:
    output.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return F.mse_loss(output, target, reduction="sum")


def added_up(output: Tensor, target: Tensor) -> Tensor:
    logged = F.mse_loss(output.detach(), target)
    return F.l1_loss(output, target, reduction="sum") + 0 * logged


def without_gradient(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.detach(), target)


def at_zero(output: Tensor, target: Tensor) -> Tensor:
    return ((output - output.detach()).abs() + F.mse_loss(output, target, reduction="none")).mean()


def messages_of(loss: Callable[..., Any], dtype: torch.dtype | None = None, **more: Any) -> str:
    """What a step with this loss warns of."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5))
    x, target = torch.randn(16, 6), torch.randn(16, 5)
    pipe = fxpipe.compile(model, ["cpu", "cpu"], chunks=4, loss_fn=loss, **more)
    with (
        warnings.catch_warnings(record=True) as caught,
        torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None),
    ):
        warnings.simplefilter("always")
        if loss is without_gradient:
            with pytest.raises(ValueError, match="does not depend on any parameter"):
                pipe.step(x, target=target)
        else:
            pipe.step(x, target=target)
    return "\n".join(str(each.message) for each in caught)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "loss", [balanced, relative, normalized, whitened, compared_without_gradient]
)
@pytest.mark.parametrize("weight", [None, "rows", len])
def test_a_gradient_that_depends_on_all_rows_is_warned_of(
    loss: Callable[..., Tensor], weight: Any
) -> None:
    found = messages_of(loss, loss_weight=weight)
    assert OTHER in found
    assert "chunks=1" in found


def test_a_gradient_that_depends_on_all_rows_is_in_the_report() -> None:
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5))
    x, target = torch.randn(8, 6), torch.randn(8, 5)
    pipe = fxpipe.compile(model, ["cpu", "cpu"], chunks=4, loss_fn=balanced)
    with pytest.warns(fxpipe.BatchWarning, match=OTHER):
        pipe.step(x, target=target)
    assert OTHER in " ".join(str(pipe.explain()).split())


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "loss", [focal, policy, straight_through, doubled, clipped, added_up, at_zero]
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_gradient_of_each_row_alone_is_not_warned_of(
    loss: Callable[..., Tensor], dtype: torch.dtype | None
) -> None:
    assert messages_of(loss, dtype) == ""


def test_a_loss_without_a_gradient_is_not_warned_of() -> None:
    assert messages_of(without_gradient) == ""


def test_the_gradient_is_not_looked_at_without_a_check() -> None:
    assert messages_of(balanced, check=False) == ""


def test_the_gradients_of_several_outputs_are_compared() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(6, 5), nn.Linear(6, 4)
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {
                "one": self.one(x),
                "other": self.other(x).T,
                "class": x.argmax(1),
                "scale": self.scale,
            }

    def fair(output: dict[str, Tensor], target: Tensor) -> Tensor:
        by = output["other"].detach().exp().sum(0)
        each = by * (output["one"].mean(1) - target).square()
        return each.mean() * output["scale"].sum()

    def unfair(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return fair(output, target) + output["other"].sum() - output["other"].sum().detach()

    for loss, says in ((fair, False), (unfair, True)):
        model, x, target = Heads(), torch.randn(8, 6), torch.randn(8)
        pipe = fxpipe.compile(model, ["cpu", "cpu"], chunks=4, loss_fn=loss)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pipe.step(x, target=target)
        assert [OTHER in str(each.message) for each in caught] == [True] * says
