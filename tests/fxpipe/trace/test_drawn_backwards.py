"""An autograd Function that draws random numbers in its backward is refused where stages run at the
same time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxpipe

X = torch.ones(4, 6)


class NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient + torch.rand_like(gradient)


class NoisyValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        ctx.save_for_backward(noise)
        return x * noise

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (noise,) = ctx.saved_tensors
        return gradient * noise


class Noisy(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function.apply(self.first(x)))


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_the_line_that_draws_is_named(tracer: str) -> None:
    with pytest.raises(fxpipe.TraceError, match=r"at .* return gradient \+ torch.rand_like"):
        fxpipe.compile(Noisy(NoisyGradient), ["cpu"] * 2, chunks=2, tracer=tracer)(X)


def test_in_one_lane_it_draws_in_the_same_order_in_each_run() -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Noisy(NoisyGradient)
        with fxpipe.compile(model, ["cpu"], chunks=2) as pipe:
            pipe.prepare(X)
            torch.manual_seed(0)
            pipe(X).sum().backward()
        found.append([each.grad for each in model.parameters()])
    assert all(map(torch.equal, *found))


def test_what_a_forward_draws_has_a_seed() -> None:
    with fxpipe.compile(Noisy(NoisyValue), ["cpu"] * 2, chunks=2) as pipe:
        torch.manual_seed(0)
        assert pipe(X).shape == (4, 2)
