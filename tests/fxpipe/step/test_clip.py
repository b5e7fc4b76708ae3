"""Gradients are clipped by their norm ahead of the optimizer's step."""

from __future__ import annotations

import copy

import pytest
import torch

import fxpipe
from tests.zoo import Chain, mean_loss, same


def test_a_step_clips_the_gradients_ahead_of_the_optimizers_step():
    x, y = torch.randn(6, 3), torch.randn(6)
    torch.manual_seed(0)
    model = Chain(4)
    torch.manual_seed(0)
    with fxpipe.compile(Chain(4), ["cpu"] * 2, chunks=3, loss_fn=mean_loss) as pipe:
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, pipe)]
        for _ in range(2):
            model.zero_grad()
            for part, target in zip(x.split(2), y.split(2), strict=True):
                loss = mean_loss(model(part), target)
                loss.backward(torch.full_like(loss, 1 / 3))
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            assert norm > 0.1
            optimizers[0].step()
            pipe.step(x, target=y, optimizer=optimizers[1], zero_grad=True, max_grad_norm=0.1)
            assert same(pipe.grad_norm, norm)
            assert all(parameter.grad is None for parameter in pipe.parameters())
        assert same(model.state_dict(), pipe.state_dict())


class Weighted(torch.nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, output, target):
        return mean_loss(output, target) * self.scale.exp() - self.scale


@pytest.mark.parametrize("by_hand", [False, True])
def test_the_parameters_of_the_loss_are_a_part_of_the_norm(by_hand):
    x, y = torch.randn(6, 3), torch.randn(6)
    torch.manual_seed(0)
    model, loss_fn = Chain(4), Weighted()
    mine, of_pipe = copy.deepcopy(model), copy.deepcopy(loss_fn)
    with fxpipe.compile(mine, ["cpu"] * 2, chunks=3, loss_fn=of_pipe) as pipe:
        held = [*model.parameters(), *loss_fn.parameters()]
        optimizers = [
            torch.optim.SGD(each, lr=0.1)
            for each in (held, [*pipe.parameters(), *of_pipe.parameters()])
        ]
        for part, target in zip(x.split(2), y.split(2), strict=True):
            loss = loss_fn(model(part), target)
            loss.backward(torch.full_like(loss, 1 / 3))
        norm = torch.nn.utils.clip_grad_norm_(held, 0.1)
        optimizers[0].step()
        if by_hand:
            pipe.step(x, target=y)
            assert same(pipe.clip_grad_norm_(0.1, others=of_pipe.parameters()), norm)
            optimizers[1].step()
        else:
            pipe.step(x, target=y, optimizer=optimizers[1], max_grad_norm=0.1)
            assert same(pipe.grad_norm, norm)
        assert same(of_pipe.scale.grad, loss_fn.scale.grad)
        assert same(of_pipe.scale, loss_fn.scale)
        assert same(model.state_dict(), pipe.state_dict())


def test_a_norm_without_an_optimizer_is_refused():
    with fxpipe.compile(Chain(2), ["cpu"] * 2, chunks=2, loss_fn=mean_loss) as pipe:
        with pytest.raises(ValueError, match=r"call pipe\.clip_grad_norm_"):
            pipe.step(torch.ones(4, 3), target=torch.ones(4), max_grad_norm=1.0)
        pipe.step(torch.ones(4, 3), target=torch.ones(4))
        assert pipe.grad_norm is None
        norm = pipe.clip_grad_norm_(1e-3)
        own = torch.cat([parameter.grad.flatten() for parameter in pipe.parameters()])
        assert norm > 1e-3 and torch.linalg.vector_norm(own) <= 1e-3
