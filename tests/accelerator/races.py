"""The simulated accelerator's detector reports each kind of race, and nothing that is no race."""

from __future__ import annotations

import threading

import pytest
import torch

from fxpipe.runtime import lanes
from tests.accelerator import sim

HERE = torch.device("sim:0")


def found() -> list[str]:
    """What has been found so far, which the test then knows about."""
    races = sim.races()
    sim.clear()
    return races


def other(device="sim:0"):
    return torch.Stream(torch.device(device))


def test_a_stream_does_one_thing_after_the_other():
    x = torch.ones(4, device=HERE)
    with other():
        y = torch.ones(4, device=HERE) * 2
        y += 1
    del x, y


def test_a_read_without_a_wait_is_found_with_both_its_ends():
    x = torch.ones(4, device=HERE) * 2
    stream = other()
    with stream:
        x + 1
    (race,) = found()
    assert race.startswith("aten::add.Tensor\n  on sim:0 stream")
    assert "reads 16 bytes that sim:0 stream 0 may still write" in race
    assert "aten::mul.Tensor" in race
    assert f"{__file__}:" in race and "test_a_read_without_a_wait_is_found" in race


def test_with_stacks_kept_the_other_end_says_where_it_was_called():
    def written():
        return torch.ones(4, device=HERE) * 2

    sim.keep_stacks(True)
    try:
        x = written()
        with other():
            x + 1
    finally:
        sim.keep_stacks(False)
    (race,) = found()
    assert "in written" in race.split("aten::mul.Tensor")[1]


@pytest.mark.parametrize("way", ["stream", "event", "event.wait"])
def test_a_read_after_a_wait_is_right(way):
    x = torch.ones(4, device=HERE)
    before = torch.accelerator.current_stream(HERE)
    stream = other()
    if way == "stream":
        stream.wait_stream(before)
    elif way == "event":
        stream.wait_event(before.record_event())
    else:
        event = torch.Event(HERE)
        event.record(before)
        event.wait(stream)
    with stream:
        x + 1


def test_a_wait_counts_for_what_was_there_when_the_event_was_recorded():
    x = torch.ones(4, device=HERE)
    event = torch.accelerator.current_stream(HERE).record_event()
    x += 1
    stream = other()
    stream.wait_event(event)
    with stream:
        x + 1
    (race,) = found()
    assert "aten::add_" in race


def test_waits_are_handed_on():
    x = torch.ones(4, device=HERE)
    first, second = other(), other()
    first.wait_stream(torch.accelerator.current_stream(HERE))
    second.wait_stream(first)
    with second:
        x + 1


def test_a_write_while_another_stream_reads_is_found_and_two_reads_are_right():
    x = torch.ones(4, device=HERE)
    stream = other()
    stream.wait_stream(torch.accelerator.current_stream(HERE))
    with stream:
        x + 1
    x + 1
    assert not sim.races()
    x.zero_()
    (race,) = found()
    assert race.startswith("aten::zero_") and "writes 16 bytes" in race and "may still read" in race


def test_a_view_is_no_access_and_its_memory_is_that_of_its_base():
    x = torch.ones(4, 4, device=HERE)
    with other():
        view = x.t()[1:]
        assert not sim.races()
        view.add_(1)
    (race,) = found()
    assert "writes 64 bytes" in race


def test_what_a_batch_norm_writes_to_is_written_when_it_trains():
    norm = torch.nn.BatchNorm1d(4, affine=False).to(HERE)
    norm.num_batches_tracked = None
    stream = other()
    stream.wait_stream(torch.accelerator.current_stream(HERE))
    with stream:
        norm.eval()(torch.ones(8, 4, device=HERE))
    norm(torch.ones(8, 4, device=HERE))
    assert not sim.races(), "both read"
    norm.train()(torch.ones(8, 4, device=HERE))
    statistics = found()
    assert len(statistics) == 2 and all("writes 16 bytes" in each for each in statistics)
    assert all(each.startswith("aten::native_batch_norm") for each in statistics)


# ------------------------------------------------------------------------------------- memory


def test_memory_that_another_stream_reads_is_given_away_without_record_stream():
    x = torch.ones(4, device=HERE)
    stream = other()
    stream.wait_stream(torch.accelerator.current_stream(HERE))
    with stream:
        x + 1
    del x
    assert not sim.races()
    torch.zeros(4, device=HERE)  # which may have got the memory of x
    (race,) = found()
    assert "writes" in race and "without record_stream" in race


def test_with_record_stream_it_is_not():
    x = torch.ones(4, device=HERE)
    stream = other()
    stream.wait_stream(torch.accelerator.current_stream(HERE))
    with stream:
        x + 1
    x.record_stream(stream)
    del x
    torch.zeros(4, device=HERE)


