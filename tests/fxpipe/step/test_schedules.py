"""A step follows its schedule: any number of lanes, stages and micro-batches, and what is kept."""

from __future__ import annotations

import copy
import threading
import weakref
from typing import ClassVar

import pytest
import torch
from torch import Tensor, fx, nn

import fxpipe
from fxpipe.schedule import Schedule, named
from tests.fxpipe.step.compiled import compiled
from tests.zoo import MLP, MODELS, UNet, gradients, mean_loss, same, step_of_loop


@pytest.mark.covering(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved_1f1b", "zbv"])
@pytest.mark.parametrize(
    "make, inputs",
    [
        (lambda: MLP(depth=9), MODELS["mlp"][1]),
        (lambda: UNet(depth=4), MODELS["unet"][1]),  # whose skips pass by up to six stages
    ],
)
def test_four_lanes_up_to_eight_stages_and_any_batch(make, inputs, schedule):
    model = make()
    with fxpipe.compile(model, ["cpu"] * 4, chunks=8, schedule=schedule, loss_fn=mean_loss) as pipe:
        for batch in (16, 5, 1):
            x, target = inputs(batch), torch.randn(batch)
            model.zero_grad()
            pipe.step(*x, target=target)
            pipe.prepare(*x)
            order = named(schedule, lanes=4, microbatches=min(8, batch), stages=len(pipe.stages))
            reference = copy.deepcopy(model)
            wanted = step_of_loop(reference, x, target, pipe, order, 8, mean_loss)
            assert same(gradients(model), wanted[1])


@pytest.mark.parametrize(
    "schedule",
    [
        "dualpipe_v",  # which takes twice as many micro-batches as there are lanes
        Schedule.from_text("""
            0F0 0F1 0F2 3F0 3F1 3I0 3F2 3W0 3I1 3W1 3B2 0B0 0B1 0B2
            1F0 2F0 1F1 2F1 1F2 2F2 2B0 2B1 1B0 2I2 1B1 1B2 2W2
        """),
    ],
    ids=["dualpipe_v", "a schedule"],
)
def test_a_smaller_batch_goes_in_the_order_of_its_micro_batches_in_a_whole_one(schedule):
    """The last one of an epoch, say."""
    model, chunks = MLP(), 4 if schedule == "dualpipe_v" else 3
    whole = named(schedule, lanes=2, microbatches=4) if chunks == 4 else schedule
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=chunks, schedule=schedule, loss_fn=mean_loss
    ) as pipe:
        for batch in (6, 2, 1):
            x, target = torch.randn(batch, 12), torch.randn(batch)
            model.zero_grad()
            pipe.step(x, target=target)
            reference, order = copy.deepcopy(model), whole.first(min(batch, chunks))
            _, wanted = step_of_loop(reference, (x,), target, pipe, order, chunks, mean_loss)
            assert same(gradients(model), wanted)


def test_a_schedule_of_ones_own_says_how_many_micro_batches_there_are():
    order = Schedule.from_text("0F0 0F1 0F2 0B0 0B1 0B2 \n 1F0 1F1 1F2 1B0 1B1 1B2")
    with fxpipe.compile(MLP(), ["cpu"] * 2, schedule=order, loss_fn=mean_loss) as pipe:
        pipe.step(torch.randn(8, 12), target=torch.randn(8))
        assert len(pipe.losses) == 3


def kept(schedule: str, where: list[int]) -> list[int]:
    """The most micro-batches that are alive at once in each lane of three, counted; ``where`` says
    in which lane a stage is."""
    model = nn.Sequential(*map(Kept, where))
    with fxpipe.compile(
        model,
        ["cpu"] * 3,
        chunks=8,
        schedule=schedule,
        stages=len(where),
        partition=[str(i) for i in range(1, len(where))],
        loss_fn=lambda out, _: out.sum(),
    ) as pipe:
        x = torch.randn(16, 4)
        pipe.step(x)
        Kept.clear()
        pipe.step(x)
    return [Kept.most[lane] for lane in range(3)]


def test_a_stage_of_1f1b_keeps_as_many_micro_batches_as_there_are_stages_from_it_on():
    assert kept("1f1b", [0, 1, 2]) == [3, 2, 1]
    assert kept("gpipe", [0, 1, 2]) == [8, 8, 8]


def test_zero_bubble_schedules_keep_no_more_than_the_first_lane_of_1f1b():
    assert max(kept("zb_h1", [0, 1, 2])) <= 3
    # Twice as many stages, half as large each.
    assert max(kept("zbv", [0, 1, 2, 2, 1, 0])) <= 2 * 3


class Kept(nn.Module):
    """Counts the micro-batches whose activations its lane keeps."""

    alive: ClassVar[dict[int, list[weakref.ref[object]]]] = {}
    most: ClassVar[dict[int, int]] = {}
    lock = threading.Lock()

    def __init__(self, lane: int) -> None:
        super().__init__()
        self.lane, self.linear = lane, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(self.linear(counted(x, self.lane))) * 0.1

    @staticmethod
    def clear() -> None:
        Kept.alive, Kept.most = {}, {}


@fx.wrap
def counted(x: Tensor, lane: int) -> Tensor:
    y = x * 0.5  # which the linear keeps until it has the gradient of its weight
    with Kept.lock:
        mine = Kept.alive.setdefault(lane, [])
        mine.append(weakref.ref(y.untyped_storage()))
        now = sum(ref() is not None for ref in mine)
        Kept.most[lane] = max(Kept.most.get(lane, 0), now)
    return y


@pytest.mark.parametrize(
    "options, message",
    [
        ({"schedule": "2f2b"}, "schedule is '2f2b': give one of"),
        ({"schedule": "interleaved_1f1b", "stages": 3}, "as many stages on each lane"),
        ({"schedule": named("1f1b", lanes=3, microbatches=4)}, "has 3 lanes and 3 stages"),
        (
            {"schedule": named("1f1b", lanes=2, microbatches=3)},
            r"has 3 micro-batches, and chunks is 4",
        ),
        (
            {"schedule": "dualpipe_v", "chunks": 3},
            "dualpipe_v on 2 lanes needs 4 micro-batches or more, not 3",
        ),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        compiled(**options)
