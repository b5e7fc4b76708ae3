"""How long a pipeline takes on several devices, in virtual time (``clocks.py``).

A stage's forward takes one second for a row, and its backward two. A micro-batch is a single row,
so that with copies that take no time the ideal of gpipe and 1F1B is (micro-batches + stages - 1) x
3 s.
"""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.schedule import Edge, Link, Links, StageCost, named, simulate
from passes.cost.timer import DeviceTimer
from tests.accelerator.clocks import Speed, begin, makespan, virtual_time

WIDTH = 128  # of a row, which is then 512 bytes
CHUNKS = 8


class Work(torch.autograd.Function):
    """Needs its result in the backward, as most functions need something."""

    @staticmethod
    def forward(ctx, x):
        done = torch.ops.sim.work(x, 1.0)
        ctx.save_for_backward(done)
        return done

    @staticmethod
    def backward(ctx, grad):
        assert ctx.saved_tensors
        return torch.ops.sim.work(grad, 2.0)


class Stage(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x, mask=None):
        y = Work.apply(x + self.weight)
        return y if mask is None else y * mask


class Product(nn.Linear):
    """A stage whose gradients of input and weight can be had apart. For a row each of its three
    products takes one second on a device that does ``PER_SECOND`` operations a second."""

    PER_SECOND = 2 * WIDTH * WIDTH

    def __init__(self, width):
        super().__init__(width, width, bias=False)

    def forward(self, x, mask=None):
        return super().forward(x)


class Chain(nn.Module):
    """Stages one after the other; with a mask, all of them take it."""

    def __init__(self, stages, width=WIDTH, kind=Stage):
        super().__init__()
        self.stages = nn.ModuleList(kind(width) for _ in range(stages))

    def forward(self, x, mask=None):
        for stage in self.stages:
            x = stage(x, mask)
        return x


class Skipping(Chain):
    """The same, with a skip from the first stage to the last."""

    def forward(self, x):
        first, *others = self.stages
        x = skipped = first(x)
        for stage in others:
            x = stage(x)
        return x + skipped