def test_record_stream_is_for_the_one_that_it_names():
    x = torch.ones(4, device=HERE)
    stream = other()
    stream.wait_stream(torch.accelerator.current_stream(HERE))
    with stream:
        x + 1
    x.record_stream(other())
    del x
    torch.zeros(4, device=HERE)
    assert len(found()) == 1


def test_memory_may_be_given_away_when_its_stream_has_waited():
    x = torch.ones(4, device=HERE)
    before = torch.accelerator.current_stream(HERE)
    stream = other()
    stream.wait_stream(before)
    with stream:
        x + 1
    del x
    before.wait_stream(stream)
    torch.zeros(4, device=HERE)


# ------------------------------------------------------------------------------------- copies


def test_a_copy_between_devices_is_waited_for_on_both_sides():
    x = torch.ones(4, device="sim:0")
    y = x.to("sim:1", non_blocking=True)
    x.zero_()
    assert (y + 1).tolist() == [2.0] * 4


def test_a_copy_read_too_early_is_found():
    x = torch.ones(4, device="sim:0")
    near, far = other("sim:0"), other("sim:1")
    near.wait_stream(torch.accelerator.current_stream("sim:0"))
    with near, far:
        y = x.to("sim:1", non_blocking=True)
    x.record_stream(near)
    y + 1
    (race,) = found()
    assert "aten::copy_ from sim:0 to sim:1" in race
    y.record_stream(torch.accelerator.current_stream("sim:1"))


def test_a_source_that_is_written_to_too_early_is_found():
    x = torch.ones(4, device="sim:0")
    near = other("sim:0")
    near.wait_stream(torch.accelerator.current_stream("sim:0"))
    with near:
        x.to("sim:1", non_blocking=True)
    x.zero_()
    (race,) = found()
    assert "may still read" in race


def test_on_the_host_there_is_nonsense_before_it_has_waited():
    x = torch.arange(4, device=HERE)
    y = torch.ones(4, device=HERE)
    on_host, other_on_host = x.to("cpu", non_blocking=True), y.to("cpu", non_blocking=True)
    assert on_host.tolist() != [0, 1, 2, 3] and other_on_host.isnan().all()
    on_host.to(HERE)
    (race,) = found()
    assert "nobody has waited for it" in race
    torch.accelerator.synchronize(HERE)
    assert on_host.tolist() == [0, 1, 2, 3] and other_on_host.tolist() == [1.0] * 4
    assert x.cpu().tolist() == [0, 1, 2, 3]


def there_and_back(waits):
    """Copy a tensor to the host on one stream, and back on another one, which ``waits`` for it."""
    x = torch.arange(4.0, device=HERE)
    on_host = torch.empty(4, pin_memory=True)
    on_host.copy_(x, non_blocking=True)
    copied = torch.accelerator.current_stream(HERE).record_event()
    back = torch.Stream(HERE)
    if waits:
        back.wait_event(copied)
    with back:
        y = on_host.to(HERE, non_blocking=True)
    torch.accelerator.synchronize(HERE)
    return y.cpu()


def test_what_comes_to_the_host_may_go_back_by_a_stream_that_waits_for_it():
    assert there_and_back(waits=True).tolist() == [0, 1, 2, 3]


def test_what_comes_to_the_host_may_not_go_back_by_a_stream_that_does_not_wait():
    there_and_back(waits=False)
    race, *_ = found()
    assert "nobody has waited for it" in race


def test_pinned_memory_that_is_overwritten_too_early_is_found():
    x = torch.ones(4).pin_memory()
    assert x.is_pinned() and x[2:].is_pinned() and not torch.ones(4).is_pinned()
    x.to(HERE, non_blocking=True)
    x.zero_()
    (race,) = found()
    assert "aten::copy_ from cpu to sim:0" in race and "reads pinned memory" in race


def test_pinned_memory_may_be_overwritten_when_the_host_has_waited():
    x, y, pageable = torch.ones(4).pin_memory(), torch.ones(4).pin_memory(), torch.ones(4)
    x.to(HERE, non_blocking=True)
    torch.accelerator.current_stream(HERE).synchronize()
    x.zero_()
    y.to(HERE)
    y.zero_()
    pageable.to(HERE, non_blocking=True)
    pageable.zero_()


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: torch.equal(x, x),
        lambda x: torch.accelerator.synchronize(HERE),
        lambda x: torch.accelerator.current_stream(HERE).synchronize(),
        lambda x: torch.accelerator.current_stream(HERE).record_event().synchronize(),
    ],
)
def test_after_the_host_has_waited_everybody_has(wait):
    x = torch.ones(4, device=HERE)
    wait(x)
    with other():
        x + 1


