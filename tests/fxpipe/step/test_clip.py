"""Gradients are clipped by their norm ahead of the optimizer's step."""

from __future__ import annotations

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


def test_a_norm_without_an_optimizer_is_refused():
    with fxpipe.compile(Chain(2), ["cpu"] * 2, chunks=2, loss_fn=mean_loss) as pipe:
        with pytest.raises(ValueError, match=r"call pipe\.clip_grad_norm_"):
            pipe.step(torch.ones(4, 3), target=torch.ones(4), max_grad_norm=1.0)
        pipe.step(torch.ones(4, 3), target=torch.ones(4))
        assert pipe.grad_norm is None
        norm = pipe.clip_grad_norm_(1e-3)
        own = torch.cat([parameter.grad.flatten() for parameter in pipe.parameters()])
        assert norm > 1e-3 and torch.linalg.vector_norm(own) <= 1e-3
