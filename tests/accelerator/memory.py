"""How much memory of a device is needed, as its caching allocator counts it (``sim/memory.h``)."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import nn

import fxpipe
from tests.accelerator.clocks import Speed, begin, virtual_time
from tests.accelerator.times import Chain
from tests.benchmarks.virtual import VALUE, memory_of

HERE = torch.device("sim:0")
MIB = 2**20


def memory(what, device=HERE):
    """Bytes of a device that are ``allocated``, ``active`` (with what is not yet free again) or
    ``reserved``: now, and at the most."""
    statistics = torch.accelerator.memory_stats(device)
    return tuple(statistics[f"{what}_bytes.all.{when}"] for when in ("current", "peak"))


@pytest.fixture(autouse=True)
def empty():
    """Nothing is cached when a test begins."""
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(HERE)


def large(mib=12, stream=None):
    with stream or torch.accelerator.current_stream(HERE):
        return torch.empty(mib * MIB, dtype=torch.uint8, device=HERE)


def busy(stream, seconds):
    with stream:
        torch.ops.sim.work(torch.empty(1, device=HERE), seconds)


def test_what_is_freed_is_kept_and_given_out_again_on_its_stream():
    before = memory("reserved")[0]
    first = large()
    address = first.data_ptr()
    assert address and memory("reserved")[0] == before + 12 * MIB
    del first
    second = large()
    assert memory("reserved")[0] == before + 12 * MIB
    other = large(stream=torch.Stream(HERE))
    assert memory("reserved")[0] == before + 24 * MIB, "each stream has memory of its own"
    del second, other
    torch.accelerator.empty_cache()
    assert memory("reserved")[0] == before


def test_a_piece_is_split_and_joined_again():
    before = memory("reserved")[0]
    whole = large(40)
    del whole
    parts = [large(10) for _ in range(4)]
    assert memory("reserved")[0] == before + 40 * MIB
    del parts
    again = large(40)
    assert memory("reserved")[0] == before + 40 * MIB
    del again
    torch.accelerator.empty_cache()
    assert memory("reserved")[0] == before


def test_small_tensors_share_a_segment():
    before = memory("reserved")[0]
    few = [torch.empty(1, device=HERE) for _ in range(100)]
    assert memory("reserved")[0] - before in (0, 2 * MIB)
    del few


def test_what_another_stream_uses_is_free_when_that_stream_is_done():
    with virtual_time(Speed()):
        stream = torch.Stream(HERE)
        busy(stream, 5.0)
        tensor = large()
        tensor.record_stream(stream)
        before = memory("reserved")[0]
        del tensor
        assert memory("active")[0] - memory("allocated")[0] == 12 * MIB
        second = large()
        assert memory("reserved")[0] == before + 12 * MIB, "the first one's memory is in use"
        stream.synchronize()
        third = large()
        assert memory("reserved")[0] == before + 12 * MIB
        assert memory("active") == memory("allocated")
        del second, third


def test_what_another_stream_uses_is_free_at_once_if_its_own_stream_has_waited():
    with virtual_time(Speed()):
        stream = torch.Stream(HERE)
        busy(stream, 5.0)
        tensor = large()
        torch.accelerator.current_stream(HERE).wait_event(stream.record_event())
        before = memory("reserved")[0]
        del tensor
        second = large()
        assert memory("reserved")[0] == before
        del second


@pytest.mark.parametrize(("waits", "most"), [((2.0, 0.0), 12), ((0.5, 0.0), 24)])
def test_the_most_that_is_allocated_is_that_of_virtual_time(waits, most):
    """Each of two threads has a tensor for a second, and it does not matter that the first one of
    them, whose tensor comes later, is done before the other one begins."""
    done = threading.Event()  # it hands nothing over

    def first():
        have_a_tensor(waits[0])
        done.set()

    def second():
        done.wait()
        have_a_tensor(waits[1])

    with virtual_time(Speed()):
        before = memory("allocated")[0]
        torch.accelerator.reset_peak_memory_stats(HERE)
        threads = [threading.Thread(target=first), threading.Thread(target=second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert memory("allocated")[1] - before == pytest.approx(most * MIB, abs=MIB / 8)


def have_a_tensor(wait):
    """A thread waits for so many seconds, and then has a tensor for one second."""
    stream = torch.Stream(HERE)
    busy(stream, wait)
    stream.synchronize()
    tensor = large()
    busy(stream, 1.0)
    stream.synchronize()
    del tensor


# ---------------------------------------------------------------------------------- pipelines

LANES = 4
ROW = 2**18  # numbers: a micro-batch of one row is a MiB


def needed(chunks, run, checkpoint="never"):
    """The peaks of what is active on each device, in MiB, beyond what is there before ``run``."""
    devices = [f"sim:{i}" for i in range(LANES)]
    speed = Speed(link_bytes_per_s=10 * 4 * ROW)  # a copy takes a tenth of a forward
    x, target = torch.randn(chunks, ROW), torch.randn(chunks, ROW, device=devices[-1])
    with (
        virtual_time(speed),
        fxpipe.compile(
            Chain(LANES, ROW),
            devices,
            chunks=chunks,
            schedule="1f1b",
            checkpoint=checkpoint,
            loss_fn=lambda output, target: ((output - target) ** 2).sum(),
            check=False,
            partition=[f"stages.{i}" for i in range(1, LANES)],
        ) as pipe,
    ):
        run(pipe, x, target)
        for device in devices:
            torch.accelerator.synchronize(device)
        begin(speed)
        for device in devices:
            torch.accelerator.reset_peak_memory_stats(device)
        before = [memory("active", device)[0] for device in devices]
        run(pipe, x, target)
        after = [memory("active", device)[1] for device in devices]
    return [(peak - start) / MIB for peak, start in zip(after, before, strict=True)]


def step(pipe, x, target):
    pipe.step(x, target=target)


def evaluate(pipe, x, target):
    """In one thread: what a lane frees may otherwise be another one's, sooner or later."""
    with torch.no_grad():
        pipe.prepare(x)
        pipe.graph_module(x)


