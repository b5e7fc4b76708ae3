"""A tied weight is brought to other devices once unless keeping its users together costs less."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import DeviceSpec
from fxpipe.schedule import live
from passes.common.skips import Hop
from tests.benchmarks.memory import Held
from tests.fxpipe.planning.plans import FREE_LINKS


class TiedChain(nn.Sequential):
    """Six layers that hold much, of which two, 1 and 3, have the same weight."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(128, 128, bias=False) for _ in range(6)))
        self[3].weight = self[1].weight


WEIGHT = 128 * 128 * 4


def tied(devices=(FREE_LINKS,) * 2, **options):
    costs = {str(i): 1.0 for i in range(6)}
    x = torch.zeros(8, 128)
    return fxpipe.plan(TiedChain(), devices, example_inputs=(x,), chunks=4, costs=costs, **options)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_tied_weight_and_its_gradient_are_on_the_other_device_once(checkpoint):
    apart = tied(partition=["3"], checkpoint=checkpoint)
    own, brought = 4 * WEIGHT, 2 * WEIGHT  # with gradients; what is one's own has Adam's two states
    assert [stage.state_bytes for stage in apart.stages] == [3 * own, 2 * own + brought]
    assert apart.layout.brought == (Hop("1.weight", 0, 1, WEIGHT, once=True),)
    assert [t.bytes for t in apart.timeline.transfers if t.action is None] == [WEIGHT, WEIGHT]
    with fxpipe.compile(
        TiedChain(), ["cpu", "cpu:0"], chunks=4, partition=apart.partition, checkpoint=checkpoint
    ) as pipe:
        pipe.prepare(torch.zeros(8, 128))
        assert pipe.skip_layout == apart.layout
        assert [s.cost.fixed_bytes for s in pipe.stages] == [s.state_bytes for s in apart.stages]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_step_holds_what_the_plan_says(schedule):
    x = torch.randn(8, 128)
    plan = tied(partition=["3"], schedule=schedule)
    with fxpipe.compile(
        TiedChain(),
        ["cpu", "cpu:0"],
        chunks=4,
        partition=plan.partition,
        schedule=schedule,
        loss_fn=lambda output, target: output.square().mean(),
        example_inputs=(x,),
    ) as pipe:
        held = Held(pipe)
        for stage in pipe.stages:
            held.watch(stage)
        pipe.step(x)
    first, second = (stage.activation_bytes for stage in plan.stages)
    assert held.most[1] == second + WEIGHT, "the replica, once for all micro-batches"
    alive = live(plan.schedule).stages[0] / 4
    assert held.most[0] == first + (1 - alive) * x.nbytes, "its inputs are views of one memory"


def test_a_tied_weight_is_not_brought_to_where_it_is():
    plan = tied(schedule="interleaved_1f1b", partition=["1", "2", "3"])
    assert [stage.lane for stage in plan.stages] == [0, 1, 0, 1]
    assert plan.stages[3].state_bytes == 2 * 4 * WEIGHT, "its own two"
    assert not plan.layout.brought


def test_a_tied_weight_stays_with_both_its_users_where_bringing_it_costs_more():
    assert tied().layout.brought, "three layers each, and the weight is brought"
    slow = DeviceSpec(link_bytes_per_s=WEIGHT / 3, link_latency_s=0.0)  # 3 s there, 3 s back
    assert not tied([slow] * 2).layout.brought, "four layers and two"


def test_a_tied_weight_stays_with_both_its_users_where_there_is_no_room_for_it_twice():
    apart = tied()
    assert apart.layout.brought
    short = FREE_LINKS.with_memory(apart.memory[1] - WEIGHT)
    plan = tied([FREE_LINKS, short])
    assert plan.fits
    assert not plan.layout.brought
