"""An optimizer takes the mean of the gradients of several steps."""

from __future__ import annotations

import copy

import pytest
import torch

import fxpipe
from tests.zoo import MLP, mean_loss, same


@pytest.mark.covering(1)
@pytest.mark.parametrize("has_scaler", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_the_gradients_of_several_steps_are_those_of_the_loop_over_their_losses(
    schedule, has_scaler
):
    steps = 3
    batches = [(torch.randn(4, 12), torch.randn(4)) for _ in range(2 * steps)]
    model = MLP()
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, reference)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, enabled=has_scaler) for _ in range(2)]
    how = {"chunks": 2, "schedule": schedule, "loss_fn": mean_loss}
    with fxpipe.compile(model, ["cpu"] * 2, **how) as pipe:
        for number, (x, target) in enumerate(batches, 1):
            is_last = number % steps == 0
            loss = pipe.step(
                x,
                target=target,
                accumulate=steps,
                optimizer=optimizers[0] if is_last else None,
                scaler=scalers[0],
                zero_grad=is_last,
            )
            parts = list(zip(x.chunk(2), target.chunk(2), strict=True))
            losses = [mean_loss(reference(part), wanted) for part, wanted in parts]
            for each in losses:
                seed = torch.full_like(each, 0.5) * torch.tensor(1 / steps)
                each.backward(scalers[1].scale(seed))
            assert same(loss, (losses[0] * 0.5 + losses[1] * 0.5).detach())
            if is_last:
                scalers[1].step(optimizers[1])
                scalers[1].update()
                optimizers[1].zero_grad()
            assert same(list(model.parameters()), list(reference.parameters()))


@pytest.mark.parametrize("wrong", [0, -1, 0.5])
def test_a_number_of_steps_that_is_none_is_refused(wrong):
    with (
        fxpipe.compile(MLP(), ["cpu"] * 2, chunks=2, loss_fn=mean_loss) as pipe,
        pytest.raises(ValueError, match=r"accumulate is .*: give the number of steps"),
    ):
        pipe.step(torch.ones(4, 12), target=torch.ones(4), accumulate=wrong)
