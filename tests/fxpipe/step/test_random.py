"""Random numbers of a step: those of a micro-batch are its own, those of the loss the caller's."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxpipe
from fxpipe import ops
from fxpipe.schedule import NAMES, Schedule, named
from tests.zoo import gradients, mean_loss, same, step_of_loop


class Dropouts(nn.Module):
    """A skip over all of it, and random numbers everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        x = first
        for layer in self.layers[1:]:
            x = F.dropout(torch.tanh(layer(x)), 0.3, self.training)
        return x + torch.rand_like(x) * first


class Seeded(nn.Module):
    """A stage graph by itself: the model, but for its random numbers, which come from a seed."""

    def __init__(self, pipe: fxpipe.Pipeline) -> None:
        super().__init__()
        self.stage_graph = pipe.stage_graph
        self.parameters = pipe.module.parameters

    def forward(self, x: Tensor, seed: Tensor) -> Tensor:
        return self.stage_graph(x, int(seed))


@pytest.mark.covering(1)
@pytest.mark.parametrize("checkpoint, segments", [("never", 1), ("always", 1), ("always", 2)])
@pytest.mark.parametrize("schedule", NAMES)
def test_with_dropout_each_micro_batch_has_its_seed_whatever_the_lanes(
    schedule, checkpoint, segments
):
    torch.manual_seed(3)
    seeds = torch.stack([torch.tensor(seed) for seed in ops.seeds(8)])
    model, x, target = Dropouts(), torch.randn(8, 6), torch.randn(8)
    with fxpipe.compile(
        model,
        ["cpu"] * 4,
        chunks=8,
        schedule=schedule,
        checkpoint=checkpoint,
        checkpoint_segments=segments,
        loss_fn=mean_loss,
    ) as pipe:
        torch.manual_seed(3)
        pipe.step(x, target=target)
        found = gradients(model)
        order = named(schedule, lanes=4, microbatches=8, stages=len(pipe.stages))
        _, wanted = step_of_loop(Seeded(pipe), (x, seeds), target, pipe, order, 8, mean_loss)
    assert same(found, wanted)


AHEAD = """
    0F0 0F1 0R1 0R0 0B0 0F2 0F3 0R3 0B1 0R2 0B2 0B3
    1F0 1R0 1F1 1R1 1I1 1I0 1W1 1W0 1F2 1F3 1R3 1R2 1B2 1B3
    2F0 2F1 2R1 2B1 2R0 2B0 2F2 2F3 2R3 2R2 2B2 2B3
"""


def test_with_dropout_recomputations_draw_what_their_forwards_did_in_any_order():
    torch.manual_seed(3)
    seeds = torch.stack([torch.tensor(seed) for seed in ops.seeds(4)])
    order, model = Schedule.from_text(AHEAD), Dropouts()
    x, target = torch.randn(8, 6), torch.randn(8)
    with fxpipe.compile(
        model, ["cpu"] * 3, schedule=order, checkpoint="always", loss_fn=mean_loss
    ) as pipe:
        torch.manual_seed(3)
        pipe.step(x, target=target)
        found = gradients(model)
        _, wanted = step_of_loop(Seeded(pipe), (x, seeds), target, pipe, order, 4, mean_loss)
    assert same(found, wanted)


@fx.wrap
def slow_noise(x: Tensor) -> Tensor:
    noise = torch.rand_like(x)
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.01)  # so that a lane has the default generator while others are at work
    return x + noise


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(slow_noise(self.a(x)))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_a_loss_draws_random_numbers_as_if_lanes_drew_none(schedule):
    x, drawn = torch.randn(8, 4), []

    def loss_fn(out, _):
        drawn.append(torch.rand(2))
        time.sleep(0.005)
        return (out[:, :2] * drawn[-1]).mean()

    with fxpipe.compile(
        Noisy(), ["cpu"] * 2, chunks=8, schedule=schedule, loss_fn=loss_fn, partition=["b"]
    ) as pipe:
        torch.manual_seed(1)
        ops.seeds(8)
        wanted = [torch.rand(2) for _ in range(8)]
        pipe.prepare(x)
        torch.manual_seed(1)
        pipe.step(x)
    assert same(drawn[-8:], wanted), "after what it drew to be checked, which leaves no trace"


def test_a_loss_may_run_another_pipeline():
    """Which draws random numbers in lanes of its own: nobody waits for who waits for him."""
    x = torch.randn(8, 4)
    with fxpipe.compile(Noisy(), ["cpu"] * 2, chunks=4, example_inputs=(x,)) as teacher:

        def loss_fn(out, target):
            return (out - teacher(target).detach()).square().mean()

        with fxpipe.compile(Noisy(), ["cpu"] * 2, chunks=2, loss_fn=loss_fn) as pipe:
            losses = []
            for _ in range(2):
                torch.manual_seed(1)
                losses.append(pipe.step(x, target=x))
    assert same(*losses)