@pytest.mark.parametrize("run", [step, evaluate])
def test_memory_depends_on_the_schedule_and_not_on_how_many_micro_batches_there_are(run):
    peaks = {chunks: needed(chunks, run) for chunks in (8, 16)}
    if run is evaluate:  # all outputs are there at the end
        peaks = {chunks: each[:-1] for chunks, each in peaks.items()}
    # A lane may free a value, which another lane has made, somewhat sooner or later.
    assert peaks[16] == pytest.approx(peaks[8], abs=2.0)
    assert max(peaks[8]) <= 4 * LANES, "a few at a time"


def backward(pipe, x, target):
    pipe(x).sum().backward()
    pipe.zero_grad()


def test_gradients_that_are_on_their_way_do_not_become_more_with_the_micro_batches():
    """A checkpointed micro-batch keeps the input of each stage until its backward. If the host ran
    ahead in the backward, the gradients of all of them would be there at once, too."""
    chunks = 32
    *peaks, _ = needed(chunks, backward, "always")  # the last device has all outputs
    assert max(peaks) < 2 * chunks, "MiB: an input of each, and a few gradients"


@pytest.mark.covering(1)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zbv"])
def test_a_step_needs_what_its_timeline_says(schedule, checkpoint):
    """Results that wait, gradients and what the loss needs included: by one value, of 11 to 82."""
    check_memory(schedule, checkpoint, lanes=4, within=1.1 * VALUE)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("checkpoint", ["always 1/4", "always 1/2", "always 3/4"])
def test_a_step_that_is_run_again_in_part_needs_what_its_timeline_says(checkpoint):
    """Of 4 to 10 MiB."""
    check_memory("gpipe", checkpoint, lanes=2, within=VALUE)


def check_memory(schedule, checkpoint, lanes, within):
    """Each device allocates as much as is predicted for it."""
    found = memory_of(schedule, checkpoint, lanes)
    predicted, allocated = [row[0] for row in found], [row[1] for row in found]
    assert allocated == pytest.approx(predicted, abs=within)


def test_what_is_remembered_of_a_call_takes_no_memory_of_its_device():
    """Two rows of it, a MiB each, beside the weight of the first stage, which is one as well."""
    before = memory("allocated")[0]
    model = nn.Sequential(nn.Linear(ROW, 1), nn.Linear(1, 1)).to(HERE)
    with fxpipe.compile(model, ["sim:0", "sim:1"], chunks=4, partition=["1"]) as pipe:
        pipe(torch.randn(4, ROW))
        gc.collect()
        assert memory("allocated")[0] - before == pytest.approx(MIB, abs=MIB / 8)


def of_a_call(width):
    """For each device, the bytes that a call is predicted to need, and those that it has needed,
    of a pipeline that only computes outputs. Its input comes from the host."""
    gc.collect()  # an earlier pipeline
    devices = ["sim:0", "sim:1"]
    layers = [nn.Linear(width, 256), *(nn.Linear(256, 256) for _ in range(3))]
    options = {"chunks": 4, "partition": ["2"], "costs": "analytic", "training": False}
    with (
        virtual_time(Speed()),
        torch.no_grad(),
        fxpipe.compile(nn.Sequential(*layers), devices, **options) as pipe,
    ):
        for _ in range(2):
            for device in devices:
                torch.accelerator.synchronize(device)
                torch.accelerator.reset_peak_memory_stats(device)
            pipe(torch.randn(1024, width))
        return pipe.timeline().peak_memory, [memory("allocated", each)[1] for each in devices]


@pytest.mark.parametrize("width", [256, 4096])
def test_a_call_without_training_needs_what_its_timeline_says(width):
    """Of the input, one micro-batch at a time."""
    value = 1024 // 4 * 256 * 4
    predicted, allocated = of_a_call(width)
    assert allocated == pytest.approx(predicted, abs=1.5 * value)
