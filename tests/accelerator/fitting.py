"""A model is trained in half of the memory that it needs if everything is kept, as the allocators
of two simulated devices count it (``sim/memory.h``)."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import transformers
from torch import nn

import fxpipe
from fxpipe.schedule import named
from tests.accelerator.clocks import Speed, begin, virtual_time
from tests.zoo import UNet, mean_loss, step_of_loop

DEVICES = ["sim:0", "sim:1"]
CHUNKS = 8


class Trained(nn.Module):
    """A model that returns its loss: what a function beside the model saves for its backward is not
    known when the model is cut."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, target):
        return mean_loss(self.model(x), target)


class Logits(nn.Module):
    """A GPT-2 that returns its logits only."""

    def __init__(self):
        super().__init__()
        config = transformers.GPT2Config(
            vocab_size=64,
            n_positions=64,
            n_embd=32,
            n_layer=6,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation="eager",  # the fused kernel of the CPU saves less than others do
        )
        self.gpt2 = transformers.GPT2LMHeadModel(config)

    def forward(self, tokens):
        return self.gpt2(tokens, use_cache=False).logits


def unet():
    return Trained(UNet(4, 3)), torch.randn(2 * CHUNKS, 3, 64, 64)


def gpt2():
    return Trained(Logits()), torch.randint(64, (2 * CHUNKS, 64))


def trained(model, x, target, **options):
    """The loss of a second step; the most bytes that each device has held in it; the checkpoint
    modes; and the loss and the gradients of a loop on one device."""
    given = {"chunks": CHUNKS, "schedule": "gpipe", "optimizer": "sgd", "costs": "analytic"}
    speed = Speed(flops_per_s=2**31, link_bytes_per_s=2**31)
    with virtual_time(speed), fxpipe.compile(model, DEVICES, **given, **options) as pipe:
        pipe.step(x, target)
        model.zero_grad()
        gc.collect()
        for device in map(torch.device, DEVICES):
            torch.accelerator.synchronize(device)
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats(device)
        begin(speed)
        loss = pipe.step(x, target)
        peaks = []
        for device in map(torch.device, DEVICES):
            torch.accelerator.synchronize(device)
            peaks.append(torch.accelerator.memory_stats(device)["allocated_bytes.all.peak"])
        order = named("gpipe", lanes=2, microbatches=CHUNKS, stages=2)
        reference = copy.deepcopy(model).to(DEVICES[0])
        reference.zero_grad()
        x, target = x.to(DEVICES[0]), target.to(DEVICES[0])
        wanted = step_of_loop(
            reference, (x, target), target, pipe, order, CHUNKS, lambda loss, _: loss
        )
        return loss, peaks, pipe._runner.compiler.layout.modes, wanted


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", [unet, gpt2])
def test_half_of_the_memory_is_enough(make):
    torch.manual_seed(0)
    model, x = make()
    target = torch.randn(len(x))
    _, needed, modes, _ = trained(copy.deepcopy(model), x, target)
    assert modes == "never"

    limit = max(needed) // 2
    own = copy.deepcopy(model)
    loss, held, modes, wanted = trained(own, x, target, memory=limit, checkpoint="auto")
    assert max(held) <= limit
    assert modes != "never"
    torch.testing.assert_close(loss.cpu(), wanted[0].cpu(), rtol=1e-6, atol=1e-6)
    for (name, parameter), gradient in zip(own.named_parameters(), wanted[1], strict=True):
        if name.endswith("wte.weight"):  # it is tied, and its gradients are summed in another order
            torch.testing.assert_close(parameter.grad.cpu(), gradient.cpu())
        else:
            assert torch.equal(parameter.grad.cpu(), gradient.cpu()), name
