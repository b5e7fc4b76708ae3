from __future__ import annotations

import contextlib
import contextvars
import copy
import ctypes
import faulthandler
import gc
import os
import select
import signal
import threading
import time
import warnings
import weakref
from functools import partial
from typing import ClassVar

import pytest
import torch
import torch.fx
from torch import nn

import fxpipe
from fxpipe.runtime.ambient import is_intercepted
from fxpipe.runtime.lanes import JobQueue, cores, shared_out
from tests.zoo import MLP, gradients, loop, loss_of, same

calls: list[tuple[str, int]] = []
trouble: dict[str, object] = {}


def here(x, name):
    """Notes in which thread it runs; makes trouble if told to."""
    if not isinstance(x, torch._subclasses.FakeTensor):
        calls.append((name, threading.get_ident()))
        if (cause := trouble.get(name)) is not None:
            cause(x)
    return x


torch.fx.wrap("here")


class Watched(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return here(self.b(here(self.a(x), "a")), "b")


@pytest.fixture(autouse=True)
def no_trouble():
    calls.clear()
    trouble.clear()
    yield
    trouble.clear()


@pytest.fixture
def pipe(monkeypatch):
    monkeypatch.setattr("fxpipe.runtime.lanes.cores", lambda: 2)  # where there is one only, too
    pipe = fxpipe.compile(
        Watched(),
        ["cpu", "cpu"],
        chunks=4,
        partition=["b"],
        example_inputs=(torch.randn(8, 4),),
    )
    calls.clear()
    yield pipe
    pipe.close()


@pytest.fixture
def lanes():
    """Gives the threads of lanes that have started in this test. (A pipeline of an earlier test may
    be in a cycle that the garbage collector has not yet found.)"""

    def are_there():
        return {t for t in threading.enumerate() if t.name.startswith("fxpipe-lane")}

    before = are_there()
    return lambda: are_there() - before


def test_each_stage_has_its_thread_and_keeps_it(pipe):
    for _ in range(3):
        pipe(torch.randn(8, 4))
    threads = {name: {thread for n, thread in calls if n == name} for name in "ab"}
    assert len(threads["a"]) == len(threads["b"]) == 1
    assert threads["a"] != threads["b"]
    assert threading.get_ident() not in threads["a"] | threads["b"]


def test_stages_run_at_the_same_time(pipe):
    # Both stages are in the middle of something at once: each waits for the other to be there.
    meeting = threading.Barrier(2, timeout=30)
    seen = {"a": 0, "b": 0}

    def meet(name):
        def run(x):
            seen[name] += 1
            if seen[name] == (2 if name == "a" else 1):  # a's second micro-batch beside b's first
                meeting.wait()

        return run

    trouble.update(a=meet("a"), b=meet("b"))
    pipe(torch.randn(8, 4))
    assert seen == {"a": 4, "b": 4}


def test_lanes_on_the_cpu_share_as_many_threads_as_there_are_cores():
    cpu, other = torch.device("cpu"), torch.device("meta")
    assert shared_out([cpu] * 3, 4) == [(0,), (1,), (2,)]
    assert shared_out([cpu] * 5, 2) == [(0, 2, 4), (1, 3)]
    assert shared_out([other, cpu, cpu, other, cpu], 2) == [(0,), (1, 4), (2,), (3,)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_a_thread_runs_another_of_its_lanes_while_one_waits(monkeypatch, lanes, threads, schedule):
    model, x = MLP(depth=4), torch.randn(8, 12)

    def trained(cores):
        monkeypatch.setattr("fxpipe.runtime.lanes.cores", lambda: cores)
        model.zero_grad()
        with fxpipe.compile(
            model, ["cpu"] * 4, chunks=4, schedule=schedule, loss_fn=lambda y, _: y.square().mean()
        ) as pipe:
            found = [pipe.step(x), gradients(model)]
            model.zero_grad()
            loss_of(output := pipe(x)).backward()
            assert len(lanes()) == cores
            return *found, output.detach(), gradients(model)

    expected = loop(copy.deepcopy(model), (x,), chunks=4)
    alone = trained(cores=4)
    assert same(alone[2:], expected)
    assert same(trained(cores=threads), alone)


@pytest.mark.parametrize("stage", ["a", "b"])
def test_an_error_in_one_lane_ends_those_that_share_its_thread(monkeypatch, pipe, stage):
    monkeypatch.setattr("fxpipe.runtime.lanes.cores", lambda: 1)
    x = torch.randn(8, 4)
    trouble[stage] = fail
    with pytest.raises(FloatingPointError, match="no such luck") as caught:
        pipe(x)
    assert f"stage {'ab'.index(stage)}, micro-batch 0" in caught.value.__notes__[0]
    trouble.clear()
    calls.clear()
    pipe(x)
    assert len({thread for _, thread in calls}) == 1


def end_of_an_iterator(x):
    next(iter(()))


@pytest.mark.parametrize("stage", ["a", "b"])
def test_a_stop_iteration_of_the_model_reaches_the_caller_as_it_is(pipe, stage):
    trouble[stage] = end_of_an_iterator
    with pytest.raises(StopIteration) as caught:
        pipe(torch.randn(8, 4))
    (note,) = caught.value.__notes__
    assert f"stage {'ab'.index(stage)}, micro-batch 0" in note


def test_one_lane_or_one_micro_batch_runs_inline():
    x = torch.randn(8, 4)
    for devices, chunks in ((["cpu"], 4), (["cpu", "cpu"], 1)):
        with fxpipe.compile(Watched(), devices, chunks=chunks) as pipe:
            pipe(x)
            calls.clear()
            pipe(x)
    assert {thread for _, thread in calls} == {threading.get_ident()}


def test_grad_mode_autocast_and_default_dtype_of_the_caller_hold(pipe):
    seen = []

    def note(x):
        seen.append(
            (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
                torch.get_default_dtype(),
            )
        )

    trouble.update(a=note)
    x = torch.randn(8, 4)
    pipe(x)
    with torch.no_grad():
        pipe(x)
    with torch.inference_mode():
        pipe(x)
    torch.set_default_dtype(torch.float64)
    try:
        pipe(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert seen[::4] == [
        (True, False, None, torch.float32),
        (False, False, None, torch.float32),
        (False, True, None, torch.float32),
        (True, False, None, torch.float64),
    ]
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        pipe.prepare(x)  # under autocast, this is another model
        seen.clear()
        assert pipe(x).dtype == torch.bfloat16
    assert set(seen) == {(True, False, torch.bfloat16, torch.float32)}


@pytest.fixture
def default_device():
    """What ``torch.set_default_device`` has set is taken back."""
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("default_device")
def test_a_default_device_of_the_caller_holds_in_its_lanes(pipe):
    seen = []
    trouble.update(a=lambda x: seen.append((torch.get_default_device(), torch.empty(0).device)))
    x = torch.randn(8, 4)
    expected = pipe(x)
    for set_up in (torch.set_default_device, torch.device):
        seen.clear()
        calls.clear()
        with set_up("cpu") or contextlib.nullcontext():
            assert same(pipe(x), expected)
        threads = {name: {thread for n, thread in calls if n == name} for name in "ab"}
        assert threads["a"].isdisjoint(threads["b"]), "each stage is in its lane all the same"
        assert set(seen) == {(torch.device("cpu"),) * 2}
        torch.set_default_device(None)
    seen.clear()
    with torch.device("meta"):
        pipe(x)
    assert set(seen) == {(torch.device("meta"),) * 2}
    seen.clear()
    pipe(x)
    assert set(seen) == {(torch.device("cpu"),) * 2}, "and a lane does not keep it"


flavour = contextvars.ContextVar("flavour", default="none")


class Remembered(torch.autograd.Function):
    """Notes the context variable in the forward and in the backward."""

    seen: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx, x):
        if not isinstance(x, torch._subclasses.FakeTensor):
            Remembered.seen.append(f"forward {flavour.get()}")
            flavour.set(flavour.get() + "!")
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Remembered.seen.append(f"backward {flavour.get()}")
        return grad


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(Remembered.apply(self.a(x)))


def test_context_variables_of_the_caller_hold_in_its_lanes():
    """What a stage sets stays in its lane, and only until the run ends."""
    x = torch.randn(6, 4)
    with fxpipe.compile(
        Remembering(), ["cpu"] * 2, chunks=3, partition=["b"], loss_fn=lambda y, _: y.sum()
    ) as pipe:
        pipe.prepare(x)
        token = flavour.set("sweet")
        try:
            for _ in range(2):
                Remembered.seen.clear()
                pipe(x)
                assert Remembered.seen == ["forward sweet", "forward sweet!", "forward sweet!!"]
                assert flavour.get() == "sweet"
            for _ in range(2):  # the check of what a step means runs the model, too
                pipe.step(x)
            Remembered.seen.clear()
            pipe.step(x)
        finally:
            flavour.reset(token)
    assert Remembered.seen[:3] == ["forward sweet", "forward sweet!", "forward sweet!!"]
    assert Remembered.seen[3:] == ["backward sweet!!!"] * 3


def fail(x):
    raise FloatingPointError("no such luck")


@pytest.mark.parametrize("stage", ["a", "b"])
def test_an_exception_is_the_original_one_with_a_note(pipe, stage):
    x = torch.randn(8, 4)
    trouble[stage] = fail
    with pytest.raises(FloatingPointError, match="no such luck") as caught:
        pipe(x)
    (note,) = caught.value.__notes__
    number = "ab".index(stage)
    assert f"stage {number}, micro-batch 0, node 'here" in note
    assert "test_lanes.py" in note and "return here(self.b(here(self.a(x)" in note
    assert any(frame.name == "fail" for frame in caught.traceback)
    trouble.clear()
    expected = loop(pipe.module, (x,), 4)[0]
    assert same(pipe(x).detach(), expected), "the pipeline can be used again"


def test_inline_the_note_is_the_same():
    trouble["b"] = None
    pipe = fxpipe.compile(Watched(), ["cpu"], example_inputs=(torch.randn(2, 4),))
    trouble["b"] = fail
    with pytest.raises(FloatingPointError) as caught:
        pipe(torch.randn(2, 4))
    assert "stage 0, micro-batch 0, node 'here_1'" in caught.value.__notes__[0]


def test_a_late_failure_stops_all_lanes_at_once(pipe):
    # The third micro-batch fails in the last stage while the first stage is busy with the fourth.
    count = 0

    def third(x):
        nonlocal count
        count += 1
        if count == 3:
            raise ValueError("third")

    trouble.update(b=third, a=lambda x: time.sleep(0.01))
    with pytest.raises(ValueError, match="third"):
        pipe(torch.randn(8, 4))
    assert count == 3


def test_an_interrupt_of_the_caller_leaves_a_working_pipeline(pipe, monkeypatch):
    from fxpipe.runtime import microbatch

    x = torch.randn(8, 4)
    gather = microbatch.gather

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(microbatch, "gather", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pipe(x)
    monkeypatch.setattr(microbatch, "gather", gather)
    assert pipe(x).shape == (8, 4)


class Slow(torch.autograd.Function):
    """Its backward takes a while; the first one interrupts the main thread. Or it fails."""

    ran = 1
    fails = False

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        if Slow.fails:
            raise ArithmeticError("the backward")
        time.sleep(0.1)
        Slow.ran += 1
        if Slow.ran == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return grad


class Slowly(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(kept(Slow.apply(self.a(x))))


stored: list[weakref.ref[object]] = []


def kept(x):
    y = torch.exp(x)
    if not isinstance(x, torch._subclasses.FakeTensor):
        stored.append(weakref.ref(y.untyped_storage()))
    return y


torch.fx.wrap("kept")


@pytest.fixture
def interrupts():
    """An interrupt is raised, whoever may have let them be ignored in this process."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("stage", [0, 1])
def test_an_interrupt_while_only_lanes_are_at_work_stops_them_too(stage):
    with fxpipe.compile(
        Slowly(),
        ["cpu"] * 2,
        chunks=8,
        partition=["b" if stage == 0 else "slow"],
        loss_fn=lambda out, _: out.sum(),
        example_inputs=(torch.randn(8, 4),),
        tracer="symbolic",
    ) as pipe:
        Slow.ran = 0
        with pytest.raises(KeyboardInterrupt):
            pipe.step(torch.randn(8, 4))
        ran = Slow.ran
        assert ran < 8
        time.sleep(0.3)
        assert Slow.ran == ran, "nothing goes on behind the caller's back"
        pipe.step(torch.randn(8, 4))  # and the next one is whole
        assert Slow.ran == ran + 8


def test_what_a_failed_run_has_stored_is_free_once_its_exception_is_handled(monkeypatch):
    """Whoever is out of memory tries again with less; no garbage collector runs in between."""
    x = torch.randn(8, 4)
    with fxpipe.compile(
        Slowly(), ["cpu"] * 2, chunks=4, loss_fn=lambda out, _: out.sum(), tracer="symbolic"
    ) as pipe:
        pipe.prepare(x)
        monkeypatch.setattr(Slow, "fails", True)
        gc.collect()
        gc.disable()
        try:
            stored.clear()
            with contextlib.suppress(ArithmeticError):
                pipe.step(x)
            assert stored and not any(ref() for ref in stored)
        finally:
            gc.enable()


def test_no_thread_outlives_its_pipeline(lanes):
    pipe = fxpipe.compile(MLP(), ["cpu"] * 3, chunks=2)
    pipe(torch.randn(4, 12))
    assert len(lanes()) == min(3, cores())
    pipe.close()
    assert not lanes()
    with pytest.raises(RuntimeError, match="closed"):
        pipe(torch.randn(4, 12))

    pipe = fxpipe.compile(MLP(), ["cpu"] * 3, chunks=2)
    pipe(torch.randn(4, 12))
    del pipe
    gc.collect()
    assert not lanes()

    with fxpipe.compile(MLP(), ["cpu"] * 3, chunks=2) as pipe:
        pipe(torch.randn(4, 12))
    assert not lanes()


@pytest.mark.one_thread
def test_the_callers_number_of_threads_is_left_alone():
    torch.set_num_threads(2)
    seen = []
    trouble["a"] = lambda x: seen.append(torch.get_num_threads())
    with fxpipe.compile(Watched(), ["cpu", "cpu"], chunks=2, partition=["b"]) as pipe:
        pipe.prepare(torch.randn(4, 4))
        seen.clear()
        pipe(torch.randn(4, 4))
    assert set(seen) == {1}, "two threads, shared out over two lanes"
    assert torch.get_num_threads() == 2
    fresh = []
    thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert fresh == [2], "nor is the default of new threads changed"


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_two_threads_may_train_through_one_pipeline_at_once(checkpoint):
    model = MLP()
    parameters = list(model.parameters())
    inputs = [torch.randn(6, 12) for _ in range(2)]
    expected = [loop(model, (x,), 3) for x in inputs]
    found = {0: [], 1: []}
    with fxpipe.compile(
        model, ["cpu"] * 3, chunks=3, example_inputs=(inputs[0],), checkpoint=checkpoint
    ) as pipe:

        def work(i):
            for _ in range(10):
                output = pipe(inputs[i])
                found[i].append((output.detach(), torch.autograd.grad(loss_of(output), parameters)))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for i in range(2):
        assert len(found[i]) == 10
        for output, grads in found[i]:
            assert same(output, expected[i][0])
            assert same(list(grads), expected[i][1])


def test_whoever_watches_the_callers_operations_sees_them(pipe):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen += func is torch.ops.aten.addmm.default
            return func(*args, **(kwargs or {}))

    x = torch.randn(8, 4)
    with Watch() as watch:
        pipe(x)
    assert watch.seen == 8
    assert {thread for _, thread in calls} == {threading.get_ident()}

    packed = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t)
    with hooks:
        pipe(x)
    assert len(packed) >= 8


def test_interception_is_noticed():
    # These are private to PyTorch: when one goes, this says which.
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    assert not is_intercepted()
    for mode in (TorchFunctionMode, TorchDispatchMode):
        with mode():
            assert is_intercepted()
    with torch.device("cpu"):
        assert not is_intercepted(), "a default device is set up in lanes, too"
    with torch.autograd.graph.save_on_cpu():
        assert is_intercepted()
    assert torch.func.vmap(lambda x: x + is_intercepted())(torch.zeros(1)) == 1
    assert not is_intercepted()


def test_a_hook_may_call_the_pipeline_again(pipe):
    x, seen, called = torch.randn(8, 4), [], []

    def again(module, args, output):
        if not called and threading.current_thread() is not threading.main_thread():
            called.append(True)
            seen.append(pipe(x))

    handle = pipe.module.a.register_forward_hook(again)
    y = pipe(x)
    handle.remove()
    assert same(seen[0], y)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_lanes_of_its_own(pipe):
    x = torch.randn(8, 4)
    expected = pipe(x).detach()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of threads and forks in general
        child = os.fork()
    if child == 0:
        try:
            os.write(writing, b"y" if same(pipe(x).detach(), expected) else b"n")
        finally:
            os._exit(0)
    assert select.select([reading], [], [], 60)[0], "the child hangs"
    assert os.read(reading, 1) == b"y"
    os.waitpid(child, 0)


def test_a_hook_may_close_the_pipeline(lanes):
    pipe = fxpipe.compile(Watched(), ["cpu", "cpu"], chunks=2, partition=["b"])
    x = torch.randn(4, 4)
    pipe.prepare(x)
    trouble["a"] = lambda x: pipe.close()
    assert pipe(x).shape == (4, 4)
    trouble.clear()
    deadline = time.monotonic() + 30
    while lanes() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not lanes()


def test_threads_that_are_ended_at_any_time_lose_no_call(pipe):
    x, is_over = torch.randn(8, 4), threading.Event()
    expected, threads = pipe(x), pipe._runner._lanes

    def close():
        while not is_over.is_set():
            threads.close()

    closing = threading.Thread(target=close)
    closing.start()
    try:
        assert all(same(pipe(x), expected) for _ in range(100))
    finally:
        is_over.set()
        closing.join()


def end(thread):
    """Ends a thread, as soon as it runs Python again."""
    identity = ctypes.c_ulong(thread.ident)
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(SystemExit)) == 1


@contextlib.contextmanager
def suppress_only(kind, match):
    """A context in which an error of this kind may be raised, if it says this."""
    try:
        yield
    except kind as error:
        assert match in str(error)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("lane", [0, 1])
def test_a_lane_whose_thread_is_ended_from_outside_lets_nobody_wait(pipe, lane):
    x = torch.randn(8, 4)
    expected = pipe(x)
    threads = list(pipe._runner._lanes._threads)
    end(threads[lane])
    faulthandler.dump_traceback_later(60, exit=True)  # if somebody waits nevertheless
    try:
        # A thread that does not wait for its next job yet ends at once, ahead of the call.
        with suppress_only(RuntimeError, match=f"lane {lane} has been ended from outside"):
            assert same(pipe(x), expected)
        assert same(pipe(x), expected)
    finally:
        faulthandler.cancel_dump_traceback_later()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()


def test_the_jobs_of_a_thread_that_is_ended_from_outside_are_lost_whenever_they_are_put():
    done, lost = [], []

    def put(name):
        queue.put(partial(done.append, name), partial(lost.append, name))

    def is_ended():
        raise SystemExit

    queue = JobQueue()
    put("first")
    queue.put(is_ended, partial(lost.append, "during"))
    put("waiting")
    with pytest.raises(SystemExit):
        queue.work()
    assert (done, lost) == (["first"], ["waiting", "during"])
    put("afterwards")
    assert (done, lost) == (["first"], ["waiting", "during", "afterwards"])