def test_the_host_of_one_stream_has_not_waited_for_another():
    x = torch.ones(4, device=HERE)
    stream = other()
    stream.synchronize()
    with stream:
        x + 1
    assert len(found()) == 1


def test_that_the_host_waits_can_be_refused():
    x = torch.ones(4, device=HERE)
    with sim.no_waits():
        for wait in (lambda: (x + 1).tolist(), x.nonzero, lambda: torch.equal(x, x), x.cpu):
            with pytest.raises(RuntimeError, match="synchronizing operation"):
                wait()
        y = x.to("cpu", non_blocking=True)
        torch.accelerator.current_stream(HERE).record_event().synchronize()
    assert y.tolist() == [1.0] * 4


# ------------------------------------------------------------------------------------- threads


def waits_elsewhere():
    """A thread of the host that waits for the device. By now it has, but nobody has heard of it."""
    has_waited = threading.Semaphore(0)

    def wait():
        torch.accelerator.synchronize(HERE)
        has_waited.release()

    thread = threading.Thread(target=wait)
    thread.start()
    has_waited.acquire()
    return thread


def test_what_one_thread_has_waited_for_is_not_known_to_another():
    x = torch.ones(4, device=HERE)
    thread = waits_elsewhere()
    with other():
        x + 1
    assert len(found()) == 1
    thread.join()


def test_a_thread_that_is_joined_hands_over_what_it_has_waited_for():
    x = torch.ones(4, device=HERE)
    waits_elsewhere().join()
    with other():
        x + 1


@pytest.mark.parametrize("wait", [True, False])
def test_a_queue_of_lanes_hands_over_what_its_sender_has_waited_for(wait):
    x = torch.ones(4, device=HERE)
    queue = lanes.SimpleQueue()
    answers = lanes.SimpleQueue()

    def use():
        queue.get()
        with other():
            answers.put(x + 1)

    thread = threading.Thread(target=use)
    thread.start()
    if wait:
        torch.accelerator.synchronize(HERE)
    queue.put(None)
    answers.get()
    assert len(found()) == (0 if wait else 1)
    thread.join()


@pytest.mark.parametrize("wait", [True, False])
def test_the_engine_knows_what_the_caller_of_a_backward_has_waited_for(wait):
    x = torch.ones(4, device=HERE, requires_grad=True)
    stream = other()
    stream.wait_stream(torch.accelerator.current_stream(HERE))
    with stream:
        y = x * 2
        z, gradient = y * 1, torch.ones(4, device=HERE)
    late = torch.full((4,), 3.0, device=HERE)
    y.register_hook(lambda gradient: gradient + late)  # on the other stream
    if wait:
        torch.accelerator.synchronize(HERE)
    with stream:
        (gradient,) = torch.autograd.grad(z, x, gradient)
        assert gradient.tolist() == [8.0] * 4
    assert len(found()) == (0 if wait else 1)


def test_current_streams_are_those_of_a_thread():
    stream = other()
    here = []
    with stream:
        thread = threading.Thread(
            target=lambda: here.append(torch.accelerator.current_stream(HERE))
        )
        thread.start()
        thread.join()
        assert torch.accelerator.current_stream(HERE) == stream
    assert here[0].stream_id == 0


def test_autograd_runs_on_the_streams_of_the_forward():
    x = torch.ones(4, device=HERE, requires_grad=True)
    stream = other()
    stream.wait_stream(torch.accelerator.current_stream(HERE))
    with stream:
        y = (x * 2).sum()
    where = []
    y.grad_fn.register_prehook(lambda _: where.append(torch.accelerator.current_stream(HERE)))
    with stream:
        y.backward()
    assert where == [stream]
    torch.accelerator.current_stream(HERE).wait_stream(stream)
    assert x.grad.tolist() == [2.0] * 4


def test_each_device_has_a_thread_of_the_autograd_engine():
    threads = {}
    for name in "sim:0", "sim:1":
        x = torch.ones(1, device=name, requires_grad=True)
        y = x * 2
        y.grad_fn.register_hook(lambda *_, name=name: threads.update({name: threading.get_ident()}))
        y.backward()
    assert len({threading.get_ident(), *threads.values()}) == 3


@pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"),
    reason="this PyTorch does not warn",
)
def test_pytorch_warns_of_a_gradient_that_is_made_on_another_stream_than_it_is_accumulated_on():
    """The plugin makes an error of this warning, in the tests of pipelines as well."""
    weight = torch.ones(2, device=HERE, requires_grad=True)
    with other():
        kept = weight * 1  # and with it the node that accumulates, which belongs to this stream
    with pytest.raises(UserWarning, match="The AccumulateGrad node's stream does not match"):
        (weight * 2).sum().backward()
    del kept
    assert found()  # the weight was made on the stream of this thread