def step_takes(
    schedule,
    lanes=4,
    where="sim:0",
    copy_s=0.0,
    masked=False,
    run="step",
    on=None,
    kind=Stage,
    net=Chain,
    **options,
):
    """The makespan of a training step, the second one: caches are then filled. Or of one that is
    measured, as the pipeline has measured it."""
    devices = [f"sim:{i}" for i in range(on or lanes)] * (lanes // (on or lanes))
    speed = Speed(
        flops_per_s=Product.PER_SECOND if kind is Product else 0.0,
        link_bytes_per_s=4 * WIDTH / copy_s if copy_s else 0.0,
    )
    inputs = (torch.randn(CHUNKS, WIDTH, device=where),)
    if masked:
        inputs += (torch.ones(CHUNKS, WIDTH, device=where),)
    target = torch.randn(CHUNKS, WIDTH, device=where if where == "cpu" else devices[-1])

    def loss_fn(output, target):
        return ((output - target) ** 2).sum()

    with (
        virtual_time(speed),
        fxpipe.compile(
            net(lanes, kind=kind),
            devices,
            chunks=CHUNKS,
            schedule=schedule,
            loss_fn=loss_fn,
            check=False,
            partition=[f"stages.{i}" for i in range(1, lanes)],
            **options,
        ) as pipe,
    ):
        if run == "measure":
            return pipe.measure(*inputs, target=target, rounds=1).makespan
        for _ in range(2):
            torch.accelerator.synchronize()
            begin(speed)
            if run == "step":
                pipe.step(*inputs, target=target)
            else:
                loss_fn(pipe(*inputs), target.to(devices[-1])).backward()
        return makespan()


@pytest.mark.covering(1)
@pytest.mark.parametrize("where", ["sim:0", "cpu"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_with_free_copies_a_step_takes_as_long_as_its_schedule(schedule, where):
    assert step_takes(schedule, where=where) == pytest.approx((CHUNKS + 4 - 1) * 3)


def test_on_two_lanes_too():
    assert step_takes("1f1b", lanes=2) == pytest.approx((CHUNKS + 2 - 1) * 3)


def test_a_mask_that_all_stages_take_does_not_queue_behind_the_first_stage():
    assert step_takes("1f1b", masked=True) == pytest.approx((CHUNKS + 4 - 1) * 3)


def test_copies_that_take_time_are_hidden_but_where_the_pipeline_fills_and_drains():
    # Three links are crossed on the way in, and three on the way back; a copy from the host more.
    fill_and_drain = 6 * 0.2
    for where, first in (("sim:0", 0.0), ("cpu", 0.2)):
        took = step_takes("gpipe", where=where, copy_s=0.2)
        assert took == pytest.approx((CHUNKS + 4 - 1) * 3 + fill_and_drain + first)


@pytest.mark.parametrize("run", ["step", "backward"])
def test_a_skip_and_its_gradient_travel_beside_what_is_computed(run):
    plain, skipping = (
        step_takes("gpipe", run=run, copy_s=0.9, net=net) for net in (Chain, Skipping)
    )
    assert skipping == pytest.approx(plain)


def test_a_backward_of_ones_own_takes_as_long_as_gpipe():
    assert step_takes("gpipe", run="backward") == pytest.approx((CHUNKS + 4 - 1) * 3)


@pytest.mark.parametrize("run", ["step", "backward"])
def test_a_stage_is_run_again_while_its_gradient_is_on_its_way(run):
    took = step_takes("gpipe", run=run, checkpoint="always")
    forwards, on_the_last_device, others = CHUNKS + 4 - 1, CHUNKS * (1 + 2), 3 * 2
    assert took == pytest.approx(forwards + on_the_last_device + others)


def test_lanes_are_measured_without_being_held_up(monkeypatch):
    synchronize, waited = torch.accelerator.synchronize, []

    def noted(*args):
        waited.append(threading.current_thread().name)
        synchronize(*args)

    monkeypatch.setattr(torch.accelerator, "synchronize", noted)
    assert step_takes("1f1b", run="measure") == pytest.approx((CHUNKS + 4 - 1) * 3, rel=1e-3)
    step_takes("1f1b", run="measure", on=2)
    assert not [name for name in waited if name.startswith("fxpipe-lane")]


def test_lanes_that_share_a_device_take_turns_there_and_leave_it_no_gap():
    assert step_takes("1f1b", lanes=2, on=1) == pytest.approx(CHUNKS * 2 * 3)


@pytest.mark.covering(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("copy_s", [0.0, 0.2])
def test_backwards_in_halves_take_as_long_as_the_simulator_says(schedule, copy_s):
    links = Links([Edge(i, i + 1, 1.0, 1.0) for i in range(3)], Link(copy_s))
    order = named(schedule, lanes=4, microbatches=CHUNKS)
    costs = [StageCost(1.0, 0.0, 1.0)] + [StageCost(1.0, 1.0, 1.0)] * 3  # no gradient of the batch
    ideal = simulate(order, costs, links).makespan
    took = step_takes(schedule, copy_s=copy_s, kind=Product)
    assert took == pytest.approx(ideal)


# ------------------------------------------------------------------------------ measured nodes


def twenty_kernels_take(speed, monkeypatch):
    """The seconds of a call that launches twenty kernels: the first time, when its launches are not
    known yet, and the second time."""
    monkeypatch.setattr("passes.cost.timer.time", Host)
    with virtual_time(speed):
        timer, x = DeviceTimer(torch.device("sim:0")), torch.zeros(1, device="sim:0")
        calls = [timer.time("key", lambda: [x.add(1) for _ in range(20)]) for _ in range(2)]
    return [seconds for _, seconds in calls]


def test_a_node_is_measured_by_the_device_however_long_the_host_takes_to_launch_it(monkeypatch):
    """The host takes ten times as long to launch one of twenty kernels as the device to run it. A
    product of the filler takes as long as 336 kernels."""
    speed = Speed(flops_per_s=1e11, kernel_s=1e-6, launch_s=1e-5)
    with_launches, seconds = twenty_kernels_take(speed, monkeypatch)
    assert with_launches == pytest.approx(20e-5, rel=0.1)
    assert seconds == pytest.approx(20e-6, rel=0.1)


@pytest.mark.parametrize("launch_s", [1e-5, 1e-4])
def test_the_filler_is_timed_by_the_device_however_long_the_host_takes(monkeypatch, launch_s):
    """A product of the smallest size takes the device 3 µs, and the host longer to launch."""
    speed = Speed(flops_per_s=1e13, kernel_s=1e-7, launch_s=launch_s)
    _, seconds = twenty_kernels_take(speed, monkeypatch)
    assert seconds == pytest.approx(20e-7, rel=0.1)


def test_a_node_for_which_the_host_waits_does_not_keep_the_device_busy_ever_longer(monkeypatch):
    """The host waits for the other work, too, which must not count as a time to launch."""
    speed = Speed(flops_per_s=1e11, kernel_s=1e-6, launch_s=1e-5)
    monkeypatch.setattr("passes.cost.timer.time", Host)
    with virtual_time(speed):
        timer, x = DeviceTimer(torch.device("sim:0")), torch.zeros(1, device="sim:0")
        ends = []
        for _ in range(8):
            timer.time("key", lambda: [x.add(1).item() for _ in range(100)])
            ends.append(Host.perf_counter())
    taken = [end - begin for begin, end in pairwise(ends)]
    assert taken[-1] == pytest.approx(taken[0], rel=0.1)


def test_a_device_that_computes_within_the_launch_is_given_no_other_work_to_do_first(monkeypatch):
    timer, x = DeviceTimer(torch.device("sim:0")), torch.zeros(1, device="sim:0")
    timer.time("key", lambda: x.add(1))
    monkeypatch.setattr("torch.mm", lambda *_: pytest.fail("a product is launched"))
    timer.time("key", lambda: x.add(1))


class Host:
    """The clock of this thread in virtual time, in place of that of the machine."""

    @staticmethod
    def perf_counter():
        return torch.ops.sim.host_gives()[0]
